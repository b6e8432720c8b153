"""Between dataclasses and the plain values of JSON, checked on the way in."""

import math
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

EXACT = 2**53  # up to here JSON's readers agree on integers


def to_plain(value: Any) -> Any:
    """``value`` as JSON can hold it: dataclasses and mappings become dictionaries, NaN and infinity ``None``.

    Raises:
        TypeError: something else than dataclasses, mappings, sequences, strings and numbers.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    return {entry.name: to_plain(getattr(value, entry.name)) for entry in fields(value)}


def from_plain(cls: type[T], values: object) -> T:
    """A flat dataclass from what ``to_plain`` made of it; ``None`` is NaN where a number is due.

    Raises:
        ValueError: not a dictionary, a missing or unknown key, or a value of another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{values!r:.40} is not an object")
    hints = get_type_hints(cls)
    if missing := hints.keys() - values.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    if unknown := values.keys() - hints.keys():
        raise ValueError(f"it has the unknown {', '.join(sorted(map(str, unknown)))}")
    return cls(**{name: _checked(name, values[name], hint) for name, hint in hints.items()})


def _checked(name: str, value: Any, hint: Any) -> Any:
    if hint is float and value is None:
        return math.nan
    if not _fits(value, hint):
        raise ValueError(f"{name} cannot be {value!r:.40}")
    return float(value) if hint is float else value


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, float) or _fits(value, int)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= EXACT
    return isinstance(value, NoneType if hint is None else origin or hint)
