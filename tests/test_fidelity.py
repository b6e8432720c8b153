"""How much of the true mean gradient arrives, over a window."""

import torch
import torch.distributed as dist

from commopt.collectives.wire import Wire
from commopt.fidelity import COORDINATES, Fidelity
from tests.workers import Workers


def watch(rank: int, world: int, delivers: str) -> float | None:
    wire = Wire(dist.group.WORLD)
    fidelity = Fidelity(40_000)
    numbers = torch.Generator().manual_seed(rank)
    for step in range(6):
        mine = torch.randn(40_000, generator=numbers) + 1.0
        contributed = fidelity.sample(["a", "b"], mine) / world
        true = contributed.clone()
        dist.all_reduce(true)
        delivered = {"all": true, "nothing new": true * 0 + 1.0, "the opposite": -true}[delivers]
        fidelity.stage(["a", "b"], contributed, delivered)
        if step == 3:
            fidelity.discard()
        else:
            fidelity.commit()
    assert contributed.numel() == COORDINATES
    return fidelity.cosine(wire)


def test_the_cosine_is_that_of_the_sums(workers: Workers) -> None:
    for delivers, low, high in [
        ("all", 0.9999, 1.0001),
        ("nothing new", 0.9, 0.97),
        ("the opposite", -1.0001, -0.9999),
    ]:
        cosines = workers.run(watch, world=2, delivers=delivers)
        assert cosines[0] == cosines[1]
        assert cosines[0] is not None
        assert low < cosines[0] < high, delivers


def test_all_ranks_look_at_the_same_places() -> None:
    buffer = torch.arange(100_000, dtype=torch.float32)
    ones, others = (Fidelity(1_000_000).sample(["x"], buffer) for _ in range(2))
    assert torch.equal(ones, others)
    assert len(ones) == round(100_000 * COORDINATES / 1_000_000)
    assert not torch.equal(ones, Fidelity(1_000_000).sample(["y"], buffer))


def empty(rank: int, world: int) -> float | None:
    return Fidelity(10).cosine(Wire(dist.group.WORLD))


def test_a_window_in_which_nothing_was_taken_has_no_cosine(workers: Workers) -> None:
    assert workers.run(empty, world=2) == [None, None]
