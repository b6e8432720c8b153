"""Reading saved state back: every value is checked for its type before it is believed."""

from collections.abc import Mapping
from typing import Any

from commopt.errors import CheckpointError

LARGEST = 1e120  # squares of it are finite


def integer(state: Mapping[str, Any], key: str, low: int = 0, high: int = 1 << 62) -> int:
    """The whole number under ``key``, from ``low`` to ``high``."""
    value = _get(state, key)
    if type(value) is not int or not low <= value <= high:
        raise _wrong(key, f"a whole number from {low} to {high}", value)
    return value


def number(state: Mapping[str, Any], key: str, low: float) -> float:
    """The finite number under ``key``, at least ``low``."""
    value = _get(state, key)
    if not _finite(value) or value < low:
        raise _wrong(key, f"a finite number of at least {low}", value)
    return float(value)


def numbers(state: Mapping[str, Any], key: str, most: int, like: int | None = None) -> list[float]:
    """The list of finite numbers under ``key``: at most ``most``, and as many as ``like``."""
    value = _get(state, key)
    if not isinstance(value, list) or not all(_finite(entry) for entry in value):
        raise _wrong(key, "a list of finite numbers", value)
    if len(value) > most or (like is not None and len(value) != like):
        raise _wrong(key, f"{f'at most {most}' if like is None else like} numbers", value)
    return [float(entry) for entry in value]


def flag(state: Mapping[str, Any], key: str) -> bool:
    """The truth value under ``key``."""
    value = _get(state, key)
    if type(value) is not bool:
        raise _wrong(key, "true or false", value)
    return value


def word(state: Mapping[str, Any], key: str, *valid: str) -> str:
    """The word under ``key``, one of ``valid``."""
    value = _get(state, key)
    if value not in valid:
        raise _wrong(key, f"one of {', '.join(valid)}", value)
    return str(value)


def section(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under ``key``."""
    value = _get(state, key)
    if not isinstance(value, Mapping):
        raise _wrong(key, "a mapping", value)
    return value


def _get(state: Mapping[str, Any], key: str) -> Any:
    if key not in state:
        raise CheckpointError(
            f"the saved state of the guard lacks {key!r}; start without it, or use another checkpoint."
        )
    return state[key]


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _wrong(key: str, wanted: str, value: object) -> CheckpointError:
    return CheckpointError(f"the saved state of the guard: {key!r} must be {wanted}, got {str(value)[:60]!r}.")
