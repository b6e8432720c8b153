import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import benchmarks.soak
from benchmarks.soak import FAULT_HEADERS, HEADERS, begin, fault_rows, measure, parse_args, passed, rows, schedule
from recipes.gpt.train import load_text
from tests.workers import Workers


def test_the_schedule_is_random_and_the_same_for_the_same_seed() -> None:
    planned = schedule(seed=0, world=3, steps=1000, faults=50, first=130)
    assert planned == schedule(seed=0, world=3, steps=1000, faults=50, first=130)
    assert planned != schedule(seed=1, world=3, steps=1000, faults=50, first=130)
    steps = [fault.step for fault in planned]
    assert steps == sorted(set(steps))
    assert 130 <= min(steps) < max(steps) < 1000
    kinds = Counter(fault.kind for fault in planned)
    assert kinds == {"burst": 6, **dict.fromkeys(("nan", "inf", "flip", "scale", "oom", "disable"), 7), "enable": 6}
    assert {fault.rank for fault in planned} == {0, 1, 2}


def soak(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    args = parse_args(arguments)
    text = load_text()
    with mock.patch.object(benchmarks.soak, "load_text", return_value=(text[0], text[1][:2000])):  # soon evaluated
        result = begin(args)
        measure(args, result)
    return result


@pytest.mark.filterwarnings("ignore::commopt.CommOptWarning")
def test_a_training_full_of_faults_keeps_its_ranks_together(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    short = ["--steps", "150", "--faults", "12", "--window", "32", "--batch-size", "2", "--json", str(file)]
    first, *others = workers.run(soak, 3, timeout=120.0, arguments=[*short, "--ranks", "3"])
    (run,) = first["runs"]
    assert json.loads(file.read_text())["runs"] == [run]
    assert run["divergences"] == 0
    assert abs(run["difference"]) < 0.05  # of so short a training each step counts
    assert all(_without_clock(other["runs"][0]) == _without_clock(run) for other in others)

    faults = run["faults"]
    for kind in ("nan", "inf"):
        assert faults[kind]["steps"] == faults[kind]["seen"] == faults[kind]["skipped"] > 0
    assert run["skipped"] >= sum(counts["skipped"] for counts in faults.values()) > 4
    assert run["exchanges"] >= 150
    assert all(count <= faults[kind]["steps"] for kind in faults for count in faults[kind].values())
    assert len(rows(first)[0]) == len(HEADERS)
    assert all(len(row) == len(FAULT_HEADERS) for row in fault_rows(first))


def _without_clock(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "seconds"}


def test_verdicts_follow_the_limits() -> None:
    assert passed({"divergences": 0, "difference": -0.004})
    assert not passed({"divergences": 0, "difference": 0.006})
    assert not passed({"divergences": 1, "difference": 0.0})
