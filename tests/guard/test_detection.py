"""Smaller versions of what `python -m benchmarks.guard` measures."""

import statistics
from multiprocessing.pool import ThreadPool

import pytest

from benchmarks.guard import (
    CURVES,
    HEADERS,
    JUMP_WITHIN,
    SLOPE_WITHIN,
    clean,
    found,
    measure,
    microseconds,
    rows,
)

QUIET_ENOUGH = ["Gaussian 1 %", "Gaussian 3 %", "Gaussian 5 %", "Laplace 3 %", "Student t3 3 %", "AR(1) 0.5, 3 %"]


@pytest.mark.parametrize("noise", QUIET_ENOUGH)
def test_at_most_one_false_alarm_in_10_000_steps(noise: str) -> None:
    assert statistics.fmean(clean(curve, noise, seed=7).total() for curve in CURVES) <= 1


@pytest.mark.parametrize("noise", QUIET_ENOUGH)
def test_troubles_are_found_in_time(noise: str) -> None:
    assert statistics.median(found("jump", 2000, noise, seed)[0] for seed in range(3)) <= JUMP_WITHIN
    assert statistics.median(found("drift", 2000, noise, seed)[0] for seed in range(3)) <= SLOPE_WITHIN


def test_noise_of_ten_percent_is_beyond_it() -> None:
    assert found("drift", 500, "Gaussian 10 %", seed=0)[0] > SLOPE_WITHIN


def test_a_step_is_cheap() -> None:
    assert microseconds() < 50


def test_the_table_has_a_cell_a_header() -> None:
    with ThreadPool(1) as pool:
        (row,) = rows({"noises": [measure("Gaussian 2 %", 1, pool)]})
    assert row[0] == "Gaussian 2 %"
    assert len(row) == len(HEADERS)
