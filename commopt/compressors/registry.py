"""Compressors by name: the ones that come with commopt, and those of others by decorator or entry point."""

import dataclasses
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from commopt.compressors.contract import Compressor
from commopt.errors import ConfigError, unknown

ENTRY_POINT_GROUP = "commopt.compressors"
_registry: dict[str, type[Compressor]] = {}
C = TypeVar("C", bound=type[Compressor])


def register(name: str) -> Callable[[C], C]:
    """Class decorator: makes a frozen dataclass that subclasses `Compressor` available under ``name``.

    A package can also name its class in the entry-point group ``commopt.compressors``; it is found without an import.

    Raises:
        ConfigError: the name is taken by another class, or the class is not a compressor.
    """

    def add(cls: C) -> C:
        if not (isinstance(cls, type) and issubclass(cls, Compressor) and dataclasses.is_dataclass(cls)):
            raise ConfigError(f"compressor {name!r} must be a dataclass that subclasses Compressor, got {cls!r}.")
        taken = _registry.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"compressor name {name!r} is taken by {taken.__module__}.{taken.__qualname__}.")
        cls.name = name
        _registry[name] = cls
        return cls

    return add


def available() -> tuple[str, ...]:
    """Names of all registered compressors, sorted, those of installed entry points included."""
    return tuple(sorted({*_registry, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))}))


def create(name: str, **options: Any) -> Compressor:
    """A compressor by name.

    Raises:
        ConfigError: unknown name or option (the nearest valid one is named), or a value out of range.

    >>> create("topk", density=0.05).density
    0.05
    """
    cls = _lookup(name)
    valid = {entry.name for entry in dataclasses.fields(cls) if entry.init}
    for key in options:
        if key not in valid:
            raise unknown(f"option of compressor {name!r}:", key, valid)
    return cls(**options)


def _lookup(name: str) -> type[Compressor]:
    if name not in _registry:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
            register(name)(entry.load())
    if name not in _registry:
        raise unknown("compressor", name, available())
    return _registry[name]
