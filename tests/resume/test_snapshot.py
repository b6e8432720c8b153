"""Snapshots in host memory: what is restored is what was taken, and memory stays bounded."""

import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from commopt.errors import CheckpointError, CommOptWarning, ConfigError
from commopt.resume.snapshot import RandomState, SnapshotRing, Stateful, fingerprint
from tests.resume.cases import same

ROOM = 1 << 30


class Run:
    """A small training run with all that has a state."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)  # type: ignore[call-arg]
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 4])
        self.states: dict[str, Stateful] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": torch.amp.GradScaler("cpu"),
            "random": RandomState(),
        }

    def step(self) -> float:
        self.optimizer.zero_grad()
        inputs = torch.randn(16, 4) + random.random() + np.random.rand()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


class Held:
    """Keeps what it is given, as optimizers do."""

    def __init__(self, *tensors: Tensor) -> None:
        self.state: dict[str, Any] = {"tensors": list(tensors)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_training_repeats_itself_after_each_restore(optimizer: type[torch.optim.Optimizer]) -> None:
    run = Run(optimizer)
    ring = SnapshotRing(run.states, memory=ROOM)
    run.step()
    ring.take(1)
    mark = fingerprint(run.model.parameters())
    losses = [run.step() for _ in range(5)]
    for _ in range(2):  # what is loaded must not share memory with the snapshot
        ring.restore(1)
        assert fingerprint(run.model.parameters()) == mark
        assert [run.step() for _ in range(5)] == losses


def test_a_snapshot_from_before_the_first_step_restores() -> None:
    run = Run()
    ring = SnapshotRing(run.states, memory=ROOM)
    ring.take(0)
    losses = [run.step() for _ in range(3)]
    ring.take(3)
    ring.restore(0)
    assert ring.steps == [0]
    assert [run.step() for _ in range(3)] == losses


@given(keep=st.integers(1, 5), steps=st.lists(st.integers(0, 99), unique=True).map(sorted), before=st.integers(0, 100))
@settings(deadline=None)
def test_the_newest_are_kept(keep: int, steps: list[int], before: int) -> None:
    held = Held(torch.zeros(3))
    ring = SnapshotRing({"held": held}, keep=keep, memory=ROOM)
    for step in steps:
        held.state = {"tensors": [torch.full((3,), float(step))]}
        ring.take(step)
    assert ring.steps == steps[-keep:]
    assert ring.nbytes == 12 * len(ring.steps)
    newest = ring.newest_before(before)
    assert newest == max((step for step in steps[-keep:] if step < before), default=None)
    if newest is not None:
        ring.restore(newest)
        assert held.state["tensors"][0].tolist() == [float(newest)] * 3
        assert ring.steps == [step for step in steps[-keep:] if step <= newest]


def test_a_step_that_is_taken_again_replaces_what_followed() -> None:
    ring = SnapshotRing({"held": Held(torch.zeros(3))}, memory=ROOM)
    for step in (10, 20, 30, 20):
        ring.take(step)
    assert ring.steps == [10, 20]


def test_due() -> None:
    ring = SnapshotRing({"held": Held(torch.zeros(3))}, every=20, memory=ROOM)
    taken = []
    for step in [-1, *range(0, 100, 3)]:  # not asked at every step: several exchanges a batch
        if ring.due(step):
            ring.take(step)
            taken.append(step)
    assert taken == [-1, 21, 39, 60, 81, 99]


def buffers(ring: SnapshotRing) -> set[int]:
    return {tensor.data_ptr() for snapshot in ring._ring for tensor in snapshot.tensors}


def test_buffers_are_used_again() -> None:
    held = Held(torch.zeros(3), torch.zeros(2, 2), torch.zeros(2, 2))
    ring = SnapshotRing({"held": held}, keep=2, memory=ROOM)
    ring.take(0)
    ring.take(1)
    first = buffers(ring)
    ring.take(2)
    assert buffers(ring) == first
    assert len(first) == 6
    held.state["tensors"][0] = torch.zeros(4)  # what changed its shape needs a buffer of its own
    ring.take(3)
    assert len(buffers(ring) & first) == 5


def test_little_memory_holds_fewer_and_says_so_once() -> None:
    ring = SnapshotRing({"held": Held(torch.zeros(250))}, keep=4, memory=2500)
    said = r"holds 2 of 4 snapshots: one takes 1,000 bytes .* 4,000, .*'memory'"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(6):
            ring.take(step)
    (warning,) = seen
    assert warning.category is CommOptWarning
    assert re.search(said, str(warning.message))
    assert ring.steps == [4, 5]
    assert ring.nbytes <= 2500


def test_no_memory_holds_none_and_says_so() -> None:
    held = Held(torch.zeros(250))
    ring = SnapshotRing({"held": held}, memory=4000)
    ring.take(0)
    held.state = {"tensors": [torch.zeros(1001)]}
    with pytest.warns(CommOptWarning, match="cannot be rolled back: one takes 4,004 bytes"):
        ring.take(1)
    assert ring.steps == []
    assert ring.newest_before(5) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring.take(2)


def test_a_state_that_grows_stays_within_the_limit() -> None:
    held = Held(torch.zeros(100))
    ring = SnapshotRing({"held": held}, keep=3, memory=3000)
    for step in range(3):
        ring.take(step)
    held.state = {"tensors": [torch.zeros(100), torch.zeros(150)]}  # an optimizer after its first step
    ring.take(3)
    assert ring.steps == [1, 2, 3]
    assert ring.nbytes <= 3000


def test_half_a_snapshot_is_none() -> None:
    class Failing(Held):
        fails = False

        def __deepcopy__(self, memo: dict[int, Any]) -> "Failing":
            if self.fails:
                raise MemoryError
            return self

    part = Failing()
    held = Held(torch.zeros(3))
    held.state["part"] = part
    ring = SnapshotRing({"held": held}, keep=2, memory=ROOM)
    ring.take(0)
    ring.take(1)
    part.fails = True
    with pytest.raises(MemoryError):
        ring.take(2)
    assert ring.steps == [1]


@pytest.mark.parametrize("option", [{"every": 0}, {"keep": 0}, {"memory": -1}])
def test_options_out_of_range(option: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        SnapshotRing({}, **option)


def test_memory_is_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = SnapshotRing({}).memory
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert SnapshotRing({}).memory == pytest.approx(alone / 8, rel=0.2)


def test_what_a_snapshot_keeps_of_a_module() -> None:
    model = nn.BatchNorm1d(3)
    ring = SnapshotRing({"model": model}, memory=ROOM)
    ring.take(0)
    kept = ring._ring[0].states["model"]
    assert kept._metadata[""]["version"] == 2  # torch looks at it when a state is loaded


def test_tensors_that_are_one_object_stay_one() -> None:
    shared = torch.ones(2)
    held = Held(shared, shared)
    ring = SnapshotRing({"held": held}, memory=ROOM)
    ring.take(0)
    assert ring.nbytes == 8
    ring.restore(0)
    one, other = held.state["tensors"]
    assert one is other
    assert one is not shared


def test_random_state_repeats() -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(())), random.random()

    random.gauss(0, 1)  # the second one of a pair is kept back, by Python and by NumPy
    np.random.standard_normal()
    state = RandomState()
    saved = state.state_dict()
    drawn = draw()
    state.load_state_dict(saved)
    assert draw() == drawn


@pytest.mark.parametrize(
    "damage",
    [
        {"python": None},
        {"python": (3, (1, 2), None)},
        {"torch": torch.zeros(3)},
        {"numpy": ("MT19937", [0] * 624, 625, 0, 0.0)},
        {"numpy": ("MT19937", [0] * 3, 0, 0, 0.0)},
        {"numpy": 7},
        {"cuda": 7},
    ],
)
def test_damaged_random_state_changes_nothing(damage: dict[str, Any]) -> None:
    state = RandomState()
    before = state.state_dict()
    other = {**before, **damage}
    random.random()
    torch.rand(())
    here = state.state_dict()
    with pytest.raises(CheckpointError, match="random generators"):
        state.load_state_dict(other)
    assert same(state.state_dict(), here)


def test_fingerprint() -> None:
    model = nn.Linear(3, 3)
    mark = fingerprint(model.parameters())
    assert 0 <= mark < 2**63
    assert mark == fingerprint([model.weight.clone(), model.bias.clone()])
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert mark != fingerprint(model.parameters())
