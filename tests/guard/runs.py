"""A run without training: records as an engine would make them, with noise that is the same each time."""

import random
from collections.abc import Callable
from typing import Any

from commopt.guard import Guard, GuardConfig, Verdict
from commopt.records import StepRecord

HEALTHY = StepRecord(
    step=0,
    plan="topk",
    finite=True,
    out_of_memory=False,
    loss=3.0,
    gradient_norm=1.0,
    step_seconds=0.1,
    exposed_seconds=0.0,
    wire_seconds=0.0,
    codec_seconds=0.0,
    bytes_sent=1.0,
    bytes_uncompressed=10.0,
)


class Run:
    """Feeds a guard."""

    def __init__(self, guard: Guard | None = None, noise: float = 0.02, **options: Any) -> None:
        self.guard = guard or Guard(GuardConfig(**options))
        self.step = 0
        self.noise = noise
        self._random = random.Random(0)

    def go(
        self,
        steps: int = 1,
        compressed: bool = True,
        level: float | Callable[[int], float] = 3.0,
        factor: float = 1.0,
        **fields: Any,
    ) -> list[Verdict]:
        """``steps`` steps at a level of the loss, which may depend on how many have passed; returns their verdicts."""
        verdicts = []
        for passed in range(steps):
            here = level(passed) if callable(level) else level
            values = {
                "step": self.step,
                "loss": here + abs(here) * self.noise * self._random.gauss(0, 1),
                "gradient_norm": factor * self._random.lognormvariate(0, 0.1),
            }
            record = StepRecord(**{**vars(HEALTHY), **values, **fields})
            verdicts.append(self.guard.step(record, compressed))
            self.step += 1
        return verdicts

    def mode(self) -> str:
        """The guard's mode, now."""
        return self.guard.mode

    def bad_windows(self, count: int = 2) -> list[Verdict]:
        """Windows of 50 steps at whose end the delivered gradient has little to do with the true one."""
        return [verdict for _ in range(count) for verdict in self.go(49) + self.go(1, sign_agreement=0.05)]


def actions(verdicts: list[Verdict]) -> list[str]:
    """What was done, without the steps at which nothing was."""
    return [verdict.action for verdict in verdicts if verdict.action != "pass"]
