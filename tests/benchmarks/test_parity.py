import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import parity
from benchmarks.parity import CONTROL, begin, confidence_interval, differences, measure, parse_args, verdict
from recipes.gpt.train import load_text
from tests.workers import Workers


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [  # mean -+ t * s / sqrt(n), by hand with the t of a table: 12.706, 4.303, 2.776
        ((0.0, 2.0), 1 - 12.706, 1 + 12.706),
        ((1.0, 2.0, 3.0), -0.4843, 4.4843),
        ((10.0, 12.0, 14.0, 16.0, 18.0), 10.0741, 17.9259),
    ],
)
def test_confidence_interval(values: tuple[float, ...], low: float, high: float) -> None:
    assert confidence_interval(values) == pytest.approx((low, high), abs=1e-3)


def test_differences_are_paired_by_seed() -> None:
    losses = {("ddp", 0): 2.0, ("int8", 1): 4.4, ("ddp", 1): 4.0, ("int8", 0): 2.02, ("int8", 2): 9.0}
    result = {"runs": [{"variant": name, "seed": seed, "val_loss": loss} for (name, seed), loss in losses.items()]}
    assert differences(result, "int8") == pytest.approx([0.01, 0.1])


def test_verdicts_follow_the_limits() -> None:
    assert verdict("int8", mean=0.001, upper=0.002) == "pass"
    assert verdict("int8", mean=0.001, upper=0.003) == "pass; the interval ends above the limit"
    assert verdict("int8", mean=0.0021, upper=0.003) == "FAIL"
    assert verdict("int4", mean=0.0021, upper=0.003) == "pass"
    assert verdict("none", mean=0.0, upper=0.0) == "pass"
    assert verdict("none", mean=1e-9, upper=1e-9) == "FAIL"
    assert verdict(CONTROL, mean=0.2, upper=0.3) == "fails, as it must"
    assert verdict(CONTROL, mean=0.001, upper=0.3) == "PASSES, but must fail"


def compare(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    args = parse_args(arguments)
    text = tuple(part[:2000] for part in load_text())  # the whole of it takes a while to be evaluated
    with mock.patch.object(parity, "load_text", return_value=text):
        result = begin(args)
        measure(args, result)
    return result


def test_trainings_are_comparable_and_resumed(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "parity.json"
    short = ["--steps", "3", "--batch-size", "1", "--json", str(file)]
    workers.run(compare, arguments=[*short, "--seeds", "0", "--variants", "none"])
    first = json.loads(file.read_text())["runs"]

    result, _ = workers.run(
        compare, arguments=[*short, "--resume", "--seeds", "0", "1", "--variants", "none", "onebit"]
    )
    assert result["runs"][:2] == first
    assert json.loads(file.read_text())["runs"] == result["runs"]
    assert [(run["variant"], run["seed"]) for run in result["runs"]] == [
        *(("ddp", 0), ("none", 0), ("onebit", 0)),
        *(("ddp", 1), ("none", 1), ("onebit", 1)),
    ]
    assert differences(result, "none") == [0.0, 0.0]
    assert 0.0 not in differences(result, "onebit")

    with pytest.raises(SystemExit, match="other steps"):
        compare(0, 1, ["--steps", "4", "--batch-size", "1", "--json", str(file), "--resume"])
