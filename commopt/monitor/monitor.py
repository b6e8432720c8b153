"""Watches a run: windows of means, one line of JSON each, and totals that survive in a checkpoint."""

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from commopt.errors import CheckpointError, CommOptWarning, ConfigError
from commopt.monitor.plain import from_plain, to_plain
from commopt.monitor.summary import Summary, Totals, Window, add_up
from commopt.records import Event, StepRecord

FILE_NAME = "commopt.jsonl"
VERSION = 1


@dataclass(frozen=True)
class Run:
    """The line that begins what one process writes; a resumed run begins with another one.

    Args:
        version: of the lines.
        time: when it began, ISO 8601, UTC.
        world: number of ranks.
        gpus: number of GPUs that are paid for.
        threshold: see ``advice``.
        gpu_hour_price: of one GPU, in any currency.
        parameters: whatever tells runs apart, for example the compressor.
    """

    version: int
    time: str
    world: int
    gpus: int
    threshold: float
    gpu_hour_price: float | None
    parameters: Mapping[str, Any]

    @property
    def hour_price(self) -> float | None:
        """Of all GPUs together."""
        return None if self.gpu_hour_price is None else self.gpu_hour_price * self.gpus


@dataclass
class _State:
    """What a checkpoint holds of a monitor."""

    step: int = -1
    plan: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    cosine: float | None = None
    sign_agreement: float | None = None
    residual_ratio: float | None = None
    window: Totals = field(default_factory=Totals)
    plans: dict[str, Totals] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Monitor:
    """Adds up the steps of one rank. Takes some microseconds a step and holds no tensors.

    Rank 0 appends to ``directory / "commopt.jsonl"``: an object a line, with ``kind`` one of run, window, event and
    summary and the fields of ``Run``, ``Window``, ``Event`` and ``Summary``. NaN and infinity are null. A file that
    cannot be written is given up with one warning, and training goes on.

    Args:
        directory: of the run; None writes nothing. It is made when there is something to write.
        rank, world: of this process.
        every: steps of a window. A window ends earlier where the plan changes.
        threshold: exposed share under which the advice is to do nothing.
        gpu_hour_price: of one GPU, in any currency.
        gpus: how many are paid for; one a rank where it is not given.
        parameters: plain values that tell runs apart, for example the compressor.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        every: int = 10,
        threshold: float = 0.2,
        gpu_hour_price: float | None = None,
        gpus: int | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if every < 1:
            raise ConfigError(f"a window of {every} steps is empty: every must be at least 1.")
        if not 0 <= threshold <= 1:
            raise ConfigError(f"threshold must be a share from 0 to 1, got {threshold!r}.")
        if gpu_hour_price is not None and not 0 <= gpu_hour_price < math.inf:
            raise ConfigError(f"gpu_hour_price must be a price, got {gpu_hour_price!r}.")
        gpus = world if gpus is None else gpus
        if gpus < 1:
            raise ConfigError(f"gpus must be at least 1, got {gpus!r}.")
        try:
            parameters = to_plain(parameters or {})
        except TypeError as error:
            raise ConfigError(f"parameters must be plain values: {error}.") from error
        began = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.every = every
        self.run = Run(VERSION, began, world, gpus, threshold, gpu_hour_price, parameters)
        self._path = Path(directory) / FILE_NAME if directory is not None and rank == 0 else None
        self._began = False  # whether the run line stands in the file
        self._state = _State()
        self._before_resume = 0

    def add(self, record: StepRecord, taken: bool = True) -> Window | None:
        """Counts a step, and whether the guard let it be taken; the window that it completed, or that it ended by being
        of another plan."""
        state, done = self._state, None
        if record.plan != state.plan:
            done = self._end_window()
            state.plan, state.cosine, state.sign_agreement, state.residual_ratio = record.plan, None, None, None
        state.step = record.step
        state.window.add(record, self.run.world, taken)
        if record.loss is not None and math.isfinite(record.loss):
            state.losses.append(record.loss)
        if math.isfinite(record.gradient_norm):
            state.norms.append(record.gradient_norm)
        if record.cosine is not None:
            state.cosine, state.sign_agreement = record.cosine, record.sign_agreement
        if record.residual_ratio is not None:
            state.residual_ratio = record.residual_ratio
        return self._end_window() if state.window.steps >= self.every else done

    def event(self, event: Event) -> None:
        """Keeps what was done, and why."""
        self._state.events.append(event)
        self._write("event", event)

    def summary(self) -> Summary:
        """Of all steps so far, those before a resume included."""
        state = self._state
        plans = dict(state.plans)
        if state.window.steps:
            plans[state.plan] = add_up([plans.get(state.plan, Totals()), state.window])
        run = self.run
        return Summary(plans, tuple(state.events), run.threshold, run.hour_price, self._before_resume)

    def close(self) -> Window | None:
        """Ends the window under way, which it returns, and writes the summary. Steps that follow begin another run."""
        last = self._end_window()
        if self._began:
            summary = self.summary()
            figures = {"plans": summary.plans, "comparison": summary.comparison, "advice": summary.advice}
            self._write("summary", figures)
            self._began = False
        return last

    def state_dict(self) -> dict[str, Any]:
        """Totals and events, as plain values of JSON. The window under way counts among the totals: whoever goes on
        begins another one, since this run writes it, too."""
        state = self._state
        latest = {entry.name: getattr(state, entry.name) for entry in fields(_Latest)}
        return {"version": VERSION, **to_plain({**latest, "plans": self.summary().plans, "events": state.events})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` gave, with a new window.

        Raises:
            CheckpointError: it gave something else; the monitor stays as it was.
        """
        try:
            values = dict(state)
            if values.pop("version") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            plans = {str(name): from_plain(Totals, totals) for name, totals in dict(values.pop("plans")).items()}
            events = [from_plain(Event, event) for event in values.pop("events")]
            latest = from_plain(_Latest, values)
            before_resume = int(add_up(plans.values()).steps)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"the monitor's state cannot be read: {error}. Nothing of it was taken over."
            ) from error
        self._state = _State(**vars(latest), plans=plans, events=events)
        self._before_resume = before_resume

    def _end_window(self) -> Window | None:
        state, totals = self._state, self._state.window
        if not totals.steps:
            return None
        steps = totals.steps
        window = Window(
            step=state.step,
            steps=int(steps),
            skipped=int(totals.skipped),
            plan=state.plan,
            loss=_mean(state.losses),
            gradient_norm=_mean(state.norms),
            step_seconds=totals.step_seconds / steps,
            compute_seconds=totals.compute_seconds / steps,
            exposed_seconds=totals.exposed_seconds / steps,
            wire_seconds=totals.wire_seconds / steps,
            codec_seconds=totals.codec_seconds / steps,
            bytes_sent=totals.bytes_sent / steps,
            bytes_uncompressed=totals.bytes_uncompressed / steps,
            ratio=totals.ratio,
            exposed_share=totals.exposed_share,
            compression_ratio=totals.compression_ratio,
            throughput=totals.throughput,
            cosine=state.cosine,
            sign_agreement=state.sign_agreement,
            residual_ratio=state.residual_ratio,
        )
        state.plans[state.plan] = add_up([state.plans.get(state.plan, Totals()), totals])
        state.window, state.losses, state.norms = Totals(), [], []
        self._write("window", window)
        return window

    def _write(self, kind: str, values: Any) -> None:
        if self._path is None:
            return
        try:
            text = _line(kind, values)
            if not self._began:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                text = _line("run", self.run) + text
            with self._path.open("a+b") as file:  # opened for each line, so that nothing is ever left to flush or close
                if not self._began and _ends_within_a_line(file):
                    file.write(b"\n")  # the run before was killed
                file.write(text.encode())
            self._began = True
        except OSError as error:
            path, self._path, self._began = self._path, None, False
            warnings.warn(
                f"{path} cannot be written: {error}. Training goes on and nothing more is written there; totals and "
                "events are kept.",
                CommOptWarning,
                stacklevel=3,
            )


@dataclass(frozen=True)
class _Latest:
    """The flat part of ``_State``."""

    step: int
    plan: str
    cosine: float | None
    sign_agreement: float | None
    residual_ratio: float | None


def _ends_within_a_line(file: BinaryIO) -> bool:
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"


def _line(kind: str, values: Any) -> str:
    return json.dumps({"kind": kind, **to_plain(values)}, allow_nan=False) + "\n"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
