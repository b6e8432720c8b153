"""Gradients travel in messages of any size: the mean does not depend on it, and neither does what is owed."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt.compressors import RowCompressor, create
from commopt.plan import Plan, TensorClass, class_of
from tests.engine.steps import exchange, gradients, make_engine, same_on_all_ranks, summed
from tests.workers import Workers

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (300, 40),
    "first": (96, 100),
    "bias": (96,),
    "second": (64, 96),
    "scalar": (),
    "third": (130, 64),
    "norm": (64,),
}
BUCKETS = [["norm", "third"], ["scalar", "second", "bias"], ["first"], ["embedding"]]
CLASSES: dict[str, TensorClass] = {name: class_of(shape, name == "embedding") for name, shape in SHAPES.items()}
SIZES = (None, 1000, 64_000, 1 << 30)
PLANS = {
    "none": Plan.uncompressed(),
    "int8": Plan(create("int8"), feedback=False),
    "int4": Plan(create("int4"), feedback=True),
    "powersgd": Plan(create("powersgd", rank=2), feedback=True),
}


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in SHAPES])


def step_of(plan: Plan, rank: int, steps: int = 1) -> tuple[Tensor, int]:
    """The mean gradient of the last of some steps, and the messages of one."""
    engine = make_engine(plan, SHAPES, classes=CLASSES)
    for step in range(steps):
        mean, usable = exchange(engine, gradients(rank, step, SHAPES), BUCKETS)
        assert usable
        assert same_on_all_ranks([joined(mean)])
    messages = len(engine._step.layout)
    engine.close()
    return joined(mean), messages


def means(rank: int, world: int, name: str, steps: int) -> tuple[list[float], float, list[int]]:
    """How far the mean of each message size is from that of buckets as they are, and that one from the true mean."""
    plan = PLANS[name]
    seen = [step_of(replace(plan, message_bytes=size), rank, steps) for size in SIZES]
    true = summed(joined(gradients(rank, steps - 1, SHAPES))) / world
    whole = seen[0][0]
    apart = [float((mean - whole).norm() / true.norm()) for mean, _ in seen]
    return apart, float((whole - true).norm() / true.norm()), [messages for _, messages in seen]


@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_does_not_depend_on_the_size_of_messages(workers: Workers, name: str, world: int) -> None:
    steps = 1 if world == 3 else 3
    for apart, off, messages in workers.run(means, world, name=name, steps=steps):
        # Which rows of two shots enter exactly depends on who sums them: within what compression loses, then.
        rounds = PLANS[name].route(world) == "two_shot"
        assert max(apart) <= (1.5 * off if rounds else 1e-5)
        assert messages == [4, 4, 2, 1]  # of 1000 bytes: the vector of one bucket goes with the next one


SCHEDULE = (None, 1 << 30, 1000, 64_000, 20_000, None)


def telescope(rank: int, world: int, name: str) -> float:
    """The relative error of the identity while messages are cut in another way every few steps."""
    plan = replace(PLANS[name], feedback=True)
    engine = make_engine(plan, SHAPES, classes=CLASSES)
    seen = delivered = torch.zeros(sum(math.prod(shape) for shape in SHAPES.values()), dtype=torch.float64)
    used = set()
    for step in range(24):
        small = Plan.uncompressed() if step % 8 < 4 else None
        engine.configure(replace(plan, message_bytes=SCHEDULE[step // 4], small=small))
        local = gradients(rank, step, SHAPES)
        mean, usable = exchange(engine, local, BUCKETS)
        assert usable
        seen, delivered = seen + joined(local), delivered + joined(mean)
        used.add((engine.plan.message_bytes, engine.plan.small))
    assert len(used) >= 6
    assert same_on_all_ranks([delivered])
    engine.settle()
    kept, target = summed(joined(engine.residuals.final())), summed(seen) / world
    engine.close()
    return float((delivered + kept - target).norm() / target.norm())


@pytest.mark.parametrize("name", ["int8", "int4", "powersgd"])
@pytest.mark.parametrize("world", [2, 3])
def test_sums_telescope_while_messages_change(workers: Workers, name: str, world: int) -> None:
    assert max(workers.run(telescope, world, name=name)) <= 1e-5


def small_ones(rank: int, world: int, message_bytes: int | None) -> tuple[dict[str, float], list[str]]:
    plan = Plan(create("int4"), True, small=Plan.uncompressed(), message_bytes=message_bytes)
    engine = make_engine(plan, SHAPES, classes=CLASSES)
    local = gradients(rank, 0, SHAPES)
    mean, _ = exchange(engine, local, BUCKETS)
    true = {name: summed(local[name]) / world for name in SHAPES}
    engine.settle()
    kept = [name for name, residual in engine.residuals.final().items() if residual.any()]
    engine.close()
    return {name: float((mean[name] - true[name]).norm() / true[name].norm()) for name in SHAPES}, kept


@pytest.mark.parametrize("message_bytes", SIZES)
@pytest.mark.parametrize("world", [2, 3])
def test_small_tensors_arrive_whole(workers: Workers, message_bytes: int | None, world: int) -> None:
    small = {name for name, kind in CLASSES.items() if kind == "small"}
    assert small == {"bias", "scalar", "norm"}
    for off, kept in workers.run(small_ones, world, message_bytes=message_bytes):
        assert all((error < 1e-6) == (name in small) for name, error in off.items())
        assert set(kept) == set(SHAPES) - small


def scratch(rank: int, world: int, message_bytes: int | None) -> dict[str, Any]:
    """Memory of the lanes after some steps, beside what the largest message takes."""
    plan = Plan(create("int8"), True, message_bytes=message_bytes)
    shapes: dict[str, tuple[int, ...]] = {f"p{index}": (100, 101) for index in range(24)}
    engine = make_engine(plan, shapes)
    for step in range(3):
        exchange(engine, gradients(rank, step, shapes), [list(shapes)])
    layouts = engine._path._layouts.values()
    elements = max(layout.rows * layout.block for layout in layouts)
    held = [lane.scratch.nbytes for lane in engine._path.lanes]
    engine.close()
    return {"held": held, "elements": elements}


@pytest.mark.parametrize("world", [2, 3])
def test_scratch_is_of_the_size_of_a_message(workers: Workers, world: int) -> None:
    codec = create("int8")
    assert isinstance(codec, RowCompressor)
    payloads = 1 + world if world == 2 else 1 + 1 + 1 / world
    for parts, whole in zip(
        workers.run(scratch, world, message_bytes=100_000),
        workers.run(scratch, world, message_bytes=None),
        strict=True,
    ):
        for seen in (parts, whole):
            payload = seen["elements"] / codec.block * codec.row_bytes
            assert max(seen["held"]) <= payloads * payload + 2 * 4 * seen["elements"]
        assert parts["elements"] * 4 < 100_000 + 4 * 101 * 101 * 1.1  # no more than a tensor over the limit
        assert sum(parts["held"]) < sum(whole["held"]) / 3
