"""The strategy before any process group: its arguments, its names, its two classes."""

import importlib
import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch
import lightning.pytorch.strategies
import pytest
import pytorch_lightning
import pytorch_lightning.strategies
import torch.distributed as dist

import commopt
import lightning_commopt.lightning
import lightning_commopt.pytorch_lightning
from lightning_commopt import CommOptDDPStrategy
from tests.lightning.fits import make_trainer

PACKAGES = [
    pytest.param(lightning.pytorch, lightning_commopt.lightning, id="lightning.pytorch"),
    pytest.param(pytorch_lightning, lightning_commopt.pytorch_lightning, id="pytorch_lightning"),
]
NAMES = {"commopt_ddp", "commopt_ddp_find_unused_parameters_true"} | {
    f"commopt_ddp_{name}" for name in commopt.compressors.available()
}


def hook(state: object, bucket: Any) -> Any:
    raise NotImplementedError


def test_arguments_go_where_they_belong() -> None:
    strategy = CommOptDDPStrategy(
        "powersgd",
        checked=True,
        rank=2,
        timeout=timedelta(seconds=60),
        process_group_backend="gloo",
        find_unused_parameters=True,
    )
    assert strategy.config == commopt.CommOptConfig("powersgd", {"rank": 2}, None, timeout=60.0, checked=True)
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=60)
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    assert strategy.handle is None
    assert not dist.is_initialized()


def test_the_default_decides_by_itself_with_lightnings_timeout() -> None:
    strategy = CommOptDDPStrategy()
    assert strategy.config == commopt.CommOptConfig("auto", {}, None, timeout=1800.0, quality="safe")
    assert CommOptDDPStrategy(quality="aggressive").config.quality == "aggressive"
    assert strategy._timeout == timedelta(seconds=1800)


def test_the_bucket_size_is_one_constant_and_the_users_word_counts_more() -> None:
    class Small(CommOptDDPStrategy):
        bucket_cap_mb = 4

    assert Small()._ddp_kwargs["bucket_cap_mb"] == 4
    assert Small(bucket_cap_mb=9)._ddp_kwargs["bucket_cap_mb"] == 9
    assert CommOptDDPStrategy()._ddp_kwargs["bucket_cap_mb"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressor": "in8"}, "unknown compressor 'in8'; did you mean 'int8'"),
        ({"compressor": "powersgd", "rnak": 2}, "'rnak'; did you mean 'rank'"),
        ({"find_unused_parameter": True}, "did you mean 'find_unused_parameters'"),
        ({"process_group_backnd": "gloo"}, "did you mean 'process_group_backend'"),
        ({"rank": 2}, "unknown argument of the strategy with 'auto': 'rank'"),  # an option of another compressor
        ({"module": None}, "unknown argument .* 'module'"),
        ({"compressor": "powersgd", "rank": 0}, "'rank' .* from 1 to 1024, got 0"),
        ({"compressor": "topk", "density": "much"}, "'density' .* must be a number"),
        ({"compressor": None}, "compressor must be a registered name"),
        ({"error_feedback": "yes"}, "error_feedback must be true, false or null"),
        ({"timeout": 60}, "timeout must be a datetime.timedelta"),
        ({"timeout": timedelta(0)}, "timeout must be a positive number of seconds"),
        ({"ddp_comm_hook": hook}, "ddp_comm_hook is not for commopt's strategy: .* here it is commopt's own"),
        ({"ddp_comm_wrapper": hook}, "ddp_comm_wrapper is not for commopt's strategy"),
        ({"model_averaging_period": 4}, "model_averaging_period is not for commopt's strategy"),
    ],
)
@pytest.mark.parametrize(("_", "ours"), PACKAGES)
def test_a_wrong_argument_is_refused_at_once(_: Any, ours: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(commopt.ConfigError, match=message):
        ours.CommOptDDPStrategy(**arguments)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("package", "ours"), PACKAGES)
def test_every_name_is_registered(package: Any, ours: Any) -> None:
    registry = package.strategies.StrategyRegistry
    assert {name for name in registry.available_strategies() if name.startswith("commopt")} == NAMES
    for name in commopt.compressors.available():
        strategy = registry.get(f"commopt_ddp_{name}")
        assert type(strategy) is ours.CommOptDDPStrategy
        assert strategy.config.compressor == name
    assert registry.get("commopt_ddp").config.compressor == "auto"
    assert registry.get("commopt_ddp_find_unused_parameters_true")._ddp_kwargs["find_unused_parameters"] is True


@pytest.mark.parametrize(("package", "ours"), PACKAGES)
def test_a_trainer_takes_the_name_and_the_strategy_of_its_package(package: Any, ours: Any) -> None:
    by_name = make_trainer(1, "COMMOPT_DDP_int4", package, devices=2).strategy
    assert type(by_name) is ours.CommOptDDPStrategy
    assert by_name.config.compressor == "int4"
    assert by_name.strategy_name == "commopt_ddp"
    assert by_name.num_processes == 2
    strategy = ours.CommOptDDPStrategy("powersgd", rank=2)
    assert make_trainer(1, strategy, package, devices=2).strategy is strategy
    assert not dist.is_initialized()


@pytest.fixture
def reload(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports lightning_commopt again as if only these packages were installed."""

    def again(*installed: str) -> Any:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
        return importlib.reload(lightning_commopt)

    yield again
    monkeypatch.undo()
    importlib.reload(lightning_commopt)


def test_importing_again_is_harmless(reload: Any) -> None:
    again = reload("lightning", "pytorch_lightning")
    assert again.CommOptDDPStrategy is lightning_commopt.lightning.CommOptDDPStrategy
    importlib.reload(lightning_commopt.pytorch_lightning)
    importlib.reload(lightning_commopt.strategy)


def test_the_class_is_that_of_the_package_that_is_installed(reload: Any) -> None:
    assert reload("lightning").CommOptDDPStrategy is lightning_commopt.lightning.CommOptDDPStrategy
    only = reload("pytorch_lightning").CommOptDDPStrategy
    assert only is lightning_commopt.pytorch_lightning.CommOptDDPStrategy
    assert issubclass(only, pytorch_lightning.strategies.DDPStrategy)
    with pytest.raises(ImportError, match=r"pip install 'commopt\[lightning\]'"):
        reload()
