"""The one configuration that every front end builds, from keyword arguments or from plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from commopt.errors import ConfigError, unknown


@dataclass(frozen=True)
class CommOptConfig:
    """What to do with the gradients of one model.

    Args:
        compressor: registered name of a compressor, see ``commopt.compressors.available()``.
        options: options of that compressor, for example ``{"rank": 4}`` for ``"powersgd"``.
        error_feedback: keep what compression lost and add it to the next gradient. ``None`` follows the
            compressor's declared guarantee (on where it loses more than 1 % of a gradient's energy).
        timeout: seconds that a rank waits for its peers in one collective.
        checked: compare a checksum of the mean gradient over ranks in every step, and skip a step where they differ.

    Raises:
        ConfigError: a field is of the wrong type or out of range.

    >>> CommOptConfig.from_dict({"compressor": "powersgd", "options": {"rank": 2}}).options["rank"]
    2
    """

    compressor: str = "int8"
    options: Mapping[str, Any] = field(default_factory=dict)
    error_feedback: bool | None = None
    timeout: float = 1800.0
    checked: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, str):
            raise ConfigError(f"compressor must be a registered name, got {self.compressor!r}.")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options must be a mapping of option names to values, got {self.options!r}.")
        if self.error_feedback not in (None, True, False):
            raise ConfigError(f"error_feedback must be true, false or null, got {self.error_feedback!r}.")
        if not isinstance(self.checked, bool):
            raise ConfigError(f"checked must be true or false, got {self.checked!r}.")
        if not isinstance(self.timeout, (int, float)) or not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout must be a positive number of seconds, got {self.timeout!r}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CommOptConfig":
        """Builds a configuration from plain data; an unknown key raises ``ConfigError`` naming the nearest one."""
        names = {entry.name for entry in fields(cls)}
        for key in values:
            if key not in names:
                raise unknown("configuration key", str(key), names)
        return cls(**values)
