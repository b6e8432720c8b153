"""Makes the Trainers and Fabrics of a program that knows nothing of commopt use a strategy of commopt's.

Lightning starts the other processes of a host by the command of the first one, as far as it knows that: they are led
through the runner, too.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from commopt import CommOptConfig, ConfigError
from commopt.errors import CommOptWarning, unknown
from lightning_commopt.arguments import Compressing, base_of

LAUNCHER = "strategies.launchers.subprocess_script"


class FrontEnd(NamedTuple):
    """A class that takes a strategy, and where the strategies for it are registered."""

    package: str
    door: str
    registry: str


FRONT_ENDS = (
    FrontEnd("lightning.pytorch", "Trainer", "StrategyRegistry"),
    FrontEnd("lightning.fabric", "Fabric", "STRATEGY_REGISTRY"),
    FrontEnd("pytorch_lightning", "Trainer", "StrategyRegistry"),
    FrontEnd("lightning_fabric", "Fabric", "STRATEGY_REGISTRY"),
)


def installed() -> list[FrontEnd]:
    """Those whose package is installed."""
    return [end for end in FRONT_ENDS if find_spec(end.package.partition(".")[0])]


def install(name: str, config: CommOptConfig | None = None) -> None:
    """From now on, the strategy ``name`` stands in this process under the names of Lightning's DDP, of which
    ``"auto"`` takes one for several devices, and under those of commopt; ``config`` says more of it. A Trainer or
    Fabric that comes out with one device warns, and one that comes out with another strategy raises ``ConfigError``.

    Raises:
        ConfigError: no strategy of commopt's has this name, or ``config`` cannot be for it.
    """
    for end in installed():
        strategies: Any = import_module(f"{end.package}.strategies")
        registry = getattr(strategies, end.registry)
        ours = [key for key in registry if key.startswith(Compressing.strategy_name)]
        if name.lower() not in ours:
            raise unknown("strategy", name, ours)
        kind, chosen = registry[name.lower()]["strategy"], registry[name.lower()]["init_params"]
        if config is not None:
            chosen = chosen | _arguments(name, chosen, config)
        kind(**chosen)  # so that a mistake shows before the script runs
        for key, entry in list(registry.items()):
            if entry["strategy"] in (kind, base_of(kind)):
                own = {key: value for key, value in entry["init_params"].items() if key != "compressor"}
                registry.register(key, kind, description=entry["description"], override=True, **(own | chosen))
        _watch(getattr(import_module(end.package), end.door), strategies.SingleDeviceStrategy, name)


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


def _watch(door: Any, single: type, name: str) -> None:
    """Says what came out of it where a ``door`` took a strategy that is not commopt's."""
    make = door.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        strategy = type(self.strategy)
        if issubclass(strategy, single):
            warnings.warn(
                f"this {door.__name__} has one device, and nobody to exchange gradients with: {name!r} does nothing "
                "there. Give it devices=2, or num_nodes=2.",
                CommOptWarning,
                stacklevel=2,
            )
        elif not issubclass(strategy, Compressing):
            raise ConfigError(
                f"{door.__name__} uses {strategy.__name__}, which cannot become {name!r}: that takes the place of "
                "'auto' and of the names of Lightning's DDP. Leave out --strategy, or let the script ask for 'ddp'."
            )

    door.__init__ = __init__


def _arguments(name: str, chosen: dict[str, Any], config: CommOptConfig) -> dict[str, Any]:
    """What ``config`` says, as arguments of the strategy ``name``, whose own are ``chosen``."""
    if chosen.get("compressor", config.compressor) != config.compressor:
        raise ConfigError(
            f"--strategy {name} and the configuration, with compressor {config.compressor!r}, are of two minds: "
            "leave one of them out."
        )
    return {
        "compressor": config.compressor,
        "error_feedback": config.error_feedback,
        "checked": config.checked,
        "quality": config.quality,
        "timeout": timedelta(seconds=config.timeout),
        **config.options,
    }
