import math
from dataclasses import replace
from typing import Any

import pytest

from commopt.guard import Verdict
from tests.guard.runs import HEALTHY, Run, actions


def first(verdicts: list[Verdict]) -> Verdict:
    return next(verdict for verdict in verdicts if verdict.action != "pass")


# Non-finite steps and memory


def test_a_non_finite_step_is_skipped_and_leaves_no_trace_in_the_statistics() -> None:
    clean, faulty = Run(), Run()
    clean.go(150)
    faulty.go(70)
    verdict = faulty.guard.step(replace(HEALTHY, step=70, finite=False, loss=math.nan, gradient_norm=math.nan), True)
    faulty.go(80)
    assert verdict.action == "skip"
    assert "non-finite" in verdict.reason
    for series in ("loss", "norm"):
        assert faulty.guard.state_dict()[series] == clean.guard.state_dict()[series]


def test_ten_non_finite_steps_fall_back_and_ten_more_roll_back() -> None:
    run = Run()
    run.go(30)
    verdicts = run.go(10, finite=False) + run.go(10, compressed=False, finite=False)
    assert actions(verdicts) == ["skip"] * 9 + ["fall_back"] + ["skip"] * 9 + ["roll_back"]
    assert verdicts[-1].onset == 30


def test_a_scaler_that_looks_for_its_scale_is_left_alone() -> None:
    run = Run()
    for _ in range(5):
        assert set(actions(run.go(9, finite=False))) == {"skip"}
        assert actions(run.go(1)) == []


def test_an_infinite_norm_of_finite_gradients_is_not_finite_either() -> None:
    assert Run().go(1, gradient_norm=math.inf)[0].action == "skip"


def test_running_out_of_memory_falls_back_at_once() -> None:
    (verdict,) = Run().go(1, out_of_memory=True)
    assert verdict.action == "fall_back"
    assert "memory" in verdict.reason


def test_nothing_falls_back_further_than_to_no_compression() -> None:
    run = Run()
    assert actions(run.go(1, compressed=False, plan="none", out_of_memory=True)) == ["skip"]
    run.go(1, out_of_memory=True)
    # The switch takes effect a step later.
    assert actions(run.go(1, out_of_memory=True) + run.go(1)) == ["skip"]


# Spikes


@pytest.mark.parametrize("values", [{"loss": 9.0}, {"gradient_norm": 30.0}])
def test_a_spike_is_skipped_and_not_learnt(values: dict[str, Any]) -> None:
    run = Run()
    run.go(200)
    for _ in range(5):
        (verdict,) = run.go(1, **values)
        assert verdict.action == "skip"
        assert verdict.reason.startswith("spike")
        assert actions(run.go(3)) == []


def test_no_spike_before_the_window_is_full() -> None:
    run = Run(window=64)
    assert actions(run.go(63) + run.go(1, gradient_norm=30.0)) == []
    run = Run(window=64)
    assert actions(run.go(64) + run.go(1, gradient_norm=30.0)) == ["skip"]


def test_trouble_while_the_window_fills_is_not_taken_for_noise() -> None:
    run = Run()
    run.go(100)
    assert actions(run.go(1, gradient_norm=100.0)) == []
    run.go(100)
    assert actions(run.go(1, gradient_norm=100.0)) == ["skip"]


def test_a_norm_that_falls_at_first_does_not_hide_a_spike() -> None:
    run = Run()
    for passed in range(200):
        assert actions(run.go(1, factor=1.0 + 9.0 * math.exp(-passed / 40))) == []
    assert actions(run.go(1, gradient_norm=50.0)) == ["skip"]


def test_a_restless_norm_does_not_hide_what_is_ten_times_too_large() -> None:
    run = Run()
    run.go(200)
    for norm in (1.8, 3.0, 5.0, 9.0):  # each of them accepted, given the one before
        assert actions(run.go(1, gradient_norm=norm) + run.go(20)) == []
    assert actions(run.go(1, gradient_norm=50.0)) == ["skip"]


def test_what_falls_is_no_spike() -> None:
    run = Run()
    assert actions(run.go(200) + run.go(5, gradient_norm=0.001, loss=0.1)) == []


def test_hardly_noisy_training_has_no_spikes_of_a_percent() -> None:
    run = Run(noise=1e-6)
    assert actions(run.go(200) + run.go(1, loss=3.03)) == []


def test_three_spikes_in_a_row_roll_back_to_before_the_first() -> None:
    run = Run()
    run.go(200)
    verdicts = run.go(3, gradient_norm=30.0)
    assert actions(verdicts) == ["skip", "skip", "roll_back"]
    assert verdicts[-1].onset == 200


def test_after_a_roll_back_for_spikes_the_next_one_is_seen_at_once() -> None:
    run = Run(cool_down=5)
    run.go(200)
    run.go(3, gradient_norm=30.0)
    run.guard.rolled_back(150)
    run.go(10, compressed=False)
    assert actions(run.go(1, gradient_norm=30.0)) == ["skip"]


def test_without_compression_a_new_level_is_accepted() -> None:
    run = Run()
    run.go(200, compressed=False)
    assert actions(run.go(300, compressed=False, factor=30.0)) == ["skip", "skip"]


@pytest.mark.parametrize("level", [-500.0, -2.0])
def test_spikes_of_a_loss_that_is_not_positive(level: float) -> None:
    run = Run()
    assert actions(run.go(300, level=level)) == []
    assert actions(run.go(1, loss=level + abs(level))) == ["skip"]


# Drift


def rising(passed: int) -> float:
    return 3.0 * math.exp(0.0005 * passed)


def test_a_drift_falls_back_while_the_rise_is_small_and_rolls_back_when_it_is_not() -> None:
    for rise, action in ((0.5, "fall_back"), (0.001, "roll_back")):
        run = Run(roll_back_rise=rise)
        assert actions(run.go(600)) == []
        verdict = first(run.go(150, level=rising))
        assert verdict.action == action
        assert verdict.reason.startswith("drift")
        assert verdict.onset is not None
        assert 300 < verdict.onset <= 600


def test_a_loss_far_above_its_level_rolls_back() -> None:
    run = Run(noise=0.05)
    run.go(600)
    assert first(run.go(20, level=3.45)).action == "roll_back"


@pytest.mark.parametrize(("before", "after"), [(-5.0, -4.0), (-0.2, 0.3)])
def test_a_drift_of_a_loss_that_is_not_positive(before: float, after: float) -> None:
    run = Run(noise=0.05)
    assert actions(run.go(600, level=before)) == []
    verdicts = run.go(150, level=lambda passed: before + (after - before) * passed / 150)
    assert actions(verdicts)[-1] in ("fall_back", "roll_back", "re_arm")


def test_steps_without_a_loss_are_passed_over() -> None:
    run = Run()
    for loss in (None, math.nan, math.inf):
        assert actions(run.go(200, loss=loss)) == []
    assert actions(run.go(1, gradient_norm=30.0)) == ["skip"]


# Fidelity


def test_two_bad_windows_roll_back_to_before_the_first() -> None:
    run = Run()
    run.go(49)
    run.go(1, sign_agreement=0.99)
    verdicts = run.bad_windows(2)
    assert actions(verdicts) == ["roll_back"]
    assert verdicts[-1].onset == 50
    assert "fidelity" in verdicts[-1].reason


def test_the_first_windows_begin_with_the_run() -> None:
    assert Run().bad_windows(2)[-1].onset == 0


def test_one_bad_window_is_not_enough() -> None:
    run = Run()
    for _ in range(4):
        assert actions(run.bad_windows(1) + run.go(49) + run.go(1, sign_agreement=0.9)) == []


def test_fidelity_without_compression_is_not_judged() -> None:
    assert actions(Run().go(4, compressed=False, sign_agreement=0.05)) == []


# Validation


def validate(run: Run, *values: float) -> list[str]:
    return [run.guard.validation(value, run.step).action for value in values]


def test_validation_falls_back_when_worse_twice_running() -> None:
    run = Run()
    run.go(100, compressed=False)
    assert validate(run, 2.0, 2.5) == ["pass", "pass"]  # the better of them is the anchor
    run.go(100)
    assert validate(run, 2.009) == ["pass"]
    assert validate(run, 2.02, 2.0, 2.02, 2.02) == ["pass", "pass", "pass", "fall_back"]


@pytest.mark.parametrize("anchor", [-2.0, 0.0])
def test_validation_that_is_not_positive(anchor: float) -> None:
    run = Run()
    validate(run, anchor)
    run.go(100)
    assert validate(run, anchor, anchor - 1, anchor - 1, anchor + 0.1, anchor + 0.1) == ["pass"] * 4 + ["fall_back"]


def test_a_validation_loss_that_is_not_a_number_is_worse() -> None:
    run = Run()
    run.go(100)
    assert validate(run, math.nan, math.nan) == ["pass", "fall_back"]


def test_compressed_values_are_no_anchor_until_compression_is_long_gone() -> None:
    run = Run(cool_down=100)
    run.go(10)
    assert validate(run, 1.0, 2.0, 2.0) == ["pass"] * 3
    run.go(99, compressed=False)
    validate(run, 1.0)
    run.go(1, compressed=False)
    validate(run, 3.0)
    run.go(10)
    assert validate(run, 2.9, 2.9, 3.1, 3.1) == ["pass"] * 3 + ["fall_back"]


# Modes


def test_after_a_cool_down_compression_returns_one_rung_milder_and_each_is_twice_as_long() -> None:
    run = Run(cool_down=30)
    for rung, cool_down in ((1, 30), (2, 60), (3, 120)):
        assert run.go(1, out_of_memory=True)[0].action == "fall_back"
        assert run.guard.mode == "cooling"
        assert [verdict.action for verdict in run.go(cool_down, compressed=False)] == ["pass"] * (cool_down - 1) + [
            "re_arm"
        ]
        assert (run.guard.mode, run.guard.rung) == ("armed", rung)


def test_after_the_last_roll_back_compression_stays_off() -> None:
    run = Run(cool_down=10, roll_backs=2)
    run.bad_windows()
    run.go(10, compressed=False)
    assert run.mode() == "armed"
    run.bad_windows()
    assert run.mode() == "finished"
    assert actions(run.go(500, compressed=False)) == []


def finished() -> Run:
    run = Run(roll_backs=1)
    assert actions(run.bad_windows()) == ["roll_back"]
    run.guard.rolled_back(0)
    return run


def test_a_finished_run_that_diverges_stops() -> None:
    run = finished()
    assert actions(run.go(500, compressed=False)) == []
    verdict = first(run.go(300, compressed=False, level=rising))
    assert verdict.action == "stop"
    assert "compression" in verdict.reason


def test_a_finished_run_that_the_user_compresses_again_falls_back_and_does_not_stop() -> None:
    run = finished()
    assert actions(run.go(500, compressed=True)) == []
    verdict = first(run.go(300, compressed=True, level=rising))
    assert verdict.action == "fall_back"
    assert run.mode() == "finished"


def test_a_finished_run_without_finite_gradients_stops() -> None:
    assert actions(finished().go(20, compressed=False, finite=False)) == ["skip"] * 19 + ["stop"]


def test_a_drift_within_the_cool_down_prolongs_it() -> None:
    run = Run(cool_down=300)
    run.go(1, out_of_memory=True)
    run.go(200, compressed=False)
    verdicts = run.go(290, compressed=False, level=rising)
    assert actions(verdicts) == []
    assert any("anew" in verdict.reason for verdict in verdicts)
    assert actions(run.go(700, compressed=False, level=rising(290))) == ["re_arm"]


def test_a_run_that_was_never_compressed_is_only_told_to_skip() -> None:
    run = Run()
    verdicts = run.go(300, compressed=False) + run.go(3000, compressed=False, level=rising)
    verdicts += run.go(50, compressed=False, finite=False) + run.go(50, compressed=False, level=100.0, factor=50.0)
    assert set(actions(verdicts)) == {"skip"}
    assert validate(run, 1.0, 9.0, 9.0, math.nan, math.nan) == ["pass"] * 5
    assert run.guard.mode == "armed"


def test_going_back_forgets_what_was_seen() -> None:
    run = Run()
    run.go(400)
    run.bad_windows(1)
    run.guard.rolled_back(100)
    run.step = 100
    verdicts = run.go(100, factor=30.0) + run.bad_windows(2)
    assert actions(verdicts) == ["roll_back"]
    assert verdicts[-1].onset == 100
