import copy
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.errors import CheckpointError
from commopt.guard import Guard, GuardConfig, Verdict
from commopt.records import StepRecord
from tests.guard.runs import HEALTHY, Run

CONFIG = GuardConfig(window=16, cool_down=5, roll_backs=2, roll_back_rise=0.1)

values = st.floats(allow_nan=True, allow_infinity=True)
loss = st.none() | values | st.floats(2.9, 3.1) | st.just(4.0)
records = st.builds(
    replace,
    st.just(HEALTHY),
    finite=st.sampled_from([True] * 9 + [False]),
    out_of_memory=st.sampled_from([False] * 19 + [True]),
    loss=loss,
    gradient_norm=st.floats(0.9, 1.1) | st.floats(0, allow_infinity=True),
    sign_agreement=st.none() | st.floats(-1, 1) | st.just(math.nan),
)
events = st.lists(
    st.tuples(records, st.booleans(), st.integers(1, 30))
    | values
    | st.integers(0, 30).map(lambda back: ("back", back)),
    max_size=8,
)


def play(guard: Guard, happenings: list[Any]) -> list[Verdict]:
    verdicts = []
    for happening in happenings:
        match happening:
            case StepRecord() as record, compressed, times:
                verdicts += [guard.step(replace(record, step=step), compressed) for step in range(times)]
            case "back", step:
                guard.rolled_back(step)
            case value:
                verdicts.append(guard.validation(value, 0))
    return verdicts


@given(events, events, st.sampled_from([0, 20, 120]))
@settings(deadline=None, max_examples=60)
def test_saved_and_loaded_is_as_if_never_interrupted(before: list[Any], after: list[Any], steps: int) -> None:
    guard, resumed = Guard(CONFIG), Guard(CONFIG)
    Run(guard).go(steps)
    play(guard, before)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict(), allow_nan=False)))
    assert (resumed.mode, resumed.rung) == (guard.mode, guard.rung)
    assert play(resumed, after) == play(guard, after)
    assert Run(resumed).go(60) == Run(guard).go(60)
    assert resumed.state_dict() == guard.state_dict()


def leaves(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in state.items():
        found.append((*path, key))
        if isinstance(value, Mapping):
            found += leaves(value, (*path, key))
    return found


@pytest.fixture(scope="module")
def seasoned() -> Guard:
    run = Run()
    run.go(300)
    run.guard.validation(2.0, 300)
    return run.guard


NONSENSE: tuple[Any, ...] = ("missing", None, "text", -1, math.nan, {}, [math.inf], ["1"], [1e300], 10**400)


@pytest.mark.parametrize("nonsense", NONSENSE, ids=[str(value)[:10] for value in NONSENSE[:-1]] + ["huge"])
@pytest.mark.parametrize("path", leaves(Guard(GuardConfig()).state_dict()), ids=".".join)
def test_nonsense_is_refused_and_changes_nothing(seasoned: Guard, path: tuple[str, ...], nonsense: Any) -> None:
    guard = seasoned
    before = guard.state_dict()
    state = copy.deepcopy(before)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if nonsense == "missing":
        del inner[path[-1]]
    else:
        inner[path[-1]] = nonsense
    with pytest.raises(CheckpointError, match="the saved state of the guard"):
        guard.load_state_dict(state)
    assert guard.state_dict() == before


def test_another_window_takes_over_the_latest_values(seasoned: Guard) -> None:
    guard = Guard(GuardConfig(window=64))
    guard.load_state_dict(seasoned.state_dict())
    assert guard.step(replace(HEALTHY, gradient_norm=1.0), True).action == "pass"
    assert guard.step(replace(HEALTHY, gradient_norm=50.0), True).action == "skip"
