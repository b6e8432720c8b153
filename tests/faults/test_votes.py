"""Ranks switch in the same step, whoever asks; where they do not agree on what they do, they do not do it."""

import random

import pytest
import torch

from commopt.compressors import create
from commopt.engine import Engine
from commopt.errors import MismatchError
from commopt.plan import Plan
from tests.engine.steps import exchange, make_engine, same_on_all_ranks
from tests.workers import Workers

SHARE = 0.2  # of its steps in which a rank wishes something
PAYLOADS = 20  # steps from one with a payload to the next: here, the others are votes and nothing else
TOPK = Plan(create("topk", density=0.5, block=64), feedback=True)
SHAPES: dict[str, tuple[int, ...]] = {"w": (64,)}


def wishes(rank: int, votes: int) -> list[bool | None]:
    """Of a rank, one a step: to compress, not to compress, or none."""
    numbers = random.Random(rank)
    return [numbers.random() < 0.5 if numbers.random() < SHARE else None for _ in range(votes)]


def vote(rank: int, world: int, votes: int) -> tuple[str, bool]:
    """The first letter of the plan that was used, step by step; and whether all that was delivered was the same."""
    engine = make_engine(TOPK, {"w": (64,), "empty": (0,)})
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(rank))
    total = torch.zeros(64)
    used = []
    for step, wish in enumerate(wishes(rank, votes)):
        if wish is not None:
            engine.request(compress=wish)
        if step % PAYLOADS:
            exchange(engine, {"empty": torch.empty(0)})
        else:
            mean, _ = exchange(engine, {"w": gradient})
            total += mean["w"]
        used.append(engine.plan.compressor.name[0])
    engine.close()
    return "".join(used), same_on_all_ranks([total])


@pytest.mark.parametrize(("world", "votes"), [(2, 4_000), (3, 1_000)])
def test_random_votes_switch_all_ranks_in_the_same_steps(workers: Workers, world: int, votes: int) -> None:
    plans, same = zip(*workers.run(vote, world, timeout=120.0, votes=votes), strict=True)
    assert all(same)
    expected = ["t"]
    for asked in zip(*(wishes(rank, votes) for rank in range(world)), strict=True):
        switched = "n" if False in asked else "t" if True in asked else expected[-1]  # in the next step
        expected.append(switched)
    assert all(list(used) == expected[:-1] for used in plans)
    assert expected.count("n") > votes / 3
    assert expected.count("t") > votes / 10


def disagree(rank: int, world: int) -> None:
    engine = make_engine(TOPK, SHAPES)
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(rank))
    exchange(engine, {"w": gradient})
    if rank == 1:
        engine.configure(Plan(create("int8"), feedback=False))
    kept = _residual(engine)
    for _ in range(2):  # the vote finds it each time, before anything is sent by a plan that is not everybody's
        with pytest.raises(MismatchError, match=r"ranks disagree on next plan: rank 0 is in step .*TopK.* \| .*Int8"):
            exchange(engine, {"w": gradient})
        assert engine.plan == TOPK
        assert torch.equal(_residual(engine), kept)
    engine.configure(Plan(create("int8"), feedback=False))
    for _ in range(2):
        mean, _ = exchange(engine, {"w": gradient})
    assert engine.plan.compressor.name == "int8"
    assert same_on_all_ranks(mean.values())
    engine.close()


@pytest.mark.parametrize("world", [2, 3])
def test_plans_that_differ_are_never_used(workers: Workers, world: int) -> None:
    workers.run(disagree, world)


def out_of_step(rank: int, world: int) -> None:
    engine = make_engine(TOPK, SHAPES)
    gradient = torch.randn(64, generator=torch.Generator().manual_seed(rank))
    exchange(engine, {"w": gradient})
    state = engine.state_dict()
    engine.load_state_dict({**state, "step": 7 if rank == 1 else 0})
    kept = _residual(engine)
    with pytest.raises(MismatchError, match=r"ranks disagree on step: rank 0 is in step 1 .* \| rank 1 is in step 8 "):
        exchange(engine, {"w": gradient})
    assert torch.equal(_residual(engine), kept)
    engine.close()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_different_steps_say_so(workers: Workers, world: int) -> None:
    workers.run(out_of_step, world)


def _residual(engine: Engine) -> torch.Tensor:
    engine.settle()
    return engine.residuals.final()["w"].clone()
