"""The one file of a launch: Accelerate's own keys, and a ``commopt:`` section.

Accelerate refuses keys that it does not know, and passes over unknown ones within its sections without a word. Here
both are errors. What is known is asked of Accelerate itself: of its configuration class, and of its launcher's options,
which is where sections end up.
"""

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_origin, get_type_hints

from accelerate.commands.config.config_args import ClusterConfig  # type: ignore[import-untyped]
from accelerate.commands.launch import launch_command_parser  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]

from commopt.config import CommOptConfig, read_yaml
from commopt.errors import ConfigError, unknown
from commopt.plan import Plan

SECTION = "commopt"
LOCAL = "LOCAL_MACHINE"
_UNQUOTED = " (without quotes, no and off are false in YAML: write 'no')"
_MAY_LACK_PREFIX = ("fsdp", "fp8", "dynamo")  # accelerate puts it before the keys of these sections
_TYPES = {int: "a whole number", str: "text", bool: "true or false", dict: "keys and values below it", list: "a list"}


@dataclass(frozen=True)
class LaunchFile:
    """What such a file says.

    Args:
        accelerate: Accelerate's part, with all keys known to it.
        config: the ``commopt:`` section; None where there is none.
    """

    accelerate: Mapping[str, Any]
    config: CommOptConfig | None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "LaunchFile":
        """Reads a YAML or JSON file.

        Raises:
            ConfigError: no such file, an unknown key (the nearest one is named), a wrong value; it names the file.
        """
        values = read_yaml(path)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LaunchFile":
        """The same from plain data."""
        own = {key: value for key, value in values.items() if key != SECTION}
        _check(own)
        if SECTION not in values:
            return cls(own, None)
        section = values[SECTION]
        if not isinstance(section, Mapping):
            raise ConfigError(f"{SECTION}: expected lines such as 'compressor: auto' below it, got {section!r}.")
        try:
            config = CommOptConfig.from_dict(section)
            Plan.from_config(config)  # for the names of compressors and their options
        except ConfigError as error:
            raise ConfigError(f"{SECTION}: {error}") from error
        return cls(own, config)


def _check(values: Mapping[str, Any]) -> None:
    if values.get("compute_environment", LOCAL) != LOCAL:
        raise ConfigError(f"compute_environment: commopt launch starts processes on this machine, so only {LOCAL}.")
    parser = launch_command_parser()
    options = {action.dest: action for action in parser._actions}
    kinds = [kind.value for kind in DistributedType]
    _check_choice("distributed_type", values.get("distributed_type"), kinds)
    if values.get("mixed_precision") is not None:
        _check_choice("mixed_precision", values["mixed_precision"], options["mixed_precision"].choices)
    known = {entry.name for entry in fields(ClusterConfig)}
    for key in ClusterConfig.process_config(dict(values)):  # it renames what older releases wrote
        if key not in known:
            raise unknown("key", key, known | {SECTION})
    hints = get_type_hints(ClusterConfig)
    for key, value in values.items():
        if key in hints:
            _check_type(key, value, hints[key])
        if isinstance(value, Mapping):
            _check_section(key, value, parser)


def _check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        got = "nothing" if value is None else f"{value!r}{_UNQUOTED if value is False else ''}"
        raise ConfigError(f"{key}: expected one of {', '.join(choices)}, got {got}.")


def _check_type(key: str, value: Any, hint: Any) -> None:
    kinds = [get_origin(hint), hint, *get_args(hint)]  # of list[str], str, or Optional[str]
    kind = next((kind for kind in kinds if kind in _TYPES), None)
    if kind is None or (value is None and hint is not int):
        return
    allowed = (bool, str) if kind is bool else kind  # `accelerate config` writes 'no' for some
    if not isinstance(value, allowed) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{key}: expected {_TYPES[kind]}, got {value!r}{_UNQUOTED if value is False else ''}.")


def _check_section(section: str, values: Mapping[str, Any], parser: argparse.ArgumentParser) -> None:
    """The launcher's options of the group that serves this section are its keys."""
    stem = section.removesuffix("_config")
    groups = [{action.dest for action in group._group_actions} for group in parser._action_groups]
    valid = next(names for names in groups if any(name.startswith(stem) for name in names))
    if stem == "dynamo":  # shares its group with what is none of its business
        valid = {name for name in valid if name.startswith(stem)}
    for key in map(str, values):
        whole = key if key.startswith(stem) or stem not in _MAY_LACK_PREFIX else f"{stem}_{key}"
        if whole not in valid:
            raise unknown(f"key in {section}", key, valid)
