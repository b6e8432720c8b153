"""When the gradient is said to change."""

import random

import pytest

from commopt.policy.steadiness import RATE_SPAN, Steadiness


def steady_one(steps: int = 200, norm: float = 1.0, rate: float | None = 0.1) -> Steadiness:
    steadiness = Steadiness()
    for _ in range(steps):
        steadiness.add(norm, rate)
    return steadiness


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_steady(seed: int) -> None:
    numbers = random.Random(seed)
    steadiness = Steadiness()
    for _ in range(500):
        steadiness.add(numbers.gauss(1.0, 0.1), 0.1)
        assert not steadiness.changing


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_jump_of_the_learning_rate_lasts_for_its_span(factor: float) -> None:
    steadiness = steady_one()
    seen = []
    for _ in range(RATE_SPAN + 5):
        steadiness.add(1.0, 0.1 * factor)
        seen.append(steadiness.changing)
    assert RATE_SPAN == 20
    assert seen == [True] * (RATE_SPAN - 1) + [False] * 6


def test_a_slow_decay_of_the_learning_rate_is_steady() -> None:
    steadiness = Steadiness()
    rate = 0.1
    for _ in range(500):
        rate *= 0.99
        steadiness.add(1.0, rate)
        assert not steadiness.changing


def test_a_warm_up_of_the_learning_rate_is_not() -> None:
    steadiness = Steadiness()
    for step in range(1, 31):
        steadiness.add(1.0, 0.001 * step)
    assert steadiness.changing


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_norm_that_moves_is_changing_and_then_steady_again(factor: float) -> None:
    steadiness, norm, seen = steady_one(), 1.0, []
    for step in range(150):
        norm *= factor**0.2 if step < 5 else 1.0
        steadiness.add(norm, 0.1)
        seen.append(steadiness.changing)
    assert any(seen[:15])
    assert not seen[0]
    assert not any(seen[40:])


def test_what_has_no_logarithm_is_left_out() -> None:
    steadiness = steady_one()
    for norm in (float("nan"), float("inf"), 0.0, -1.0):
        steadiness.add(norm, None)
        steadiness.add(norm, 0.0)
        assert not steadiness.changing
    steadiness.add(1.0, 0.1)
    assert not steadiness.changing


def test_nothing_is_said_before_anything_is_known() -> None:
    assert not Steadiness().changing
    assert not steady_one(1, norm=1e-9, rate=None).changing  # means of what was seen, not of a start at zero
