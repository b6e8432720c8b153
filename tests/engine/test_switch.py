"""The plan changes between two steps: nothing that is owed is lost, and ranks stay alike."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt.compressors import create
from commopt.engine import Engine
from commopt.plan import Plan, TensorClass, class_of
from tests.engine.steps import Tensors, exchange, gradients, make_engine, same_on_all_ranks, summed
from tests.workers import Workers

SHAPES: dict[str, tuple[int, ...]] = {"embedding": (90, 40), "matrix": (80, 50), "bias": (77,), "tensor": (9, 5, 8, 8)}
BUCKETS = [["tensor", "bias"], ["matrix"], ["embedding"]]
CLASSES: dict[str, TensorClass] = {name: class_of(shape, name == "embedding") for name, shape in SHAPES.items()}
NONE = Plan.uncompressed()
INT4 = Plan(create("int4"), feedback=True)
INT8 = Plan(create("int8"), feedback=False)
COMPRESSORS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("int8", {}),
    ("int8", {"stochastic": True}),
    ("int4", {}),
    ("int3", {}),
    ("onebit", {}),
    ("fp8", {}),
    ("topk", {"density": 0.1}),
    ("topk", {"density": 0.01}),
    ("randomk", {}),
    ("powersgd", {"rank": 1}),
    ("powersgd", {"rank": 2}),
]


def joined(tensors: Tensors) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in SHAPES])


class Sums:
    """What went in and what came out of an engine, on one rank."""

    def __init__(self, engine: Engine, rank: int, world: int) -> None:
        self.engine, self.rank, self.world = engine, rank, world
        self.seen = self.delivered = torch.zeros(sum(map(math.prod, SHAPES.values())), dtype=torch.float64)
        self.step = 0

    def exchange(self, configure: Plan | None = None) -> Tensor:
        """One step; ``configure`` takes effect in the one after it."""
        if configure is not None:
            self.engine.configure(configure)
        local = gradients(self.rank, self.step, SHAPES)
        mean, usable = exchange(self.engine, local, BUCKETS)
        assert usable
        self.step += 1
        self.seen, self.delivered = self.seen + joined(local), self.delivered + joined(mean)
        return joined(mean)

    def owed(self) -> Tensor:
        """All residuals, summed over ranks."""
        self.engine.settle()
        return summed(joined(self.engine.residuals.final()))

    def error(self) -> float:
        """Of ``delivered + residuals == sum of gradients / world``, relative."""
        target = summed(self.seen) / self.world
        return float((self.delivered + self.owed() - target).norm() / target.norm())


def deliver(rank: int, world: int, to: Plan) -> dict[str, Any]:
    engine = make_engine(INT4, SHAPES, classes=CLASSES)
    sums = Sums(engine, rank, world)
    for _ in range(5):
        sums.exchange()
    sums.exchange(configure=to)
    before = sums.owed()
    true = summed(joined(gradients(rank, sums.step, SHAPES))) / world
    mean = sums.exchange()
    result: dict[str, Any] = {
        "owed": float(before.norm()),
        "left": float(sums.owed().norm()),
        "off": float((mean - true - before).norm()),  # the first step gives what was owed beside its own gradient
        "error": sums.error(),
    }
    for _ in range(3):
        sums.exchange()
    result |= {"same": same_on_all_ranks([sums.delivered]), "plan": repr(engine.plan)}
    result["kept"] = float(sums.owed().norm())
    engine.close()
    return result


@pytest.mark.parametrize(
    "to", [INT8, NONE, replace(INT8, small=NONE, message_bytes=3000), Plan(create("fp8"), False)], ids=str
)
@pytest.mark.parametrize("world", [2, 3])
def test_a_plan_that_keeps_nothing_delivers_what_is_owed(workers: Workers, to: Plan, world: int) -> None:
    for result in workers.run(deliver, world, to=to):
        assert result["same"]
        assert result["plan"] == repr(to)
        assert result["owed"] > 1.0
        assert result["left"] < 0.3 * result["owed"]
        assert result["off"] < 0.3 * result["owed"]
        assert result["error"] < 1e-6
        assert result["kept"] == pytest.approx(result["left"])  # it rests until somebody delivers it


def to_parts(rank: int, world: int) -> tuple[float, float]:
    """From one plan for all to one that sends small tensors whole: their residuals, before and after."""
    engine = make_engine(INT4, SHAPES, classes=CLASSES)
    sums = Sums(engine, rank, world)
    sums.exchange()
    sums.exchange(configure=replace(INT4, small=NONE))
    engine.settle()
    before = summed(engine.residuals.final()["bias"])
    sums.exchange()
    engine.settle()
    after = summed(engine.residuals.final()["bias"])
    assert sums.error() < 1e-6
    engine.close()
    return float(before.norm()), float(after.norm())


def test_tensors_that_travel_whole_from_now_on_are_paid_first(workers: Workers) -> None:
    for before, after in workers.run(to_parts, 2):
        assert before > 0.01
        assert after == 0.0


def interrupted(rank: int, world: int) -> tuple[float, float, float]:
    """The step that would deliver is not finite."""
    engine = make_engine(INT4, SHAPES, classes=CLASSES)
    sums = Sums(engine, rank, world)
    for _ in range(3):
        sums.exchange()
    sums.exchange(configure=INT8)
    before = sums.owed()
    local = gradients(rank, 99, SHAPES)
    local["matrix"][0, 0] = math.nan
    with pytest.warns(match="not finite"):
        _, usable = exchange(engine, local, BUCKETS)
    assert not usable
    sums.exchange()
    after, error = sums.owed(), sums.error()
    engine.close()
    return float(before.norm()), float(after.norm()), error


def test_what_is_owed_is_delivered_by_the_first_step_that_is_taken(workers: Workers) -> None:
    for before, after, error in workers.run(interrupted, 2):
        assert error < 1e-6
        assert after < 0.15 * before


def warm_starts(rank: int, world: int) -> None:
    one, two, mixed = (Plan(create("powersgd", rank=r), True) for r in (1, 2, 2))
    mixed = replace(mixed, small=NONE, message_bytes=1000)
    engine = make_engine(two, SHAPES, classes=CLASSES)
    sums = Sums(engine, rank, world)

    def ranks() -> set[int]:
        engine.settle()
        return {tensor.shape[1] for tensor in engine._path.warm.values()}

    sums.exchange()
    assert ranks() == {2}
    sums.exchange(configure=mixed)
    kept = dict(engine._path.warm)
    begun = [tensor.clone() for tensor in kept.values()]
    engine.settle()
    assert all(torch.equal(tensor, before) for tensor, before in zip(kept.values(), begun, strict=True))
    sums.exchange(configure=one)
    assert ranks() == {2}  # another cut of the same compressor goes on from there
    assert engine._path.warm.keys() == kept.keys()
    sums.exchange()
    assert ranks() == {1}
    sums.exchange(configure=NONE)
    sums.exchange(configure=INT4)
    assert ranks() == {1}  # an interval without compression changes nothing
    sums.exchange()
    assert ranks() == set()
    assert sums.error() < 1e-5
    engine.close()


def test_warm_starts_belong_to_one_rank_of_powersgd(workers: Workers) -> None:
    workers.run(warm_starts, 2)


def random_plan(numbers: random.Random) -> Plan:
    def part() -> Plan:
        name, options = numbers.choice(COMPRESSORS)
        return Plan(create(name, **options), name != "none")

    small, embedding = (numbers.choice([None, NONE, part()]) for _ in range(2))
    return replace(
        part(), small=small, embedding=embedding, message_bytes=numbers.choice([None, 1, 5000, 20_000, 1 << 30])
    )


def wander(rank: int, world: int, seed: int, steps: int) -> tuple[float, int]:
    numbers = random.Random(seed)
    engine = make_engine(random_plan(numbers), SHAPES, classes=CLASSES)
    sums = Sums(engine, rank, world)
    used = set()
    for _ in range(steps):
        sums.exchange(configure=random_plan(numbers))
        used.add(engine.plan)
        assert same_on_all_ranks([sums.delivered])
    error = sums.error()
    engine.close()
    return error, len(used)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [2, 3])
def test_another_plan_in_each_step(workers: Workers, seed: int, world: int) -> None:
    for error, plans in workers.run(wander, world, seed=seed, steps=60):
        assert error < 1e-5
        assert plans > 40
