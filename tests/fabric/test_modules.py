"""Fabric's loop: the same bits and bytes as bare torch, several models, and going on from a checkpoint."""

from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commopt
from commopt.errors import CommOptWarning
from tests.fabric.fabrics import PACKAGES, make_fabric, network, run_fabric, run_torch, sgd, train
from tests.lightning.fits import Batches, flat, rank_of_the_group
from tests.lightning.test_strategy import NAMES
from tests.workers import Workers

both = pytest.mark.parametrize("package", PACKAGES)


@both
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_and_bytes_are_those_of_bare_torch(workers: Workers, package: str, accumulate: int) -> None:
    mine = workers.run(run_fabric, strategy="commopt_ddp_int8", package=package, accumulate=accumulate)
    bare = workers.run(run_torch, compressor="int8", accumulate=accumulate)
    for one, other in zip(mine, bare, strict=True):
        assert one.losses == other.losses
        assert torch.equal(one.parameters, other.parameters)
        assert one.stats.bytes_sent == other.stats.bytes_sent > 0
        assert one.stats.steps == 6 / accumulate
        assert one.stats.compression_ratio > 3
    assert torch.equal(mine[0].parameters, mine[1].parameters)


def set_up(fabric: Any, module: nn.Module | None = None) -> tuple[Any, Any]:
    module = network() if module is None else module
    model, optimizer = fabric.setup(module, sgd(module))
    return model, optimizer


def two_models(rank: int, world: int) -> list[tuple[int, bool]]:
    """Steps of each handle, and whether it compressed its last one; the second has its compression switched off."""
    with rank_of_the_group(rank):
        fabric = make_fabric(world, "commopt_ddp_int8")
        assert fabric.strategy.handle is None
        first, second = (set_up(fabric) for _ in range(2))
        strategy = fabric.strategy
        assert [strategy.handle_of(first[0]), strategy.handle_of(second[0])] == strategy.handles
        assert strategy.handle is strategy.handles[0]
        assert strategy.handles[0].config.compressor == "int8"
        batches = Batches(rank, 3).batches
        train(fabric, *first, batches)
        strategy.handles[1].disable()
        train(fabric, *second, batches[:2])
        result = [(handle.stats().steps, handle.stats().compression_ratio > 3) for handle in strategy.handles]

        with pytest.raises(commopt.AttachError, match=r"call fabric\.setup\(model\) first"):
            strategy.handle_of(network())
        strategy.disable_compression()  # holds for what is set up later, too
        third = set_up(fabric, module := network())
        train(fabric, *third, batches)
        last = strategy.handles[-1].stats()
        result.append((last.steps, last.compression_ratio > 1.7))

        train(fabric, *set_up(fabric, module), batches[:1])  # set up again: the wrapper before it ends
        assert len(strategy.handles) == 3
        assert strategy.handles[-1].stats().steps == 1
        strategy.teardown()
    return result


def test_every_model_has_a_handle_of_its_own(workers: Workers) -> None:
    assert workers.run(two_models) == [[(3, True), (2, False), (3, False)]] * 2


def resumed(rank: int, world: int, folder: str, package: str, watched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters of an uninterrupted training, of one that went on from a checkpoint, and of one that went on without
    what commopt had saved."""
    batches = Batches(rank, 8).batches
    with rank_of_the_group(rank):

        def begin() -> Any:
            fabric = make_fabric(world, "commopt_ddp_onebit", package)
            model, optimizer = fabric.setup(module := network(), sgd(module))
            if watched:
                fabric.strategy.supervise(model, {"model": model, "optimizer": optimizer})
            return fabric, model, optimizer

        def end(fabric: Any, model: Any) -> Tensor:
            fabric.strategy.teardown()
            return flat(model)

        path = f"{folder}/last.ckpt"
        fabric, model, optimizer = begin()
        train(fabric, model, optimizer, batches[:2])
        fabric.save(path, {"net": model, "optimizer": optimizer, "seen": 2})
        train(fabric, model, optimizer, batches[2:4])
        fabric.save(path, {"net": model, "optimizer": optimizer, "seen": 4})
        assert len(list(Path(f"{path}.commopt").iterdir())) == 1  # that of the checkpoint before is gone
        train(fabric, model, optimizer, batches[4:])
        whole = end(fabric, model)

        fabric, model, optimizer = begin()
        state = {"net": model, "optimizer": optimizer, "seen": 0}
        assert fabric.load(path, state) == {}
        assert state["seen"] == 4
        assert fabric.strategy.handle.engine.step == 3
        train(fabric, model, optimizer, batches[4:])
        again = end(fabric, model)

        fabric, model, optimizer = begin()
        weights = {"net": model.module, "optimizer": optimizer}  # a module that Fabric did not wrap
        with pytest.warns(CommOptWarning, match=r"not taken over: call fabric\.setup\(model\) before fabric\.load"):
            fabric.load(path, weights, strict=False)
        train(fabric, model, optimizer, batches[4:])
        with pytest.raises(commopt.ConfigError, match="the key 'commopt' in a checkpoint is for commopt"):
            fabric.save(path, {"commopt": 1, "net": model})
        return whole, again, end(fabric, model)


@pytest.mark.parametrize(("package", "watched"), list(zip(PACKAGES, [False, True], strict=True)))
def test_a_training_goes_on_with_the_same_bits(workers: Workers, tmp_path: Path, package: str, watched: bool) -> None:
    for whole, again, without in workers.run(resumed, folder=str(tmp_path), package=package, watched=watched):
        assert torch.equal(whole, again)
        assert not torch.equal(whole, without)


def rolled_back(rank: int, world: int, folder: str) -> tuple[list[int], bool]:
    """Positions of a loop in which the loss explodes, and whether the guard compresses no more."""
    with rank_of_the_group(rank):
        fabric = make_fabric(world, "commopt_ddp_int8")
        model, optimizer = fabric.setup(module := network(), sgd(module))
        monitor = commopt.Monitor(folder, rank=rank, world=world, every=5)
        states = {"model": model, "optimizer": optimizer}
        guard = commopt.GuardConfig(window=16)
        watch = fabric.strategy.supervise(model, states, guard=guard, monitor=monitor, every=5)
        positions: list[int] = []
        step = 0
        inputs, targets = Batches(rank, 1).batches[0]
        while step < 45 and len(positions) < 60:
            loss = nn.functional.mse_loss(model(inputs), targets)
            watch.observe(loss * 1e4 if 40 <= len(positions) < 44 else loss)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            positions.append(step)
            step = watch.end_step(step)
        uncompressed = fabric.strategy.handle.engine.restraint is None
        fabric.strategy.teardown()
    return positions, uncompressed


@pytest.mark.filterwarnings("ignore::commopt.CommOptWarning")
def test_a_loop_that_is_watched_goes_back(workers: Workers, tmp_path: Path) -> None:
    (positions, uncompressed), other = workers.run(rolled_back, folder=str(tmp_path))
    assert (positions, uncompressed) == other
    assert any(later <= earlier for earlier, later in pairwise(positions))
    assert uncompressed
    assert '"roll_back"' in (tmp_path / "commopt.jsonl").read_text()


@both
def test_names_and_arguments(package: str) -> None:
    registry = import_module(f"{package}.strategies").STRATEGY_REGISTRY
    assert {name for name in registry if name.startswith("commopt")} == NAMES
    ours = type(registry.get("commopt_ddp_topk"))
    strategy = ours("topk", density=0.05, rank=None, bucket_cap_mb=9, find_unused_parameters=True)
    assert strategy.config == commopt.CommOptConfig("topk", {"density": 0.05})
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 9, "find_unused_parameters": True}
    with pytest.raises(commopt.ConfigError, match="'find_unused_parameter'; did you mean 'find_unused_parameters'"):
        ours(find_unused_parameter=True)
