"""The one configuration that every front end builds: from keyword arguments, plain data, a file or the environment."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from commopt.errors import ConfigError, unknown

AUTO = "auto"
VARIABLE = "COMMOPT_CONFIG"  # of the environment, for a launched child
VERSION = 1  # of what files hold
BUCKET_CAP_MB = 3.0  # of DDP, where the user chose none: torch's 25 leave the link idle during most of backward
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
            of uncompressed training in benchmarks; ``"aggressive"``, also what needs more steps to the same loss, where
            these cost less time.

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
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise ConfigError(f"options must be a mapping of option names to values, got {self.options!r}.")
        if self.quality not in QUALITIES:
            raise ConfigError(f"quality must be one of {', '.join(QUALITIES)}, got {self.quality!r}.")
        if not isinstance(self.error_feedback, bool | None):
            raise ConfigError(f"error_feedback must be true, false or null, got {self.error_feedback!r}.")
        if self.automatic and (self.options or self.error_feedback is not None):
            raise ConfigError(
                "compressor='auto' chooses options and error feedback itself: leave them out, or name a compressor."
            )
        if not isinstance(self.checked, bool):
            raise ConfigError(f"checked must be true or false, got {self.checked!r}.")
        number = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not number or not 0 < self.timeout < float("inf"):
            raise ConfigError(f"timeout must be a positive number of seconds, got {self.timeout!r}.")

    @property
    def automatic(self) -> bool:
        """Whether measurements decide."""
        return self.compressor == AUTO

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CommOptConfig":
        """Builds a configuration from plain data, which may carry ``"version": 1``.

        Raises:
            ConfigError: an unknown key (the message names the nearest one), another version, or a wrong value.
        """
        given = {"version": VERSION, **values}
        names = {entry.name for entry in fields(cls)}
        for key in given:
            if key not in names | {"version"}:
                raise unknown("configuration key", str(key), names | {"version"})
        version = given.pop("version")
        if version != VERSION or isinstance(version, bool):
            raise ConfigError(
                f"version {version!r} of the configuration is not known here, only version {VERSION}: write the file "
                "anew, or use the release of commopt that it was written for."
            )
        return cls(**given)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> "CommOptConfig":
        """Reads a YAML (or JSON) file with the keys that `from_dict` takes.

        Raises:
            ConfigError: no such file, not YAML, or not a configuration; the message begins with the path.
        """
        values = read_yaml(path)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error

    def to_environment(self) -> dict[str, str]:
        """The variable of the environment that a launched child reads by `from_environment`.

        Raises:
            ConfigError: an option of the compressor is no plain value.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)} | {"options": dict(self.options)}
        try:
            return {VARIABLE: json.dumps({"version": VERSION, **values})}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"options have to be plain values, to be handed to other processes: {error}.") from error

    @classmethod
    def from_environment(cls) -> "CommOptConfig | None":
        """What `to_environment` has left in the environment; None where it is not set.

        Raises:
            ConfigError: it was set by something else.
        """
        if not (text := os.environ.get(VARIABLE)):
            return None
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ConfigError("not a mapping of keys to values")
            return cls.from_dict(values)
        except ValueError as error:  # a ConfigError, too
            raise ConfigError(
                f"{VARIABLE} in the environment: {error} (commopt's launcher sets it; unset it)."
            ) from error


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a YAML (or JSON) file holds.

    Raises:
        ConfigError: no such file, not YAML, empty, or something else than a mapping with words as keys.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ConfigError("to read YAML files, PyYAML is needed: pip install pyyaml") from error
    name = os.fspath(path)
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"{name}: cannot be read: {reason}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: this is not valid YAML: {error}") from error
    if values is None:
        raise ConfigError(f"{name}: the file is empty; one line such as 'compressor: auto' is enough.")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name}: expected lines of the form 'key: value', got {str(values)[:60]!r}.")
    return values
