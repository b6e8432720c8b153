"""What the doctor asks of a training, and what it writes."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt import CommOptConfig
from commopt.doctor import VARIABLE, Candidate, Diagnosis, MeasuredLink, Request
from commopt.errors import ConfigError
from commopt.plan import Plan
from tests.flights import made_up
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, loss_of
from tests.workers import Workers

SLOW, FAST = 1e4, 1e12  # bytes/s
STEPS = 6
FOUND = Diagnosis(
    ranks=4,
    hosts=2,
    steps=20,
    links=(MeasuredLink((0, 1), 0.0005, 12.5e6),),
    nbytes=20 << 20,
    step=0.8,
    compute=0.2,
    exposed=0.7,
    recommended=Candidate("int4", 0.4),
    looked_at=(Candidate("int4", 0.4), Candidate("none", 0.8)),
    quality="safe",
    reason="70% of an uncompressed step waits for gradients",
)


def examine(rank: int, world: int, file: str, bandwidth: float, quality: Any) -> tuple[int, set[str], object]:
    """Steps that were taken, the plans in use, and the exit status."""
    with made_up(bandwidth) as flight, pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, Request(STEPS, quality, f"{file}{rank or ''}").to_environment()[VARIABLE])
        model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
        with attached(model, "int8", error_feedback=True) as handle:
            plans = set()
            try:
                for step in range(100):
                    plans.add(repr(handle.engine.configured))
                    loss_of(model, rank, step).backward()
            except SystemExit as end:
                status = end.code
            steps = handle.stats().steps
    assert flight.probes == (world > 1)
    return steps, plans, status


def test_a_training_runs_uncompressed_and_all_ranks_end_after_the_same_step(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    expected = (STEPS, {repr(Plan.uncompressed())}, 0)
    assert workers.run(examine, 2, file=str(file), bandwidth=SLOW, quality="safe") == [expected] * 2
    found = Diagnosis.read(file)
    assert (found.ranks, found.hosts, found.steps) == (2, 2, STEPS)
    assert [link.hosts for link in found.links] == [(0, 1)]
    assert found.nbytes == sum(p.nbytes for p in MLP().parameters())
    assert found.recommended == found.looked_at[0]
    assert found.looked_at[0].plan.startswith(("int3", "int4"))
    assert sorted(each.step for each in found.looked_at) == [each.step for each in found.looked_at]
    assert 0 < found.gain <= 1


@pytest.mark.parametrize(
    ("quality", "reason"), [("safe", "the fastest compression that is allowed"), ("lossless", "allows no compression")]
)
def test_where_nothing_helps_it_says_so(workers: Workers, tmp_path: Path, quality: str, reason: str) -> None:
    file = tmp_path / "diagnosis.json"
    workers.run(examine, 2, file=str(file), bandwidth=FAST, quality=quality)
    found = Diagnosis.read(file)
    assert found.recommended is None
    assert reason in found.reason
    assert found.gain == 0


def test_a_single_process_has_nothing_to_compress(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    assert workers.run(examine, 1, file=str(file), bandwidth=FAST, quality="safe")[0][::2] == (STEPS, 0)
    found = Diagnosis.read(file)
    assert (found.ranks, found.links, found.best_gain) == (1, (), 0)
    assert "one process" in found.reason


def mistaken(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, Request(STEPS, "safe", "unused").to_environment()[VARIABLE])
        with pytest.raises(ConfigError, match="did you mean 'int8'"):
            commopt.attach(DDP(torch.nn.Linear(2, 2)), "int8x")


def test_a_wrong_configuration_is_an_error_as_always(workers: Workers) -> None:
    workers.run(mistaken, 1)


def test_what_is_found_survives_json() -> None:
    for found in (FOUND, replace(FOUND, recommended=None, links=())):
        assert Diagnosis.from_plain(json.loads(json.dumps(found.to_plain()))) == found
    assert FOUND.best_gain == pytest.approx(0.75)
    assert FOUND.gain == pytest.approx(0.5)


@pytest.mark.parametrize(
    "changed",
    [
        {"ranks": 0},
        {"ranks": True},
        {"step": 0.0},
        {"step": "fast"},
        {"compute": float("nan")},
        {"exposed": 1.5},
        {"links": [{"hosts": [0], "latency": 1.0, "bandwidth": 1.0}]},
        {"recommended": {"plan": 4, "step": 1.0}},
        {"looked_at": None},
        {"quality": "best"},
        {"reason": None},
    ],
    ids=str,
)
def test_what_is_no_diagnosis_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no diagnosis"):
        Diagnosis.from_plain(FOUND.to_plain() | changed)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "diagnosis.json"
    file.write_text(json.dumps(FOUND.to_plain())[:-9])
    with pytest.raises(ConfigError, match="is no diagnosis"):
        Diagnosis.read(file)


def test_the_environment_carries_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Request.from_environment() is None
    request = Request(STEPS, "aggressive", "file")
    monkeypatch.setattr(os, "environ", request.to_environment())
    assert Request.from_environment() == request
    assert request.instead_of(CommOptConfig("int8", timeout=7.0)) == CommOptConfig(timeout=7.0, quality="aggressive")


@pytest.mark.parametrize("text", ["20", "{", "{}", '{"steps": 1, "quality": "safe", "file": "f"}'])
def test_a_request_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match="not by commopt doctor"):
        Request.from_environment()
