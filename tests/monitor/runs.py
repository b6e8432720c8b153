"""Runs that never happened: records and events as an engine would make them."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from commopt.monitor import Monitor
from commopt.records import Event, StepRecord

ATTACK = '</td><script>document.title = "owned"</script><img src=x onerror="document.title=1"> & "quoted" <b>'

PLAIN = StepRecord(
    step=0,
    plan="none",
    finite=True,
    out_of_memory=False,
    loss=2.0,
    gradient_norm=1.0,
    step_seconds=0.5,
    exposed_seconds=0.25,
    wire_seconds=0.375,
    codec_seconds=0.0,
    bytes_sent=8e6,
    bytes_uncompressed=8e6,
    samples=16.0,
)
COMPRESSED = replace(
    PLAIN,
    plan="int8",
    step_seconds=0.3125,
    exposed_seconds=0.0625,
    wire_seconds=0.125,
    codec_seconds=0.03125,
    bytes_sent=2e6,
    cosine=0.99,
    sign_agreement=0.97,
    residual_ratio=0.125,
)


def steps(record: StepRecord, numbers: Iterable[int]) -> list[StepRecord]:
    """``record`` at other steps, with a falling loss and times that vary."""
    noise = random.Random(7)
    return [
        replace(
            record,
            step=number,
            loss=1.5 + 2.5 * math.exp(-number / 300) + noise.gauss(0, 0.05),
            gradient_norm=1.0 + noise.expovariate(2.0),
            step_seconds=record.step_seconds * noise.uniform(0.95, 1.15),
            wire_seconds=record.wire_seconds * noise.uniform(0.9, 1.2),
            exposed_seconds=record.exposed_seconds * noise.uniform(0.7, 1.2),
            cosine=None if record.cosine is None or number % 50 else record.cosine - noise.uniform(0, 0.02),
            residual_ratio=None if record.residual_ratio is None or number % 50 else noise.uniform(0.1, 0.3),
        )
        for number in numbers
    ]


def eventful(directory: Path) -> None:
    """A run that spikes, rolls back, falls back, arms again, is killed within a line, and is resumed."""
    options = {"compressor": "int8", "model": "a <b>bold</b> one"}
    first = Monitor(directory, world=2, gpu_hour_price=2.0, parameters=options)
    for record in steps(COMPRESSED, range(230)):
        first.add(record)
    first.event(Event(37, "skip", "the gradient norm of 41.2 is 8.1 sigma from its mean of 1.4"))
    first.event(Event(229, "roll_back", f"the loss drifts {ATTACK}", restored_step=180))
    for record in steps(PLAIN, range(180, 320)):
        first.add(record)
    first.event(Event(319, "re_arm", "120 steps without compression went well; goes on with 'int8'"))
    for record in steps(COMPRESSED, range(320, 470)):
        first.add(record)
    with (directory / "commopt.jsonl").open("a") as file:
        file.write('{"kind": "window", "step": 479, "st')
    resumed = Monitor(directory, world=2, gpu_hour_price=2.0, parameters=options)
    for record in steps(COMPRESSED, range(420, 640)):
        resumed.add(record)
    resumed.event(Event(560, "fall_back", "the validation loss is 0.7 % worse than the best, twice running"))
    resumed.event(Event(601, "note", "the learning rate changed"))
    resumed.close()
