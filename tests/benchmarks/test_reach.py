"""When a loss is reached, and what that is worth on a link."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import reach
from benchmarks.reach import measure, parse_args, reached, rows, step_times
from recipes.gpt.train import load_text
from tests.workers import Workers


@pytest.mark.parametrize(
    ("seen", "steps"),
    [
        ([(100, 3.0), (120, 2.0)], 110.0),
        ([(100, 2.5), (120, 2.0)], 100.0),
        ([(100, 2.0)], 100.0),
        ([(100, 3.0), (120, 2.6)], None),
        ([(100, 2.6), (120, 2.6), (140, 2.4)], 130.0),
    ],
)
def test_a_loss_is_reached_between_two_evaluations(seen: list[tuple[int, float]], steps: float | None) -> None:
    assert reached(seen, 2.5) == steps


def steptime(path: Path, rate: str, hosts: int, **times: float) -> None:
    variants = [
        {"variant": name, "step_ms": {"median": ms}, "chosen": "int3" if name == "auto" else None}
        for name, ms in times.items()
    ]
    path.write_text(json.dumps({"conditions": {"rate": rate, "hosts": hosts}, "variants": variants}))


def test_time_is_steps_by_the_time_of_a_step(tmp_path: Path) -> None:
    steptime(tmp_path / "policy-slow-2.json", "slow", 2, ddp=100.0, auto=20.0, onebit=10.0, int3=21.0, bf16=50.0)
    steptime(tmp_path / "policy-slow-4.json", "slow", 4, ddp=1.0)  # of another number of ranks
    runs = [("ddp", 300.0), ("int3", 310.0), ("onebit", 500.0), ("topk", None)]
    result: dict[str, Any] = {
        "runs": [{"variant": variant, "seen": [], "steps": steps} for variant, steps in runs],
        "step_ms": step_times(tmp_path),
    }
    table = [(link, variant, steps, seconds) for link, variant, steps, _, seconds, _ in rows(result)]
    assert table == [
        ("slow", "onebit", "500", "5"),
        ("slow", "auto -> int3", "310", "6"),
        ("slow", "int3", "310", "7"),
        ("slow", "bf16", "300", "15"),  # a cast takes the steps of plain DDP
        ("slow", "ddp", "300", "30"),
    ]


def run(rank: int, world: int, file: Path) -> dict[str, Any]:
    arguments = ["--model", "tiny", "--steps", "4", "--every", "2", "--batch-size", "1", "--variants", "int8", "topk"]
    args = parse_args([*arguments, "--most", "2", "--json", str(file)])
    text = tuple(part[:2000] for part in load_text())
    result: dict[str, Any] = {"runs": [], "step_ms": {}}
    with mock.patch.object(reach, "load_text", return_value=text):
        measure(args, result)
    return result


def test_plain_ddp_sets_the_target(workers: Workers, tmp_path: Path) -> None:
    one, other = workers.run(run, file=tmp_path / "reach.json")
    assert one["runs"] == other["runs"]
    assert json.loads((tmp_path / "reach.json").read_text())["runs"][0] == {
        "variant": "ddp",
        "seen": [[4, one["runs"][0]["seen"][0][1]]],
        "steps": 4.0,
    }
    assert [entry["variant"] for entry in one["runs"]] == ["ddp", "int8", "topk"]
    assert all(4 <= step <= 8 for entry in one["runs"] for step, _ in entry["seen"])
