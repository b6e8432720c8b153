"""A run in trouble is noticed, rolled back, and goes on; all ranks alike."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.guard import GuardConfig
from commopt.records import Action
from commopt.resume.snapshot import RandomState
from commopt.supervisor import Supervisor
from tests.engine.steps import same_on_all_ranks
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, loss_of, parameters, train
from tests.workers import Workers

STEPS = 130


class Run:
    """A training loop as its users write it."""

    def __init__(self, rank: int, handle: commopt.Handle, model: nn.Module, lr: float = 1e-2, **kwargs: Any) -> None:
        self.rank, self.model = rank, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=STEPS)
        states: dict[str, Any] = {"model": model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.supervisor = Supervisor(handle, {**states, "random": RandomState()}, **kwargs)
        self.visited: list[int] = []

    def __call__(self, steps: int = STEPS) -> None:
        step = 0
        while step < steps:
            self.visited.append(step)
            step = self.take(step)

    def take(self, step: int) -> int:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self.rank, step)
        self.supervisor.observe(loss, samples=8)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return self.supervisor.end_step(step)


def reference(rank: int, world: int) -> list[torch.Tensor]:
    """What training without compression gives."""
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    for step in range(STEPS):
        train(model, optimizer, rank, range(step, step + 1))
        scheduler.step()
    return parameters(model)


def unfaithful(rank: int, world: int) -> tuple[list[Action], list[int], bool]:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(model, "topk", density=0.01, error_feedback=False) as handle:
        run = Run(rank, handle, model, guard=GuardConfig(min_agreement=0.8, cool_down=1000))
        with pytest.warns(
            commopt.CommOptWarning,
            match="roll back to step -1: fidelity.*without compression for 1000 steps, then with 'int4'",
        ):
            run()
        assert same_on_all_ranks(model.parameters())
        assert handle.stats().bytes_sent < handle.stats().bytes_uncompressed
    events = [event.action for event in run.supervisor.monitor.summary().events]
    return events, run.visited, equal(parameters(model), reference(rank, world))


def test_a_compressor_that_loses_too_much_is_rolled_back_to_what_plain_training_gives(workers: Workers) -> None:
    for events, visited, same in workers.run(unfaithful, world=2):
        assert events == ["roll_back"]
        assert visited == [*range(100), *range(STEPS)]  # two windows of 50 steps, and all of it again
        assert same


def spoiled(rank: int, world: int, factor: float) -> tuple[list[Action], list[int], bool]:
    """From step 139 on, one rank's contribution is wrong, until compression is off."""
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    weight = model.module[0].weight
    with attached(model, "int8") as handle:
        run = Run(rank, handle, model, lr=1e-3)
        wrong = lambda g: g * factor if rank == 1 and handle.engine.step >= 139 and compresses(handle) else g  # noqa: E731
        weight.register_hook(wrong)
        with pytest.warns(commopt.CommOptWarning):
            run(170)
        assert same_on_all_ranks(model.parameters())
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        assert run.supervisor.monitor.summary().total.skipped == handle.stats().skipped_steps == 3
    events = [event.action for event in run.supervisor.monitor.summary().events]
    return events, run.visited, handle.engine.plan.lossless


def compresses(handle: commopt.Handle) -> bool:
    return not handle.engine.planned.lossless


def test_a_payload_that_is_much_too_large_is_skipped_and_then_rolled_back(workers: Workers) -> None:
    for events, visited, uncompressed in workers.run(spoiled, world=2, factor=1e4):
        assert events == ["skip", "skip", "roll_back"]
        assert visited == [*range(142), *range(100, 170)]
        assert uncompressed


def switched_off(rank: int, world: int) -> tuple[list[Action], bool]:
    """A rank asks for no compression in the step that is rolled back."""
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(model, "topk", density=0.01, error_feedback=False) as handle:
        run = Run(rank, handle, model, guard=GuardConfig(min_agreement=0.8, cool_down=5))
        run(99)
        if rank == 1:
            handle.disable()
        with pytest.warns(commopt.CommOptWarning, match="roll back to step -1"):
            assert run.take(99) == 0
        with pytest.warns(commopt.CommOptWarning, match="re arm"):
            run(10)
    return [event.action for event in run.supervisor.monitor.summary().events], handle.engine.plan.lossless


def test_a_roll_back_does_not_undo_the_users_switch(workers: Workers) -> None:
    assert workers.run(switched_off, world=2) == [(["roll_back", "re_arm"], True)] * 2


def resumed(rank: int, world: int) -> tuple[bool, bool, int]:
    """Half of a run in which compression was given up, and the other half in another supervisor."""
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(model, "topk", density=0.01, error_feedback=False) as handle:
        run = Run(rank, handle, model, guard=GuardConfig(min_agreement=0.8, cool_down=1000))
        with pytest.warns(commopt.CommOptWarning, match="roll back"):
            run(STEPS)
        state = run.supervisor.state_dict()
    again = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(again, "topk", density=0.01, error_feedback=False) as handle:
        other = Run(rank, handle, again)
        other.supervisor.load_state_dict(state)
        other.take(STEPS)
        same = other.supervisor.monitor.summary().events == run.supervisor.monitor.summary().events
        return handle.engine.plan.lossless, same, handle.engine.step


def test_what_was_decided_survives_in_the_state(workers: Workers) -> None:
    assert workers.run(resumed, world=2) == [(True, True, STEPS)] * 2


def without_snapshots(rank: int, world: int) -> tuple[list[Action], bool]:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with attached(model, "topk", density=0.01, error_feedback=False) as handle:
        supervisor = Supervisor(handle, {}, guard=GuardConfig(min_agreement=0.8))
        with pytest.warns(commopt.CommOptWarning, match="fall back"):
            train(model, optimizer, rank, range(110))
        assert supervisor.end_step(109) == 110
        supervisor.close()
        assert same_on_all_ranks(model.parameters())
        return [event.action for event in supervisor.monitor.summary().events], handle.engine.plan.lossless


def test_without_snapshots_it_falls_back(workers: Workers) -> None:
    assert workers.run(without_snapshots, world=2) == [(["fall_back"], True)] * 2


def differs(rank: int, world: int) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(model, "topk", density=0.01, error_feedback=False) as handle:
        run = Run(rank, handle, model, guard=GuardConfig(min_agreement=0.8))
        assert run.supervisor.ring is not None
        if rank == 1:
            next(iter(model.parameters())).data.add_(1.0)
            run.supervisor.ring.take(-1)
        run()


def test_ranks_that_differ_after_a_roll_back_say_so(workers: Workers) -> None:
    with pytest.raises(commopt.MismatchError, match="parameters after the roll-back"):
        workers.run(differs, world=2)


def other_settings(rank: int, world: int, setting: str) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(model, "int8") as handle:
        states: dict[str, Any] = {"model": model} if setting != "states" or rank == 0 else {}
        guard = GuardConfig(min_agreement=0.5 if setting == "guard" and rank == 0 else 0.1)
        Supervisor(handle, states, guard=guard)


@pytest.mark.parametrize("setting", ["guard", "states"])
def test_ranks_that_watch_for_other_things_say_so_at_once(workers: Workers, setting: str) -> None:
    with pytest.raises(commopt.MismatchError, match=setting):
        workers.run(other_settings, world=2, setting=setting)


def twice(rank: int, world: int) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    with attached(model, "int8") as handle:
        Supervisor(handle, {"model": model})
        Supervisor(handle, {"model": model})


def test_a_handle_has_one_supervisor(workers: Workers) -> None:
    with pytest.raises(commopt.AttachError, match="close it first"):
        workers.run(twice, world=2)
