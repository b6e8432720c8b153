"""A run that is interrupted and resumed gives the bits of the one that was not."""

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.compressors import available
from commopt.engine import Engine
from commopt.errors import CheckpointError, CommOptWarning
from commopt.plan import Plan
from tests.engine.steps import exchange, gradients, make_engine, same_on_all_ranks, summed
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, parameters, train
from tests.workers import Workers

OPTIONS: dict[str, dict[str, Any]] = {"topk": {"density": 0.05}, "randomk": {"density": 0.05}, "powersgd": {"rank": 2}}
WHOLE, HALF = 14, 7


def fresh() -> tuple[DDP, torch.optim.Optimizer]:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def interrupted(rank: int, world: int, name: str, forget: bool) -> bool:
    """Whether resuming after half of the steps gives the parameters of the whole run."""
    arguments = OPTIONS.get(name, {})
    model, optimizer = fresh()
    with attached(model, name, **arguments) as handle:
        train(model, optimizer, rank, range(WHOLE))
        assert len(handle.engine.state_dict()["layout"]) > 1  # or there is nothing to regroup
        sent = handle.stats()
    assert name in ("none", "threshold") or sent.bytes_sent < sent.bytes_uncompressed  # tensors here are short for it
    whole = parameters(model)

    model, optimizer = fresh()
    with attached(model, name, **arguments) as handle:
        train(model, optimizer, rank, range(HALF))
        saved = copy.deepcopy(handle.engine.state_dict())
        weights, moments = copy.deepcopy(model.module.state_dict()), copy.deepcopy(optimizer.state_dict())

    model, optimizer = fresh()
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    with attached(model, name, **arguments) as handle:
        if not forget:
            handle.engine.load_state_dict(saved)
        train(model, optimizer, rank, range(HALF, WHOLE))
        assert same_on_all_ranks(model.parameters())
    return equal(parameters(model), whole)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", available())
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(workers: Workers, name: str, world: int) -> None:
    assert workers.run(interrupted, world, name=name, forget=False) == [True] * world


@pytest.mark.parametrize("name", ["topk", "onebit", "powersgd", "randomk"])
def test_without_its_state_it_is_another_run(workers: Workers, name: str) -> None:
    assert workers.run(interrupted, 2, name=name, forget=True) == [False, False]


def watched(rank: int, world: int, at: int | None, forget: bool) -> list[float | None]:
    """The sign agreement of two windows, of a run that is resumed at a step."""
    engine, agreements = engine_of("topk", density=0.02), []
    for step in range(100):
        if step == at:
            state = copy.deepcopy(engine.state_dict())
            engine.close()
            engine = engine_of("topk", density=0.02)
            if forget:
                state["fidelity"] = engine.state_dict()["fidelity"]
            engine.load_state_dict(state)
        exchange(engine, gradients(rank, step, SHAPES))
        assert engine.record is not None
        agreements.append(engine.record.sign_agreement)
    engine.close()
    return [value for step, value in enumerate(agreements) if step % 50 == 49]


def test_a_window_of_fidelity_goes_on_after_a_resume(workers: Workers) -> None:
    whole = workers.run(watched, 2, at=None, forget=False)
    assert None not in whole[0]
    assert workers.run(watched, 2, at=48, forget=False) == whole
    # What is left of a window says nothing about it.
    assert [first for first, _ in workers.run(watched, 2, at=48, forget=True)] == [None, None]


SHAPES = {"a": (64, 50), "b": (300,), "c": (7, 11, 13)}


def engine_of(name: str, **options: Any) -> Engine:
    return make_engine(Plan.from_config(commopt.CommOptConfig(name, options)), SHAPES)


def saves(rank: int, world: int) -> tuple[dict[str, Any], torch.Tensor]:
    engine = engine_of("topk", density=0.02)
    for step in range(5):
        exchange(engine, gradients(rank, step, SHAPES))
    state = copy.deepcopy(engine.state_dict())
    engine.close()
    owed = torch.cat([summed(residual).flatten() for residual in state["residuals"].values()])
    return state, owed


def goes_on(rank: int, world: int, states: list[dict[str, Any]]) -> torch.Tensor:
    """What the first uncompressed step delivers beyond its gradients, after a change of the number of ranks."""
    engine = engine_of("topk", density=0.02)
    engine.load_state_dict(states[rank % len(states)], [states[j] for j in range(len(states)) if j % world == rank])
    engine.restrain(None, at_once=True)
    given = gradients(rank, 9, SHAPES)
    mean = torch.cat([(summed(gradient) / world).flatten() for gradient in given.values()])
    delivered, usable = exchange(engine, {name: gradient.clone() for name, gradient in given.items()})
    engine.close()
    assert usable
    return torch.cat([tensor.flatten() for tensor in delivered.values()]).double() - mean


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3), (3, 1)])
def test_another_number_of_ranks_owes_the_same(workers: Workers, before: int, after: int) -> None:
    states, owed = zip(*workers.run(saves, before), strict=True)
    assert owed[0].abs().max() > 0.1
    for delivered in workers.run(goes_on, after, states=list(states)):
        torch.testing.assert_close(delivered, owed[0], atol=1e-5, rtol=0)


def loads(rank: int, world: int, change: str) -> str:
    """What a state that does not fit is answered; the engine is as it was."""
    engine = engine_of("topk", density=0.02)
    exchange(engine, gradients(rank, 0, SHAPES))
    state = copy.deepcopy(engine.state_dict())
    before = copy.deepcopy(state)
    residuals = state["residuals"]
    if change == "name":
        residuals["z"] = residuals.pop("a")
    elif change == "shape":
        residuals["a"] = residuals["a"][:3]
    elif change == "dtype":
        residuals["a"] = residuals["a"].double()
    elif change == "nan":
        residuals["a"][0, 0] = torch.nan
    elif change == "key":
        del state["owed"]
    else:
        state["layout"] = ["a"]
    try:
        engine.load_state_dict(state)
    except CheckpointError as error:
        now = engine.state_dict()
        assert all(torch.equal(now["residuals"][name], tensor) for name, tensor in before["residuals"].items())
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("name", "'z'"),
        ("shape", r"\[64, 50\]"),
        ("dtype", "float32"),
        ("nan", "not finite"),
        ("key", "'owed'"),
        ("layout", "'layout'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(workers: Workers, change: str, said: str) -> None:
    for error in workers.run(loads, 1, change=change):
        assert re.search(said, error), error


def other_plan(rank: int, world: int) -> tuple[bool, bool]:
    before, after = engine_of("powersgd", rank=2), engine_of("int8")
    exchange(before, gradients(rank, 0, SHAPES))
    with pytest.warns(CommOptWarning, match="dropped"):
        after.load_state_dict(before.state_dict())
    state = after.state_dict()
    before.close()
    after.close()
    return bool(state["residuals"]), bool(state["warm"])


def test_another_compressor_says_what_it_drops(workers: Workers) -> None:
    assert workers.run(other_plan, 1) == [(False, False)]


def asks(rank: int, world: int) -> list[str]:
    engine, other = engine_of("int8"), engine_of("int8")
    exchange(engine, gradients(rank, 0, SHAPES))
    other.request(compress=False)
    other.load_state_dict(engine.state_dict())
    used = []
    for step in range(1, 3):
        exchange(other, gradients(rank, step, SHAPES))
        used.append(other.plan.compressor.name)
    engine.close()
    other.close()
    return used


def test_a_switch_that_was_asked_for_before_a_resume_is_not_forgotten(workers: Workers) -> None:
    assert workers.run(asks, 1) == [["int8", "none"]]


def plain(rank: int, world: int) -> bool:
    """Whether the state loads as a trainer's checkpoint does."""
    engine = engine_of("powersgd", rank=2)
    exchange(engine, gradients(rank, 0, SHAPES))
    state = engine.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    engine.close()
    return all(torch.equal(loaded["residuals"][name], tensor) for name, tensor in state["residuals"].items())


def test_the_state_is_plain(workers: Workers) -> None:
    assert workers.run(plain, 1) == [True]
