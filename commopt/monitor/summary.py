"""What steps cost, added up: totals, windows of means, the summary of a run, and the advice that follows from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commopt.records import Event, StepRecord

UNCOMPRESSED = "none"
SHOWN_EVENTS = 20


@dataclass
class Totals:
    """Sums over steps of one rank; added up over ranks, they are those of all. Seconds, bytes and shares are as in
    ``StepRecord``.

    Args:
        steps: how many.
        skipped: those among them whose gradient was not usable, see ``StepRecord``.
        step_seconds, compute_seconds, exposed_seconds, wire_seconds, codec_seconds: where the time went.
        bytes_sent, bytes_uncompressed: what was sent, and what plain DDP would have sent.
        samples: where the trainer counts them.
        sampled_seconds: of the steps that counted samples, divided by the number of ranks, so that samples over
            seconds is the rate of all ranks together.
    """

    steps: float = 0.0
    skipped: float = 0.0
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0
    wire_seconds: float = 0.0
    codec_seconds: float = 0.0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    samples: float = 0.0
    sampled_seconds: float = 0.0

    def add(self, record: StepRecord, world: int = 1, taken: bool = True) -> None:
        """Counts one step of one of ``world`` ranks, and whether the guard let it be taken."""
        self.steps += 1
        self.skipped += not (record.usable and taken)
        self.step_seconds += record.step_seconds
        self.compute_seconds += record.compute_seconds
        self.exposed_seconds += record.exposed_seconds
        self.wire_seconds += record.wire_seconds
        self.codec_seconds += record.codec_seconds
        self.bytes_sent += record.bytes_sent
        self.bytes_uncompressed += record.bytes_uncompressed
        if record.samples is not None:
            self.samples += record.samples
            self.sampled_seconds += record.step_seconds / world

    @property
    def ratio(self) -> float:
        """Communication to computation: seconds inside collectives, hidden or not, over seconds of computing."""
        return _over(self.wire_seconds, self.compute_seconds)

    @property
    def exposed_share(self) -> float:
        """The share of the time that backward waited for gradients: the network, compression, slower ranks."""
        return _over(self.exposed_seconds, self.step_seconds)

    @property
    def compression_ratio(self) -> float:
        """Uncompressed over sent bytes; 1 before anything was sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def bytes_saved(self) -> float:
        """What compression spared; 0 where more was sent, as in uncompressed steps, whose vote comes on top."""
        return max(self.bytes_uncompressed - self.bytes_sent, 0.0)

    @property
    def throughput(self) -> float | None:
        """Samples a second of all ranks together; None where nobody counts them."""
        return self.samples / self.sampled_seconds if self.sampled_seconds else None


def add_up(parts: Iterable[Totals]) -> Totals:
    """The sum of ``parts``; they stay as they are."""
    parts = list(parts)
    return Totals(*(sum(getattr(part, entry.name) for part in parts) for entry in fields(Totals)))


@dataclass(frozen=True)
class Window:
    """Means over consecutive steps of one plan. Seconds and bytes are those of one step on one rank.

    Args:
        step: the last one.
        steps: how many.
        skipped: those among them whose gradient was not usable, see ``StepRecord``.
        plan: name of their compressor, ``"none"`` for none.
        loss: mean of those that are known and finite; None where none is.
        gradient_norm: mean of the finite ones; None where none is.
        ratio: communication to computation, ``wire_seconds / compute_seconds``.
        exposed_share: ``exposed_seconds / step_seconds``.
        throughput: samples a second of all ranks together; None where nobody counts them.
        cosine, sign_agreement, residual_ratio: the latest of this plan that are known.
    """

    step: int
    steps: int
    skipped: int
    plan: str
    loss: float | None
    gradient_norm: float | None
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    wire_seconds: float
    codec_seconds: float
    bytes_sent: float
    bytes_uncompressed: float
    ratio: float
    exposed_share: float
    compression_ratio: float
    throughput: float | None
    cosine: float | None
    sign_agreement: float | None
    residual_ratio: float | None

    def totals(self, world: int) -> Totals:
        """The sums that it was made of."""
        seconds = self.step_seconds * self.steps
        return Totals(
            steps=self.steps,
            skipped=self.skipped,
            step_seconds=seconds,
            compute_seconds=self.compute_seconds * self.steps,
            exposed_seconds=self.exposed_seconds * self.steps,
            wire_seconds=self.wire_seconds * self.steps,
            codec_seconds=self.codec_seconds * self.steps,
            bytes_sent=self.bytes_sent * self.steps,
            bytes_uncompressed=self.bytes_uncompressed * self.steps,
            samples=(self.throughput or 0.0) * seconds / world,
            sampled_seconds=seconds / world if self.throughput is not None else 0.0,
        )


@dataclass(frozen=True)
class Summary:
    """What a run cost on one rank, and what was done about it.

    Args:
        plans: totals by name of the compressor, ``"none"`` for none.
        events: in the order in which they happened.
        threshold: see ``advice``.
        hour_price: of all GPUs together; None where it is not known.
        before_resume: steps among them that were taken before the run was resumed.
    """

    plans: Mapping[str, Totals]
    events: Sequence[Event]
    threshold: float
    hour_price: float | None
    before_resume: int = 0

    @property
    def total(self) -> Totals:
        """All steps together."""
        return add_up(self.plans.values())

    @property
    def uncompressed(self) -> Totals:
        """The steps without compression."""
        return self.plans.get(UNCOMPRESSED, Totals())

    @property
    def compressed(self) -> Totals:
        """The steps with any compression."""
        return add_up(totals for name, totals in self.plans.items() if name != UNCOMPRESSED)

    @property
    def slow_down(self) -> float | None:
        """Seconds of a compressed step over those of an uncompressed one; None where not both were measured."""
        plain, compressed = self.uncompressed, self.compressed
        if not plain.step_seconds or not compressed.step_seconds:
            return None
        return (compressed.step_seconds / compressed.steps) / (plain.step_seconds / plain.steps)

    @property
    def comparison(self) -> str:
        """What the run would have cost uncompressed, as far as it was measured."""
        plain, compressed = self.uncompressed, self.compressed
        if not compressed.steps:
            return "No step was compressed."
        if not self.total.bytes_sent:
            return "Nothing was sent."
        if self.slow_down is None:
            return "What the run would have cost uncompressed was not measured: every step was compressed."
        before, after = plain.step_seconds / plain.steps, compressed.step_seconds / compressed.steps
        saved = (before - after) * compressed.steps
        text = (
            f"A step took {seconds(before)} uncompressed (mean of {plain.steps:.0f}) and {seconds(after)} compressed "
            f"(mean of {compressed.steps:.0f}), {before / after:.2f} times as fast; compressed ones still waited "
            f"{compressed.exposed_share:.1%} of it. "
        )
        if saved <= 0:
            return text + f"Compression cost {seconds(-saved)} of this run."
        worth = f", worth {saved / 3600 * self.hour_price:.2f}" if self.hour_price is not None else ""
        return text + f"Uncompressed, the compressed steps would have taken {seconds(saved)} longer{worth}."

    @property
    def advice(self) -> str:
        """``advice`` on the uncompressed steps where there are any, otherwise on the compressed ones."""
        measured = self.uncompressed if self.uncompressed.steps else self.compressed
        if not measured.step_seconds:
            return "No step was measured."
        if not self.total.bytes_sent:
            return "One process exchanges nothing: there is nothing to compress."
        return advice(
            measured.exposed_share,
            self.threshold,
            compressed=not self.uncompressed.steps,
            slow_down=self.slow_down,
            hour_price=self.hour_price,
        )


def advice(
    exposed_share: float,
    threshold: float = 0.2,
    *,
    compressed: bool = False,
    slow_down: float | None = None,
    hour_price: float | None = None,
) -> str:
    """Whether it pays to do something about communication: one recommendation.

    A step that waits for the share s of its time takes at least 1 - s of it without the waiting: nothing that is done
    about communication gives more than a speed-up of 1/(1 - s).

    Args:
        exposed_share: s, from 0 to 1.
        threshold: the s under which to do nothing, as long as ``slow_down`` is not known.
        compressed: whether s is that of steps that were compressed already.
        slow_down: seconds of a compressed step over those of an uncompressed one; where both were measured it decides.
        hour_price: of all GPUs together, in any currency.
    """
    waited = f"{'Compressed' if compressed else 'Uncompressed'} steps waited {exposed_share:.1%} of their time"
    causes = "network, compression, slower ranks" if compressed else "network, slower ranks"
    bound = f"at most {1 / (1 - exposed_share):.2f} times as fast" if exposed_share < 1 else "without a bound"
    further = "further compression" if compressed else "compression"
    text = (
        f"{waited} for gradients ({causes}). The most that any {further} can give is 1/(1 - {exposed_share:.3f}): "
        f"{bound}. "
    )
    if compressed:
        text += "This is the share that is left after compression, not that of an uncompressed run. "
    if slow_down is not None and slow_down < 1:
        text += "Recommended: go on compressing."
    elif slow_down is not None:
        text += f"Recommended: train uncompressed here: compressed, a step takes {slow_down:.2f} times as long."
        text += " A cheaper compressor may still help." if exposed_share >= threshold else ""
    elif exposed_share < threshold:
        remedy = "leave it as it is" if compressed else "do nothing, train uncompressed"
        text += (
            f"That is under the threshold of {threshold:.0%}. Recommended: {remedy}. The codec's time and what is lost "
            "of the gradients are a price for little."
        )
    elif compressed:
        text += (
            "Recommended: measure some uncompressed steps first: handle.disable(), or "
            "trainer.strategy.disable_compression(), and enable again 50 steps later."
        )
    else:
        text += "Recommended: compress."
    if hour_price is not None:
        cost = exposed_share * hour_price
        text += (
            f" At {hour_price:.2f} an hour for all ranks together the waiting costs {cost:.2f} an hour, "
            f"{24 * cost:.2f} a day."
        )
    return text


def render(summary: Summary) -> RenderableType:
    """The summary for a terminal: time by part for each compressor, bytes, events and advice."""
    before = f", {summary.before_resume} of the steps before this resume" if summary.before_resume else ""
    table = Table("", title=f"Communication{before}")
    columns = [(name, cells(totals)) for name, totals in summary.plans.items()]
    if len(columns) > 1:
        columns.append(("all", cells(summary.total)))
    for name, _ in columns:
        table.add_column(Text(name), justify="right")
    for label, *row in zip(COLUMNS, *(column for _, column in columns), strict=True):
        table.add_row(label, *row)
    parts: list[RenderableType] = [table, Text(LEGEND, style="dim")]
    if summary.events:
        last = summary.events[-SHOWN_EVENTS:]
        more = f", the last {len(last)} of {len(summary.events)}" if len(last) < len(summary.events) else ""
        events = Table("step", "action", "reason", title=f"Events{more}")
        for event in last:
            events.add_row(str(event.step), described(event), Text(event.reason))  # as text: it may hold markup
        parts.append(events)
    parts += [Text(summary.comparison), Text(summary.advice)]
    return Group(*parts)


COLUMNS = (
    "steps",
    "skipped",
    "step",
    "computing",
    "exposed",
    "wire",
    "codec",
    "sent",
    "saved",
    "comm/comp",
    "samples/s",
)
LEGEND = (
    "Times and sent bytes are means of a step. Exposed is what backward waited for; wire is the time inside "
    "collectives and codec that of compressing, both hidden or not; comm/comp is wire over computing. Saved is the sum "
    "over all steps."
)


def cells(totals: Totals) -> list[str]:
    """One row of a table with ``COLUMNS``: times and sent bytes are those of a step, saved bytes those of all."""
    steps = totals.steps or 1.0
    times = (
        totals.step_seconds,
        totals.compute_seconds,
        totals.exposed_seconds,
        totals.wire_seconds,
        totals.codec_seconds,
    )
    return [
        f"{totals.steps:.0f}",
        f"{totals.skipped:.0f}",
        *(seconds(time / steps) for time in times),
        f"{size(totals.bytes_sent / steps)} (1/{totals.compression_ratio:.1f})",
        size(totals.bytes_saved),
        f"{totals.ratio:.2f}",
        "-" if totals.throughput is None else f"{totals.throughput:.4g}",
    ]


def described(event: Event) -> str:
    """What was done, in words."""
    to = f" to step {event.restored_step}" if event.restored_step is not None else ""
    return event.action.replace("_", "-") + to


def seconds(value: float) -> str:
    """A duration, for people."""
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.0f} us" if value else "0"


def size(value: float) -> str:
    """A number of bytes, for people; units are decimal."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
