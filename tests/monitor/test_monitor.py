"""Windows, lines and totals of a monitor."""

import json
import math
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commopt.errors import CheckpointError, CommOptWarning, ConfigError
from commopt.monitor import FILE_NAME, Monitor, Summary, Totals, Window
from commopt.monitor.summary import add_up
from commopt.records import Event, StepRecord
from tests.monitor.runs import COMPRESSED, PLAIN, steps

SKIP = Event(3, "skip", "a spike")


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()]


def feed(monitor: Monitor, records: list[StepRecord]) -> list[Window]:
    return [window for record in records if (window := monitor.add(record)) is not None]


def test_a_window_holds_the_means_of_its_steps() -> None:
    first = replace(COMPRESSED, step=4, loss=3.0, gradient_norm=2.0)
    second = replace(COMPRESSED, step=5, loss=None, step_seconds=0.6875, exposed_seconds=0.1875, cosine=None)
    monitor = Monitor(every=2, world=3)
    assert monitor.add(first) is None
    window = monitor.add(second)
    assert window == Window(
        step=5,
        steps=2,
        skipped=0,
        plan="int8",
        loss=3.0,
        gradient_norm=1.5,
        step_seconds=0.5,
        compute_seconds=0.375,
        exposed_seconds=0.125,
        wire_seconds=0.125,
        codec_seconds=0.03125,
        bytes_sent=2e6,
        bytes_uncompressed=8e6,
        ratio=1 / 3,
        exposed_share=0.25,
        compression_ratio=4.0,
        throughput=3 * 32 / 1.0,
        cosine=0.99,
        sign_agreement=0.97,
        residual_ratio=0.125,
    )
    assert monitor.add(first) is None


def test_a_window_ends_where_the_plan_changes() -> None:
    monitor = Monitor(every=4)
    windows = feed(monitor, [COMPRESSED] * 6 + [PLAIN] * 5)
    assert [(window.plan, window.steps) for window in windows] == [("int8", 4), ("int8", 2), ("none", 4)]
    assert [window.cosine for window in windows] == [0.99, 0.99, None]
    last = monitor.close()
    assert last is not None
    assert (last.plan, last.steps) == ("none", 1)
    assert monitor.close() is None


def test_steps_that_were_not_taken_are_counted_and_leave_the_means_alone() -> None:
    monitor = Monitor(every=4)
    bad = replace(COMPRESSED, finite=False, loss=math.nan, gradient_norm=math.inf)
    (window,) = feed(
        monitor, [COMPRESSED, bad, replace(COMPRESSED, out_of_memory=True), replace(COMPRESSED, corrupt=True)]
    )
    assert (window.steps, window.skipped, window.loss, window.gradient_norm) == (4, 3, 2.0, 1.0)
    (window,) = feed(monitor, [bad] * 4)
    assert (window.skipped, window.loss, window.gradient_norm) == (4, None, None)


def test_a_line_each_for_run_windows_events_and_summary(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    monitor = Monitor(
        directory, world=2, gpus=8, gpu_hour_price=1.5, every=2, parameters={"compressor": "int8", "rate": math.inf}
    )
    assert not directory.exists()
    monitor.event(SKIP)
    windows = feed(monitor, steps(COMPRESSED, range(5)))
    windows.append(monitor.close() or pytest.fail("a step was left"))

    run, event, *rest, summary = lines(directory)
    assert run.pop("time").endswith("+00:00")
    assert run == {
        "kind": "run",
        "version": 1,
        "world": 2,
        "gpus": 8,
        "threshold": 0.2,
        "gpu_hour_price": 1.5,
        "parameters": {"compressor": "int8", "rate": None},
    }
    assert event == {"kind": "event", **asdict(SKIP)}
    assert rest == [{"kind": "window", **asdict(window)} for window in windows]
    assert summary["plans"] == {"int8": asdict(monitor.summary().plans["int8"])}
    assert summary["advice"] == monitor.summary().advice


def test_each_line_is_there_at_once_and_another_run_is_appended(tmp_path: Path) -> None:
    monitor = Monitor(str(tmp_path), every=1)
    monitor.add(COMPRESSED)
    assert [line["kind"] for line in lines(tmp_path)] == ["run", "window"]
    monitor.close()
    monitor.close()
    monitor.add(COMPRESSED)
    Monitor(tmp_path).event(SKIP)
    kinds = [line["kind"] for line in lines(tmp_path)]
    assert kinds == ["run", "window", "summary", "run", "window", "run", "event"]


def test_a_line_that_was_left_unfinished_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"kind": "ru')
    Monitor(tmp_path).event(SKIP)
    unfinished, run, event = (tmp_path / FILE_NAME).read_text().splitlines()
    assert unfinished == '{"kind": "ru'
    assert [json.loads(line)["kind"] for line in (run, event)] == ["run", "event"]


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, rank=1, world=2)
    monitor.event(SKIP)
    monitor.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("obstacle", ["full disk", "no directory"])
def test_a_file_that_cannot_be_written_is_given_up_with_one_warning(tmp_path: Path, obstacle: str) -> None:
    directory = tmp_path / "run"
    if obstacle == "full disk":
        directory.mkdir()
        (directory / FILE_NAME).symlink_to("/dev/full")
    else:
        directory.write_text("in the way")
    monitor = Monitor(directory, every=1)
    with pytest.warns(CommOptWarning, match="Training goes on"):
        assert monitor.add(COMPRESSED) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.event(SKIP)
        monitor.add(COMPRESSED)
        monitor.close()
    assert monitor.summary().total.steps == 2
    assert monitor.summary().events == (SKIP,)


def test_a_resumed_monitor_counts_each_step_once_and_begins_a_window() -> None:
    records = steps(COMPRESSED, range(17)) + steps(PLAIN, range(17, 38))
    whole, first, second = Monitor(every=5), Monitor(every=5), Monitor(every=5)
    feed(whole, records)
    windows = feed(first, records[:13])
    for monitor in (whole, first):
        monitor.event(SKIP)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    windows += [last for last in (first.close(),) if last] + feed(second, records[13:])
    summary = second.summary()
    assert summary.events == whole.summary().events
    assert summary.before_resume == 13
    assert {name: totals.steps for name, totals in summary.plans.items()} == {"int8": 17, "none": 21}
    assert summary.total.bytes_sent == pytest.approx(whole.summary().total.bytes_sent)
    windows += [last for last in (second.close(),) if last]
    assert sum(window.steps for window in windows) == len(records)


def test_what_was_saved_does_not_change_when_training_goes_on() -> None:
    monitor = Monitor(every=5)
    feed(monitor, steps(COMPRESSED, range(7)))
    state = monitor.state_dict()
    before = json.dumps(state)
    feed(monitor, steps(COMPRESSED, range(7, 20)))
    monitor.event(SKIP)
    assert json.dumps(state) == before
    other = Monitor(every=5)
    other.load_state_dict(state)
    feed(other, steps(COMPRESSED, range(7, 20)))
    assert json.dumps(state) == before


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"plans": {"int8": {**asdict(Totals()), "steps": None}}},
        {"plans": {"int8": {"steps": "many"}}},
        {"plans": [1, 2]},
        {"events": [{"step": 1, "action": "explode", "reason": "", "restored_step": None}]},
        {"events": 3},
        {"plans": {"int8": {"steps": 1.0}}},
        {"step": 1.5},
        {"step": True},
        {"plan": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_foreign_state_is_refused_and_changes_nothing(damage: dict[str, Any]) -> None:
    monitor = Monitor()
    feed(monitor, steps(COMPRESSED, range(3)))
    before = monitor.state_dict()
    with pytest.raises(CheckpointError, match="monitor's state"):
        monitor.load_state_dict({**before, **damage})
    with pytest.raises(CheckpointError, match="monitor's state"):
        monitor.load_state_dict({key: value for key, value in before.items() if key not in damage} | {"x": 0})
    assert monitor.state_dict() == before


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"threshold": 1.5},
        {"threshold": math.nan},
        {"gpu_hour_price": -1.0},
        {"gpu_hour_price": math.inf},
        {"gpus": 0},
        {"parameters": {"model": object()}},
    ],
    ids=str,
)
def test_options_out_of_range_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Monitor(**options)


seconds = st.floats(0, 1e3)
records = st.builds(
    StepRecord,
    step=st.integers(0, 10**6),
    plan=st.sampled_from(["none", "int8", "topk"]),
    finite=st.booleans(),
    out_of_memory=st.booleans(),
    loss=st.none() | st.floats(),
    gradient_norm=st.floats(),
    step_seconds=seconds,
    exposed_seconds=seconds,
    wire_seconds=seconds,
    codec_seconds=seconds,
    bytes_sent=st.floats(0, 1e12),
    bytes_uncompressed=st.floats(0, 1e12),
    samples=st.none() | st.floats(0, 1e6),
)


@given(st.lists(records, max_size=40), st.integers(1, 7))
def test_the_windows_add_up_to_the_run(history: list[StepRecord], every: int) -> None:
    monitor = Monitor(every=every, world=2)
    windows = feed(monitor, history)
    last = monitor.close()
    windows += [last] if last else []
    expected = Totals()
    for record in history:
        expected.add(record, world=2)
    total = asdict(monitor.summary().total)
    assert total == pytest.approx(asdict(expected))
    rebuilt = asdict(add_up(window.totals(2) for window in windows))
    for name, value in total.items():  # a window tells the rate of its samples alone
        assert name in ("samples", "sampled_seconds") or rebuilt[name] == pytest.approx(value), name
    json.dumps(monitor.state_dict(), allow_nan=False)


def test_a_summary_includes_the_window_under_way() -> None:
    monitor = Monitor(every=10, gpu_hour_price=2.0, gpus=4)
    feed(monitor, [COMPRESSED] * 13 + [PLAIN] * 2)
    summary = monitor.summary()
    assert isinstance(summary, Summary)
    assert {name: totals.steps for name, totals in summary.plans.items()} == {"int8": 13, "none": 2}
    assert summary.hour_price == 8.0
    assert Monitor(world=2).summary().hour_price is None


def test_a_step_costs_less_than_100_microseconds(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path)
    history = steps(COMPRESSED, range(500))
    rounds = []
    for _ in range(5):
        start = time.process_time()
        feed(monitor, history)
        rounds.append((time.process_time() - start) / len(history))
    assert min(rounds) < 100e-6
