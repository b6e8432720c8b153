"""What was measured is kept for the next run, unless it is old, damaged, switched off or no longer true."""

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commopt.collectives.wire import Wire
from commopt.errors import CommOptWarning
from commopt.network import cache
from commopt.network import probe as probing
from commopt.network.cache import MAX_AGE, network_of
from tests.workers import Workers

CPU = torch.device("cpu")
BUDGET = 0.2


def look_up(
    rank: int, world: int, folder: str, times: int, still_true: bool | None, environment: dict[str, str]
) -> Any:
    """What each of some runs got, how often it was measured, and what was warned of."""
    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder, **environment}),
        mock.patch.object(probing, "probe", wraps=probing.probe) as probe,
        mock.patch.object(cache, "still_true", wraps=cache.still_true) as check,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        if still_true is not None:
            check.side_effect = lambda *_: still_true
        networks = [network_of(Wire(None), CPU, BUDGET).to_plain() for _ in range(times)]
    return networks, probe.call_count, [str(entry.message) for entry in said if entry.category is CommOptWarning]


def run(workers: Workers, folder: Path, times: int = 1, still_true: bool | None = True, **environment: str) -> Any:
    seen = workers.run(look_up, folder=str(folder), times=times, still_true=still_true, environment=environment)
    assert seen[0][:2] == seen[1][:2]  # tables and measurements; rank 0 alone has something to warn of
    assert not seen[1][2]
    return seen[0]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_second_run_takes_what_the_first_one_kept(workers: Workers, tmp_path: Path) -> None:
    networks, measured, said = run(workers, tmp_path, times=2)
    assert (measured, said) == (1, [])
    assert networks[0] == networks[1]
    (path,) = files(tmp_path)
    assert path.parent == tmp_path / "commopt"
    assert json.loads(path.read_text())["network"] == networks[0]
    assert run(workers, tmp_path)[1] == 0


def test_what_is_no_longer_true_is_measured_anew(workers: Workers, tmp_path: Path) -> None:
    assert run(workers, tmp_path, times=2, still_true=False)[1] == 2
    (path,) = files(tmp_path)
    kept = json.loads(path.read_text())
    for curve in kept["network"]["collectives"].values():
        for point in curve:
            point[1] *= 1000
    path.write_text(json.dumps(kept))
    assert run(workers, tmp_path, still_true=None)[1] == 1
    assert json.loads(path.read_text()) != kept


@pytest.mark.parametrize("age", [MAX_AGE + 1, -10.0])
def test_what_is_old_or_of_the_future_is_measured_anew(workers: Workers, tmp_path: Path, age: float) -> None:
    run(workers, tmp_path)
    (path,) = files(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() - age}))
    assert run(workers, tmp_path)[1:] == (1, [])
    assert run(workers, tmp_path)[1] == 0


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"time": 0}', '{"time": 0, "network": {}}', "[" * 100_000])
def test_a_broken_file_is_ignored_with_a_warning(workers: Workers, tmp_path: Path, damage: str) -> None:
    run(workers, tmp_path)
    (path,) = files(tmp_path)
    path.write_text(damage)
    _, measured, said = run(workers, tmp_path)
    assert measured == 1
    assert len(said) == 1
    assert str(path) in said[0]
    assert run(workers, tmp_path)[1:] == (0, [])


def test_a_number_out_of_range_is_ignored_with_a_warning(workers: Workers, tmp_path: Path) -> None:
    run(workers, tmp_path)
    (path,) = files(tmp_path)
    kept = json.loads(path.read_text())
    for piece in (float("inf"), float("nan"), 0):
        path.write_text(json.dumps(kept | {"network": kept["network"] | {"piece": piece}}))
        _, measured, said = run(workers, tmp_path)
        assert (measured, len(said)) == (1, 1)
        assert "pieces have at least one byte" in said[0]


def test_other_nodes_have_a_file_of_their_own(workers: Workers, tmp_path: Path) -> None:
    run(workers, tmp_path)
    seen = workers.run(look_up, 3, folder=str(tmp_path), times=1, still_true=True, environment={})
    assert [measured for _, measured, _ in seen] == [1, 1, 1]
    assert len(files(tmp_path)) == 2


def test_it_can_be_switched_off(workers: Workers, tmp_path: Path) -> None:
    assert run(workers, tmp_path, times=2, COMMOPT_CACHE="off")[1] == 2
    assert not files(tmp_path)


def test_a_place_that_cannot_be_written_is_said(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "commopt").write_text("in the way")
    _, measured, said = run(workers, tmp_path)
    assert measured == 1
    assert len(said) == 1
    assert "COMMOPT_CACHE=off" in said[0]
