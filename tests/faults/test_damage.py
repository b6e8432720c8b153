"""Damage that a run survives: flipped bits, codecs without memory or that break, payloads of another magnitude."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.errors import CommOptWarning, ExchangeError
from commopt.guard import GuardConfig
from commopt.resume.snapshot import RandomState, Stateful
from commopt.supervisor import Supervisor
from tests.engine.steps import same_on_all_ranks
from tests.faults.injector import Faults
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, loss_of, parameters, train
from tests.workers import Workers

on_all_routes = pytest.mark.parametrize(
    ("name", "world"),
    [  # "none" and powersgd by all-reduce, two ranks and sparse payloads by all-gather, int8 of three by two shots
        *(("none", 2), ("int8", 2), ("topk", 2), ("powersgd", 2)),
        *(("none", 3), ("int8", 3), ("topk", 3), ("powersgd", 3)),
    ],
)


def residuals(handle: commopt.Handle) -> list[Tensor]:
    """Copies of what is committed."""
    handle.engine.settle()
    return [residual.clone() for residual in handle.engine.residuals.final().values()]


# Flipped bits


def flip(rank: int, world: int, name: str) -> None:
    models = [DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    with attached(models[0], name, checked=True) as handle, attached(models[1], name), Faults(handle.engine) as faults:
        faults.at(rank=1, step=4).flip_bit()
        for step in range(8):
            if step == 4:
                weights, kept = parameters(models[0]), residuals(handle)
                optimizers[0].zero_grad()
                with pytest.warns(CommOptWarning, match="checksum of the mean gradient differs .* in step 4"):
                    loss_of(models[0], rank, 99).backward()
                record = handle.engine.record
                assert record is not None
                assert record.corrupt
                optimizers[0].step()
                assert equal(parameters(models[0]), weights)
                assert equal(residuals(handle), kept)
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, rank, range(step, step + 1))
            assert equal(parameters(models[0]), parameters(models[1])), step
        assert same_on_all_ranks(models[0].parameters())
        assert faults.struck["flip"] == (rank == 1)
        assert (handle.stats().steps, handle.stats().skipped_steps) == (8, 1)


@on_all_routes
def test_a_flipped_bit_is_as_if_it_had_never_been(workers: Workers, name: str, world: int) -> None:
    workers.run(flip, world, name=name)


def flip_unchecked(rank: int, world: int, name: str) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, name) as handle, Faults(handle.engine) as faults:
        faults.at(rank=1, step=4).flip_bit()
        train(model, optimizer, rank, range(4))
        assert same_on_all_ranks(model.parameters())
        train(model, optimizer, rank, range(4, 6))
        assert not same_on_all_ranks(model.parameters())


@on_all_routes
def test_ranks_drift_apart_where_nothing_is_checked(workers: Workers, name: str, world: int) -> None:
    workers.run(flip_unchecked, world, name=name)


# Codecs


def mean_gradients(model: DDP, rank: int, world: int, step: int) -> list[Tensor]:
    """As plain DDP would deliver them."""
    own = torch.autograd.grad(loss_of(model.module, rank, step), list(model.parameters()))
    return [_summed(gradient / world) for gradient in own]


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def delivered(model: DDP, rank: int, step: int) -> list[Tensor]:
    model.zero_grad()
    loss_of(model, rank, step).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def close(ones: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    torch.testing.assert_close(list(ones), list(others), rtol=1e-5, atol=1e-6)


def no_memory(rank: int, world: int, name: str) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, name) as handle, Faults(handle.engine) as faults:
        faults.at(rank=1, step=4).oom_in_compress()
        train(model, optimizer, rank, range(4))
        kept = residuals(handle)
        assert any(residual.any() for residual in kept)

        with pytest.warns(CommOptWarning, match="ran out of memory on a rank in step 4.* uncompressed from the next"):
            assert delivered(model, rank, 4) == []
        assert equal(residuals(handle), kept)
        record = handle.engine.record
        assert record is not None
        assert record.out_of_memory

        owed = [_summed(residual) for residual in kept]  # they hold parts of the mean
        expected = [mean + rest for mean, rest in zip(mean_gradients(model, rank, world, 5), owed, strict=True)]
        close(delivered(model, rank, 5), expected)
        assert handle.engine.plan.compressor.name == "none"
        assert not any(residual.any() for residual in residuals(handle))
        close(delivered(model, rank, 6), mean_gradients(model, rank, world, 6))  # once only

        if rank == 0:
            handle.enable()
        used = []
        for step in range(7, 9):
            train(model, optimizer, rank, range(step, step + 1))
            used.append(handle.engine.plan.compressor.name)
        assert used == ["none", name]
        assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize(("name", "world"), [("topk", 2), ("powersgd", 2), ("int4", 3), ("topk", 3)])
def test_all_go_on_uncompressed_where_one_codec_finds_no_memory(workers: Workers, name: str, world: int) -> None:
    workers.run(no_memory, world, name=name)


def broken(rank: int, world: int, name: str) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, name) as handle, Faults(handle.engine) as faults:
        faults.at(rank=world - 1, step=3).raise_in_compress("bad luck")
        train(model, optimizer, rank, range(3))
        weights, kept = parameters(model), residuals(handle)
        loss = loss_of(model, rank, 3)
        with pytest.raises(ExchangeError, match=rf"rank {world - 1} failed in message .*: ValueError: bad luck"):
            loss.backward()
        optimizer.step()
        assert equal(parameters(model), weights)
        assert equal(residuals(handle), kept)
        train(model, optimizer, rank, range(4, 6))
        assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize(("name", "world"), [("topk", 2), ("powersgd", 3), ("randomk", 2), ("int4", 3)])
def test_a_broken_codec_is_an_error_on_all_ranks(workers: Workers, name: str, world: int) -> None:
    workers.run(broken, world, name=name)


# Payloads of another magnitude


def blow_up(rank: int, world: int) -> tuple[list[tuple[str, int, int | None]], list[int]]:
    """What was done, and the positions of the loop."""
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = []
    with attached(model, "int4") as handle, Faults(handle.engine) as faults:
        states: dict[str, Stateful] = {"model": model, "optimizer": optimizer, "random": RandomState()}
        supervisor = Supervisor(handle, states, guard=GuardConfig(window=16), every=10)
        for step in (30, *range(45, 48)):
            faults.at(rank=1, step=step).scale_payload(100)
        position = 0
        for _ in range(60):
            weights = parameters(model)
            loss = loss_of(model, rank, position)
            supervisor.observe(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            positions.append(position)
            if len(positions) - 1 in (30, 45, 46):
                assert equal(parameters(model), weights)
            position = supervisor.end_step(position)
        supervisor.close()
        assert same_on_all_ranks(model.parameters())
        assert faults.struck["scale"] == (4 if rank == 1 else 0)
        return [
            (event.action, event.step, event.restored_step) for event in supervisor.monitor.summary().events
        ], positions


@pytest.mark.filterwarnings("ignore:rank .. (skip|roll back)")
@pytest.mark.parametrize("world", [2, 3])
def test_spikes_are_skipped_and_three_in_a_row_roll_back(workers: Workers, world: int) -> None:
    seen = workers.run(blow_up, world)
    assert all(each == seen[0] for each in seen)
    events, positions = seen[0]
    assert events == [("skip", 30, None), ("skip", 45, None), ("skip", 46, None), ("roll_back", 47, 39)]
    assert positions == [*range(48), *range(40, 52)]
