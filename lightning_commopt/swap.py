"""Makes the Trainers and Fabrics of a program that knows nothing of commopt use a strategy of commopt's.

Lightning starts the other processes of a host by the command of the first one, as far as it knows that: they are led
through the runner, too.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from commopt import CommOptConfig, ConfigError
from commopt.errors import unknown
from lightning_commopt.arguments import Compressing

LAUNCHER = "strategies.launchers.subprocess_script"


class FrontEnd(NamedTuple):
    """A class that takes a strategy, and where the strategies for it are registered."""

    package: str
    door: str
    registry: str

    @property
    def strategies(self) -> dict[str, dict[str, Any]]:
        """All that are registered: class and arguments, by name."""
        found: dict[str, dict[str, Any]] = getattr(import_module(f"{self.package}.strategies"), self.registry)
        return found


FRONT_ENDS = (
    FrontEnd("lightning.pytorch", "Trainer", "StrategyRegistry"),
    FrontEnd("lightning.fabric", "Fabric", "STRATEGY_REGISTRY"),
    FrontEnd("pytorch_lightning", "Trainer", "StrategyRegistry"),
    FrontEnd("lightning_fabric", "Fabric", "STRATEGY_REGISTRY"),
)


def installed() -> list[FrontEnd]:
    """Those whose package is installed."""
    return [end for end in FRONT_ENDS if find_spec(end.package.partition(".")[0])]


def check(name: str, config: CommOptConfig | None) -> None:
    """Makes the strategies that will be swapped in, once, so that mistakes show before the script runs.

    Raises:
        ConfigError: no strategy of commopt's has this name, or ``config`` cannot be for it.
    """
    for end in installed():
        ours = [key for key, entry in end.strategies.items() if issubclass(entry["strategy"], Compressing)]
        if name.lower() not in ours:
            raise unknown("strategy", name, ours)
        _make(end, name, config, {})


def install(name: str, config: CommOptConfig | None = None) -> None:
    """From now on, a Trainer or a Fabric in this process that is asked for no strategy, for Lightning's DDP or for one
    of commopt's, by name, gets the strategy ``name``; ``config`` says more of it. Another one is an error."""
    for end in installed():
        _replace(end, name, config)


def lead(options: Sequence[str]) -> None:
    """Leads the processes that Lightning starts through ``python -m lightning_commopt`` with ``options``."""

    def ours(command: Sequence[str]) -> list[str]:
        return [command[0], "-m", "lightning_commopt", *options, *command[1:]]

    for end in installed():
        launcher: Any = import_module(f"{end.package}.{LAUNCHER}")
        _wrap(launcher, "_basic_subprocess_cmd", ours)
        _wrap(launcher, "_hydra_subprocess_cmd", lambda result: (ours(result[0]), result[1]))


def _wrap(module: Any, name: str, change: Callable[[Any], Any]) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    setattr(module, name, wrapped)


def _replace(end: FrontEnd, name: str, config: CommOptConfig | None) -> None:
    door: Any = getattr(import_module(end.package), end.door)
    make = door.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, strategy: Any = "auto", **kwargs: Any) -> None:
        make(self, *args, strategy=_instead_of(end, strategy, name, config), **kwargs)

    door.__init__ = __init__


def _instead_of(end: FrontEnd, asked: Any, name: str, config: CommOptConfig | None) -> Any:
    if isinstance(asked, Compressing):
        return asked
    arguments: dict[str, Any] | None = None
    if asked == "auto":
        arguments = {}
    elif isinstance(asked, str) and asked.lower() in end.strategies:
        entry = end.strategies[asked.lower()]
        if issubclass(entry["strategy"], Compressing):
            arguments = {}
        elif entry["strategy"].__name__ == "DDPStrategy":
            arguments = entry["init_params"]
    if arguments is None:
        raise ConfigError(
            f"{end.door}(strategy={asked!r}) cannot become {name!r}, which takes the place of 'auto' and of the names "
            "of Lightning's DDP. Leave out --strategy, or let the script ask for 'ddp'."
        )
    return _make(end, name, config, arguments)


def _make(end: FrontEnd, name: str, config: CommOptConfig | None, arguments: dict[str, Any]) -> Any:
    entry = end.strategies[name.lower()]
    chosen = dict(entry["init_params"])
    if config is not None:
        if chosen.get("compressor", config.compressor) != config.compressor:
            raise ConfigError(
                f"--strategy {name} and the configuration, with compressor {config.compressor!r}, are of two minds: "
                "leave one of them out."
            )
        chosen |= {"compressor": config.compressor, "error_feedback": config.error_feedback, **config.options}
        chosen |= {"checked": config.checked, "quality": config.quality, "timeout": timedelta(seconds=config.timeout)}
    return entry["strategy"](**{**arguments, **chosen})
