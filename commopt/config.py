"""The one configuration that every front end builds, from keyword arguments or from plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from commopt.errors import ConfigError, unknown

AUTO = "auto"
Quality = Literal["lossless", "safe", "aggressive"]
QUALITIES = get_args(Quality)


@dataclass(frozen=True)
class CommOptConfig:
    """What to do with the gradients of one model.

    Args:
        compressor: registered name of a compressor, see ``commopt.compressors.available()``, or ``"auto"``: what is
            measured decides, also to compress nothing.
        options: options of that compressor, for example ``{"rank": 4}`` for ``"powersgd"``.
        error_feedback: keep what compression lost and add it to the next gradient. ``None`` follows the
            compressor's declared guarantee (on where it loses more than 1 % of a gradient's energy).
        timeout: seconds that a rank waits for its peers in one collective.
        checked: compare a checksum of the mean gradient over ranks in every step, and skip a step where they differ.
        quality: what ``"auto"`` may choose: ``"lossless"``; ``"safe"``, what stayed within 0.5 % of the validation loss
            of uncompressed training in benchmarks; ``"aggressive"``, anything.

    Raises:
        ConfigError: a field is of the wrong type or out of range.

    >>> CommOptConfig.from_dict({"compressor": "powersgd", "options": {"rank": 2}}).options["rank"]
    2
    """

    compressor: str = AUTO
    options: Mapping[str, Any] = field(default_factory=dict)
    error_feedback: bool | None = None
    timeout: float = 1800.0
    checked: bool = False
    quality: Quality = "safe"

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, str):
            raise ConfigError(f"compressor must be a registered name, got {self.compressor!r}.")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options must be a mapping of option names to values, got {self.options!r}.")
        if self.quality not in QUALITIES:
            raise ConfigError(f"quality must be one of {', '.join(QUALITIES)}, got {self.quality!r}.")
        if self.error_feedback not in (None, True, False):
            raise ConfigError(f"error_feedback must be true, false or null, got {self.error_feedback!r}.")
        if self.automatic and (self.options or self.error_feedback is not None):
            raise ConfigError(
                "compressor='auto' chooses options and error feedback itself: leave them out, or name a compressor."
            )
        if not isinstance(self.checked, bool):
            raise ConfigError(f"checked must be true or false, got {self.checked!r}.")
        if not isinstance(self.timeout, (int, float)) or not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout must be a positive number of seconds, got {self.timeout!r}.")

    @property
    def automatic(self) -> bool:
        """Whether measurements decide."""
        return self.compressor == AUTO

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CommOptConfig":
        """Builds a configuration from plain data; an unknown key raises ``ConfigError`` naming the nearest one."""
        names = {entry.name for entry in fields(cls)}
        for key in values:
            if key not in names:
                raise unknown("configuration key", str(key), names)
        return cls(**values)
