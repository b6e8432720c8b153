"""The benchmark of accuracy: what it trains, and how it judges."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import CONTROL, DEFAULT, REFERENCE, measure, parse_args, rows
from recipes.resnet.resnet import load_images
from tests.workers import Workers


def run(variant: str, seed: int, accuracy: float, sent: float, kernel: float | None = None) -> dict[str, Any]:
    counted = {"counted_bytes": sent, "uncompressed_bytes": 2e6, "kernel_bytes": kernel}
    return {"variant": variant, "seed": seed, "accuracy": accuracy, "ms_per_step": 100.0, **counted}


def table(default: list[float], sent: float = 3e5, control: float = 0.9) -> dict[str, tuple[str, ...]]:
    runs = [run(REFERENCE, seed, 0.98, 2e6, 2.1e6) for seed in range(3)]
    runs += [run(DEFAULT, seed, accuracy, sent, 1.1 * sent) for seed, accuracy in enumerate(default)]
    runs += [run(CONTROL, seed, control, 1e4) for seed in range(3)]
    return {row[0]: row for row in rows({"runs": runs})}


def test_the_default_is_judged_by_its_accuracy_and_its_traffic() -> None:
    passed = table([0.975, 0.98, 0.985])
    assert passed[REFERENCE][3] == passed[REFERENCE][8] == ""
    assert passed[DEFAULT][1:] == (
        *("97.5, 98.0, 98.5", "98.00 %", "+0.00", "-1.24 to +1.24", "0.3", "0.3", "85.0 %", "pass", "100"),
    )
    assert table([0.96, 0.98, 0.98])[DEFAULT][8] == "FAIL"
    assert table([0.98, 0.98, 0.98], sent=7e5)[DEFAULT][8].startswith("FAIL: too much")


def test_the_control_must_lose() -> None:
    found = table([0.98, 0.98, 0.98])[CONTROL]
    assert found[8] == "fails, as it must"
    assert found[6] == ""  # over loopback, nobody counts for the kernel
    assert table([0.98, 0.98, 0.98], control=0.979)[CONTROL][8] == "PASSES, but must fail"


def trained(rank: int, world: int, arguments: list[str]) -> list[dict[str, Any]]:
    args = parse_args(arguments)
    runs: list[dict[str, Any]] = []
    measure(args, load_images(args.data), {"runs": runs})
    return runs


def test_variants_train_alike_but_for_the_exchange(workers: Workers, tmp_path: Path) -> None:
    small = ["--data", "digits", "--width", "8", "--steps", "3", "--seeds", "0"]
    variants = ["--variants", "none", "int8", "topk:density=0.01"]
    ranks = workers.run(trained, arguments=[*small, *variants, "--json", str(tmp_path / "accuracy.json")])
    none, int8, topk = ranks[0]
    assert [entry["accuracy"] for entry in ranks[0]] == [entry["accuracy"] for entry in ranks[1]]
    assert none["train_loss"] != ranks[1][0]["train_loss"]  # other images
    assert int8["train_loss"] == pytest.approx(none["train_loss"], rel=0.02)
    assert none["counted_bytes"] == pytest.approx(none["uncompressed_bytes"], rel=0.01)
    assert 10 * topk["counted_bytes"] < 3 * int8["counted_bytes"] < none["counted_bytes"]
    assert (tmp_path / "accuracy.json").exists()


def test_only_what_counts_its_bytes_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--variants", "ddp"])
    assert "count their bytes" in capsys.readouterr().err
