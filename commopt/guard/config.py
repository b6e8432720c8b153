"""What the guard is told, and what it answers."""

from dataclasses import dataclass
from typing import Literal

from commopt.errors import ConfigError

Decision = Literal["pass", "skip", "fall_back", "roll_back", "re_arm", "stop"]


@dataclass(frozen=True)
class GuardConfig:
    """When a run is in trouble.

    Args:
        sigma: a loss or gradient norm this many standard deviations above its median is a spike.
        window: steps over which median and deviation are taken; there is no spike before it is full.
        allowed_loss: relative excess of the validation loss over the best uncompressed one.
        cool_down: steps without compression after the first alarm; twice as many after each further one.
        roll_backs: after this many the run is finished without compression.
        min_agreement: of the signs of delivered and true mean gradients of a window, from -1 to 1. Under Adam, what
            loses less than 0.5 % of the validation loss shows 0.95 and more.
        roll_back_rise: relative rise of the loss from which a drift is rolled back; below it, training falls back.

    Raises:
        ConfigError: a field is of the wrong type or out of range.
    """

    sigma: float = 6.0
    window: int = 128
    allowed_loss: float = 0.005
    cool_down: int = 200
    roll_backs: int = 3
    min_agreement: float = 0.12
    roll_back_rise: float = 0.05

    def __post_init__(self) -> None:
        self._check("sigma", 1, 1000)
        self._check("window", 16, 100_000, whole=True)
        self._check("allowed_loss", 0, 1)
        self._check("cool_down", 1, 1_000_000_000, whole=True)
        self._check("roll_backs", 1, 1000, whole=True)
        self._check("min_agreement", -1, 1)
        self._check("roll_back_rise", 0, 1000)

    def _check(self, name: str, low: float, high: float, whole: bool = False) -> None:
        value = getattr(self, name)
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{name} must be {kind} from {low} to {high}, got {value!r}.")


@dataclass(frozen=True)
class Verdict:
    """What is to be done about a step.

    Args:
        action: ``"pass"``: nothing. ``"skip"``: the step is not taken. ``"fall_back"``: go on without compression.
            ``"roll_back"``: go back to before ``onset``, then as ``"fall_back"``. ``"re_arm"``: compression comes back.
            ``"stop"``: the run diverges without compression, too.
        reason: in words, with figures; the first word is what noticed: non-finite, memory, spike, drift, fidelity,
            validation or cool-down. May be empty for ``"pass"``.
        onset: the first step at which the trouble may have begun; a snapshot to go back to is older.
    """

    action: Decision
    reason: str = ""
    onset: int | None = None
