"""How much of the true mean gradient arrives, over a window."""

import pytest
import torch
import torch.distributed as dist

from commopt.collectives.wire import Wire
from commopt.engine.fidelity import COORDINATES, LEAST, Fidelity
from tests.workers import Workers


def watch(rank: int, world: int, delivers: str) -> tuple[float, float] | None:
    wire = Wire(dist.group.WORLD)
    fidelity = Fidelity(40_000)
    places = fidelity.sample(["a", "b"], torch.arange(40_000))
    numbers = torch.Generator().manual_seed(rank)
    for step in range(LEAST + 1):
        mine = torch.randn(40_000, generator=numbers) + 1.0
        mine[:400] *= 8  # one in a hundred
        contributed = fidelity.sample(["a", "b"], mine) / world
        true = contributed.clone()
        dist.all_reduce(true)
        delivered = {
            "all": true,
            "nothing new": true * 0 + 1.0,
            "the opposite": -true,
            "the largest": torch.where(places < 400, true, 0.0),
        }[delivers]
        fidelity.stage(0, ["a", "b"], contributed, delivered)
        if step == 3:
            fidelity.discard()
        else:
            fidelity.commit()
    assert contributed.numel() == COORDINATES
    return fidelity.measure(wire)


@pytest.mark.parametrize(
    ("delivers", "cosine", "agreement"),
    [("all", 1.0, 1.0), ("nothing new", 0.85, 1.0), ("the opposite", -1.0, -1.0), ("the largest", 0.53, 0.01)],
)
def test_sums_over_the_window_are_compared(workers: Workers, delivers: str, cosine: float, agreement: float) -> None:
    measured = workers.run(watch, world=2, delivers=delivers)
    assert measured[0] == measured[1]
    assert measured[0] == pytest.approx((cosine, agreement), abs=0.04)


def test_all_ranks_look_at_the_same_places() -> None:
    buffer = torch.arange(100_000, dtype=torch.float32)
    ones, others = (Fidelity(1_000_000).sample(["x"], buffer) for _ in range(2))
    assert torch.equal(ones, others)
    assert len(ones) == round(100_000 * COORDINATES / 1_000_000)
    assert not torch.equal(ones, Fidelity(1_000_000).sample(["y"], buffer))


def empty(rank: int, world: int) -> tuple[float, float] | None:
    return Fidelity(10).measure(Wire(dist.group.WORLD))


def test_a_window_in_which_nothing_was_taken_has_no_cosine(workers: Workers) -> None:
    assert workers.run(empty, world=2) == [None, None]
