"""What the totals of a run tell a person."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from commopt.monitor import Monitor, Summary, advice, render
from commopt.monitor.summary import SHOWN_EVENTS, seconds, size
from commopt.records import Event, StepRecord
from tests.monitor.runs import ATTACK, COMPRESSED, PLAIN


def summary_of(*records: StepRecord, price: float | None = None) -> Summary:
    monitor = Monitor(gpu_hour_price=price, gpus=4)
    for record in records:
        monitor.add(record)
    return monitor.summary()


def test_the_bound_is_one_over_what_is_left() -> None:
    text = advice(0.35)
    assert "waited 35.0% of their time" in text
    assert "at most 1.54 times as fast" in text
    assert "for gradients (network, slower ranks)" in text
    assert text.endswith("Recommended: compress.")
    assert "without a bound" in advice(1.0)


def test_under_the_threshold_the_advice_is_to_do_nothing_and_says_why() -> None:
    text = advice(0.1)
    assert "at most 1.11 times as fast" in text
    assert "under the threshold of 20%" in text
    assert "do nothing" in text
    assert "codec's time" in text
    assert "Recommended: compress" in advice(0.1, threshold=0.05)
    assert "Recommended: compress" in advice(0.2)


def test_a_share_of_compressed_steps_is_not_passed_off_as_another() -> None:
    for share in (0.05, 0.5):
        text = advice(share, compressed=True)
        assert text.startswith("Compressed steps waited")
        assert "for gradients (network, compression, slower ranks)" in text
        assert "not that of an uncompressed run" in text
    assert "leave it as it is" in advice(0.05, compressed=True)
    assert "measure some uncompressed steps first: handle.disable()" in advice(0.5, compressed=True)


def test_with_a_price_the_waiting_has_one() -> None:
    assert "At 16.00 an hour for all ranks together the waiting costs 4.00 an hour, 96.00 a day." in advice(
        0.25, hour_price=16.0
    )
    assert "costs" not in advice(0.25)


def test_uncompressed_steps_tell_what_the_run_would_have_cost() -> None:
    records = [COMPRESSED] * 16 + [PLAIN] * 4
    summary = summary_of(*records, price=900.0)
    assert summary.advice.startswith("Uncompressed steps waited 50.0%")
    assert (
        "500 ms uncompressed (mean of 4) and 312 ms compressed (mean of 16), 1.60 times as fast" in summary.comparison
    )
    assert "still waited 20.0% of it" in summary.comparison
    assert "would have taken 3 s longer, worth 3.00." in summary.comparison

    assert summary.advice.count("Recommended") == 1
    assert "Recommended: go on compressing." in summary.advice


@pytest.mark.parametrize("exposed", [0.05, 0.25])
def test_compression_that_costs_more_than_it_saves_is_said(exposed: float) -> None:
    slow, plain = replace(COMPRESSED, step_seconds=0.75), replace(PLAIN, exposed_seconds=exposed)
    summary = summary_of(*[slow] * 4, plain)
    assert summary.comparison.endswith("Compression cost 1 s of this run.")
    assert summary.advice.count("Recommended") == 1
    assert "Recommended: train uncompressed here: compressed, a step takes 1.50 times as long." in summary.advice
    assert ("A cheaper compressor may still help." in summary.advice) == (exposed == 0.25)


def test_one_process_hears_nothing_of_networks() -> None:
    alone = replace(COMPRESSED, bytes_sent=0.0, bytes_uncompressed=0.0)
    summary = summary_of(alone, replace(alone, plan="none"), price=2.0)
    assert summary.advice == "One process exchanges nothing: there is nothing to compress."
    assert summary.comparison == "Nothing was sent."


def test_what_was_not_measured_is_said() -> None:
    assert "was not measured" in summary_of(COMPRESSED).comparison
    assert summary_of(COMPRESSED).advice.startswith("Compressed steps waited 20.0%")
    assert summary_of(PLAIN).comparison == "No step was compressed."
    empty = summary_of()
    assert empty.advice == "No step was measured."
    assert empty.comparison == "No step was compressed."


def shown(summary: Summary, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(summary))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_fits_a_terminal() -> None:
    text = shown(summary_of(*[COMPRESSED] * 3, *[PLAIN] * 2))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    values = {label: row for label, *row in rows}
    assert values["steps"] == ["3", "2", "5"]
    assert values["exposed"] == ["62.5 ms", "250 ms", "138 ms"]
    assert values["saved"] == ["18 MB", "0 B", "18 MB"]
    assert values["comm/comp"] == ["0.50", "1.50", "0.90"]
    assert "wire is the time inside collectives" in " ".join(text.split())
    assert values["sent"] == ["2 MB (1/4.0)", "8 MB (1/1.0)", "4.4 MB (1/1.8)"]


def test_the_vote_of_uncompressed_steps_saves_nothing_and_is_no_loss() -> None:
    assert summary_of(replace(PLAIN, bytes_sent=PLAIN.bytes_uncompressed + 5e3)).total.bytes_saved == 0


def test_steps_of_before_a_resume_are_told_apart() -> None:
    text = shown(replace(summary_of(*[PLAIN] * 20), before_resume=13))
    assert "Communication, 13 of the steps before this resume" in " ".join(text.split())
    assert "resume" not in shown(summary_of(PLAIN))


def test_events_are_shown_as_text_and_the_last_ones_only() -> None:
    events = [Event(step, "skip", f"[red]number {step}[/red] {ATTACK}") for step in range(SHOWN_EVENTS + 5)]
    events.append(Event(99, "roll_back", "[/] drift", restored_step=64))
    text = shown(replace(summary_of(PLAIN), events=events), width=200)
    assert f"the last {SHOWN_EVENTS} of {SHOWN_EVENTS + 6}" in text
    assert "roll-back to step 64" in text
    assert "[/] drift" in text
    assert f"[red]number {SHOWN_EVENTS}[/red]" in text
    assert "number 5[" not in text
    assert "Communication" in shown(summary_of())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7200.0, "2 h"),
        (90.0, "1.5 min"),
        (1.0, "1 s"),
        (0.25, "250 ms"),
        (2e-5, "20 us"),
        (0.0, "0"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations_are_for_people(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(999, "999 B"), (2e6, "2 MB"), (3.21e12, "3.21 TB"), (-4e3, "-4 kB")])
def test_sizes_are_for_people(value: float, text: str) -> None:
    assert size(value) == text
