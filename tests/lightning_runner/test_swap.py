"""What is swapped, and what is left as it is or refused, with words."""

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest

from commopt import CommOptConfig, CommOptWarning, ConfigError
from lightning_commopt import swap
from lightning_commopt.arguments import Compressing, base_of
from tests.lightning_runner.programs import forgotten

each = pytest.mark.parametrize("end", swap.FRONT_ENDS, ids=lambda end: end.package)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with forgotten():
        yield


def strategy_of(end: swap.FrontEnd, strategy: Any = "auto", devices: int = 2) -> Any:
    """That of a Trainer or a Fabric which was asked for ``strategy``."""
    quiet: dict[str, Any] = {} if end.door == "Fabric" else {"logger": False, "enable_checkpointing": False}
    door = getattr(import_module(end.package), end.door)
    return door(accelerator="cpu", devices=devices, strategy=strategy, **quiet).strategy


def kind_of(end: swap.FrontEnd, name: str) -> Any:
    return getattr(import_module(f"{end.package}.strategies"), name)


@each
def test_the_names_of_ddp_and_ours_are_swapped(end: swap.FrontEnd) -> None:
    swap.install("COMMOPT_ddp_int8")
    names = ["auto", "ddp", "DDP", "ddp_spawn", "ddp_find_unused_parameters_true", "commopt_ddp", "commopt_ddp_topk"]
    for name in [*names, "commopt_ddp_find_unused_parameters_true"]:
        strategy = strategy_of(end, name)
        assert isinstance(strategy, Compressing)
        assert isinstance(strategy, kind_of(end, "DDPStrategy"))
        assert strategy.config == CommOptConfig("int8")
        assert strategy._start_method == ("spawn" if "spawn" in name else "popen")
        assert strategy._ddp_kwargs.get("find_unused_parameters", False) == ("unused" in name)


@each
def test_a_configuration_says_more(end: swap.FrontEnd) -> None:
    config = CommOptConfig("topk", {"density": 0.1}, False, timeout=60, checked=True)
    swap.install("commopt_ddp", config)
    strategy = strategy_of(end)
    assert strategy.config == config
    assert strategy._timeout == timedelta(seconds=60)


@each
def test_a_single_device_is_left_with_a_warning(end: swap.FrontEnd) -> None:
    swap.install("commopt_ddp_int8")
    with pytest.warns(CommOptWarning, match=f"{end.door} has one device, .* 'commopt_ddp_int8' does nothing") as caught:
        strategy = strategy_of(end, devices=1)
    assert type(strategy) is kind_of(end, "SingleDeviceStrategy")
    assert caught[0].filename == __file__  # where it was made


@each
def test_another_strategy_is_an_error(end: swap.FrontEnd) -> None:
    fsdp = kind_of(end, "FSDPStrategy")
    own = type("Sharded", (fsdp,), {})()  # by its exact type, Lightning refuses it on CPUs
    swap.install("commopt_ddp_int8")
    for strategy, name in ((own, "Sharded"), (kind_of(end, "DDPStrategy")(), "DDPStrategy")):
        with pytest.raises(
            ConfigError, match=rf"{end.door} uses {name}, which cannot become 'commopt_ddp_int8': .*'ddp'"
        ):
            strategy_of(end, strategy)


@each
def test_an_object_of_ours_is_what_the_script_wants(end: swap.FrontEnd) -> None:
    swap.install("commopt_ddp_int8")
    kind = type(strategy_of(end))
    assert base_of(kind) is kind_of(end, "DDPStrategy")
    mine = kind("powersgd", rank=2)
    assert strategy_of(end, mine) is mine


def test_only_what_is_installed_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "find_spec", lambda name: name == "lightning" or None)
    assert [end.package for end in swap.installed()] == ["lightning.pytorch", "lightning.fabric"]
