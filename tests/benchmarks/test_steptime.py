from typing import Any

import pytest
import torch

from benchmarks.steptime import measure, parse_args
from commopt.transfers import Transfer
from tests.workers import Workers

VARIANTS = ["none", "int8", "onebit", "topk:density=0.01", "powersgd:rank=4", "torch:bf16", "torch:powersgd"]


def side_by_side(rank: int, world: int) -> dict[str, Any]:
    short = ["--model", "tiny", "--batch-size", "1", "--rounds", "2", "--steps", "1"]
    return measure(parse_args([*short, "--variants", *VARIANTS]))


def test_variants_are_measured_side_by_side(workers: Workers) -> None:
    result, _ = workers.run(side_by_side)
    entries = {entry["variant"]: entry for entry in result["variants"]}
    assert list(entries) == ["nocomm", "ddp", *VARIANTS]
    for entry in entries.values():
        assert 0 < entry["step_ms"]["q25"] <= entry["step_ms"]["median"] <= entry["step_ms"]["q75"]
        assert 0 < entry["over"]["nocomm"]["min"] <= entry["over"]["nocomm"]["max"]
    vote = Transfer("all_reduce", 10 + 2, torch.int64).sent(2)
    for spec in VARIANTS[:5]:
        assert entries[spec]["counted_bytes"] - vote == pytest.approx(entries[spec]["formula_bytes"], rel=0.01)
    for spec in ("nocomm", "ddp", "torch:bf16", "torch:powersgd"):
        assert entries[spec]["counted_bytes"] is None
