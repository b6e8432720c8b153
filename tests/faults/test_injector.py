"""The faults themselves: they strike where they are told to, and leave no trace."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from commopt.errors import CommOptWarning
from tests.faults.injector import Faults
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, loss_of, parameters, train
from tests.workers import Workers


def strike(rank: int, world: int) -> dict[str, int]:
    model, other = (DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    with attached(model, "int8", checked=True) as handle, attached(other, "int8"):
        engine = handle.engine
        instances: list[Any] = [engine, engine.wire, engine.plan.compressor]
        before = [dict(vars(instance)) for instance in instances]
        with Faults(engine) as faults:
            for step in (3, 4):  # several at once, too
                faults.at(rank=1, step=step).inf_gradient().at(rank=0, step=step).flip_bit()
            faults.at(rank=1, step=20).kill()
            train(model, optimizers[0], rank, range(3))
            for step in (3, 4):
                weights = parameters(model)
                optimizers[0].zero_grad()
                with pytest.warns(CommOptWarning, match="checksum") if step == 3 else nullcontext():
                    loss_of(model, rank, step).backward()
                record = engine.record
                assert record is not None
                assert record.corrupt
                assert not record.finite
                optimizers[0].step()
                assert equal(parameters(model), weights)
            train(other, optimizers[1], rank, range(6))  # another handle is not concerned
            struck = dict(faults.struck)
        after = [dict(vars(instance)) for instance in instances]
        assert all(one.keys() == two.keys() for one, two in zip(before, after, strict=True))
        train(model, optimizers[0], rank, range(5, 25))
        assert handle.stats().skipped_steps == 2
    return struck


def test_faults_strike_once_on_their_rank_and_can_be_undone(workers: Workers) -> None:
    assert workers.run(strike) == [{"flip": 2}, {"inf": 2}]


def scale(rank: int, world: int) -> float:
    """The norm of the mean gradient, over that without the fault."""
    norms = []
    for factor in (1.0, 100.0):
        model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
        with attached(model, "none") as handle, Faults(handle.engine) as faults:
            for at in range(world):
                faults.at(rank=at, step=1).scale_payload(factor)
            train(model, torch.optim.SGD(model.parameters(), lr=0.0), rank, range(2))
            assert handle.engine.record is not None
            norms.append(handle.engine.record.gradient_norm)
    return norms[1] / norms[0]


def test_all_that_a_rank_contributes_is_scaled(workers: Workers) -> None:
    assert workers.run(scale) == pytest.approx([100.0, 100.0])
