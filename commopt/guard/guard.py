"""From what the detectors see to what is done about it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from commopt.guard import state as read
from commopt.guard.config import GuardConfig, Verdict
from commopt.guard.detectors import Drift, Spike
from commopt.records import StepRecord

Mode = Literal["armed", "cooling", "finished"]

PASS = Verdict("pass")
# A gradient scaler that starts at 2^16 may skip several steps in a row before it has found its scale.
NON_FINITE_ROW = 10
SPIKE_ROW = 3
BAD_WINDOWS = 2
BAD_VALIDATIONS = 2
LONGEST_COOL_DOWN = 1024  # times the configured one
LARGEST = 1e100  # losses are cut there, so that squares of differences stay finite


@dataclass
class _Counts:
    """Whole numbers that make up the guard's state, beside the detectors."""

    rung: int = 0
    alarms: int = 0
    roll_backs: int = 0
    cooling_left: int = 0
    since_compressed: int = 0
    non_finite: int = 0
    non_finite_onset: int = 0
    spikes: int = 0
    spike_onset: int = 0
    bad_windows: int = 0
    bad_window_onset: int = 0
    window_start: int = 0
    bad_validations: int = 0
    sound: int = 0  # 1 where the roll-back that is due was for spikes, which no series has taken in


class Guard:
    """Judges each step by its record, and says when compression has to go, or training has to go back.

    Pure: the same records give the same verdicts, on every rank and after a resume. A run that was never compressed is
    only ever told to skip: what compression did not do is none of the guard's business. A rise of the loss that the
    schedule wants, such as a warm restart of the learning rate, looks like a drift.

    Args:
        config: the thresholds.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.mode: Mode = "armed"
        self._counts = _Counts()
        self._ever_compressed = False
        self._anchor: float | None = None
        self._logarithmic = True  # until a loss is not positive
        self._drift = Drift(relative=True)
        self._loss = Spike(config.window, config.sigma)
        self._norm = Spike(config.window, config.sigma)

    @property
    def rung(self) -> int:
        """How many rungs milder than configured compression is, from the next ``"re_arm"`` on."""
        return self._counts.rung

    @property
    def cool_down_left(self) -> int:
        """Steps until compression comes back, while the mode is ``"cooling"``."""
        return self._counts.cooling_left

    def step(self, record: StepRecord, compressed: bool) -> Verdict:
        """Judges a step.

        Args:
            record: of this step; ``loss`` may be None, and is passed over where it is not finite.
            compressed: whether this step's plan lost something.
        """
        counts = self._counts
        self._ever_compressed |= compressed
        counts.since_compressed = 0 if compressed else counts.since_compressed + 1
        cooling = self.mode == "cooling"
        verdict = self._judge(record, compressed)
        if not cooling or verdict.action in ("fall_back", "roll_back"):
            return verdict
        counts.cooling_left = max(counts.cooling_left - 1, 0)
        if counts.cooling_left > 0 or verdict.action != "pass":
            return verdict
        self.mode = "armed"
        counts.rung += 1
        return Verdict(
            "re_arm", f"cool-down: over at step {record.step}; compression returns {counts.rung} rung(s) milder"
        )

    def validation(self, value: float, step: int) -> Verdict:
        """Judges a validation loss, of which less is better, by the best one that was seen when no step had been
        compressed, ever or within the last ``cool_down`` steps. Without such a value only what is not finite is worse.

        Args:
            value: the same on all ranks.
            step: the last step that was taken.
        """
        counts = self._counts
        if not self._ever_compressed or counts.since_compressed >= self.config.cool_down:
            if math.isfinite(value):
                self._anchor = _cut(value) if self._anchor is None else min(_cut(value), self._anchor)
            counts.bad_validations = 0
            return PASS
        allowed = math.inf if self._anchor is None else self._anchor + self.config.allowed_loss * abs(self._anchor)
        worse = not math.isfinite(value) or value > allowed
        armed = self.mode == "armed" and counts.since_compressed == 0
        counts.bad_validations = counts.bad_validations + 1 if worse and armed else 0
        if counts.bad_validations < BAD_VALIDATIONS:
            return PASS
        best = "" if self._anchor is None else f"; the best without compression is {self._anchor:.4g}"
        return self._alarm("fall_back", f"validation: {value:.4g} at step {step}, worse {BAD_VALIDATIONS} times{best}")

    def rolled_back(self, step: int) -> None:
        """Training went back, and ``step`` is the next one. What was seen is forgotten where it may hold trouble."""
        if not self._counts.sound:
            self._loss.reset()
            self._norm.reset()
        self._counts.sound = 0
        self._drift.reset(self._logarithmic)
        self._forget_rows()
        self._counts.non_finite = self._counts.since_compressed = 0
        self._counts.window_start = step

    def _judge(self, record: StepRecord, compressed: bool) -> Verdict:
        compressed = compressed and self.mode == "armed"  # a verdict may take effect a step late
        if record.out_of_memory:
            reason = f"memory: a codec ran out of it in step {record.step}"
            helps = self.mode == "armed" and record.plan != "none"
            return self._alarm("fall_back", reason) if helps else Verdict("skip", reason)
        if verdict := self._judge_fidelity(record, compressed):
            return verdict
        if not record.finite or not math.isfinite(record.gradient_norm):
            return self._judge_non_finite(record, compressed)
        self._counts.non_finite = 0
        loss, norm = self._coordinates(record)
        return self._judge_spike(record, loss, norm, compressed) or self._judge_drift(record, loss, compressed)

    def _coordinates(self, record: StepRecord) -> tuple[float | None, float | None]:
        """Loss and gradient norm on scales on which their noise does not depend on their size."""
        norm = math.log(record.gradient_norm) if record.gradient_norm > 0 else None
        if record.loss is None or not math.isfinite(record.loss):
            return None, norm
        loss = _cut(record.loss)
        if self._logarithmic and loss <= 0:
            self._logarithmic = False
            self._loss.reset()
            self._drift.reset(relative=False)
        return math.log(loss) if self._logarithmic else loss, norm

    def _judge_non_finite(self, record: StepRecord, compressed: bool) -> Verdict:
        counts = self._counts
        if counts.non_finite == 0:
            counts.non_finite_onset = record.step
        counts.non_finite += 1
        reason = f"non-finite: gradient in step {record.step}, {counts.non_finite} in a row"
        if counts.non_finite >= NON_FINITE_ROW and compressed:
            return self._alarm("fall_back", reason, counts.non_finite_onset)
        if counts.non_finite >= 2 * NON_FINITE_ROW and self._ever_compressed and counts.since_compressed:
            counts.non_finite = 0
            if self.mode == "finished":
                return Verdict(
                    "stop", f"{reason}, without compression, which is not the cause", counts.non_finite_onset
                )
            return self._alarm("roll_back", f"{reason}, without compression, too", counts.non_finite_onset)
        return Verdict("skip", reason)

    def _judge_spike(
        self, record: StepRecord, loss: float | None, norm: float | None, compressed: bool
    ) -> Verdict | None:
        counts = self._counts
        series = [("loss", self._loss, loss, self._logarithmic), ("gradient norm", self._norm, norm, True)]
        for name, spike, value, relative in series:
            sigmas = None if value is None else spike.sigmas(value, relative)
            if sigmas is None:
                continue
            if counts.spikes == 0:
                counts.spike_onset = record.step
            counts.spikes += 1
            reason = (
                f"spike: {name} {sigmas:.1f} sigma above its median in step {record.step}, {counts.spikes} in a row"
            )
            if counts.spikes < SPIKE_ROW:
                return Verdict("skip", reason)
            if compressed:
                verdict = self._alarm("roll_back", f"{reason}: its level has changed", counts.spike_onset)
                counts.sound = 1
                return verdict
            self._loss.reset()  # a new level, which compression has not brought about
            self._norm.reset()
            break
        counts.spikes = 0
        for _, spike, value, _ in series:
            if value is not None:
                spike.accept(value)
        return None

    def _judge_drift(self, record: StepRecord, loss: float | None, compressed: bool) -> Verdict:
        rise = None if loss is None else self._drift.update(loss, record.step)
        if rise is None:
            return PASS
        severe = rise.relative > self.config.roll_back_rise
        reason = (
            f"drift: the loss has risen by {rise.relative:.1%} since step {rise.onset} "
            f"(CUSUM {rise.total:.1f}, threshold {rise.threshold:.1f})"
        )
        if compressed:
            return self._alarm("roll_back" if severe else "fall_back", reason, rise.onset)
        self._drift.restart()
        if self.mode == "finished" and severe and self._counts.since_compressed == 0:
            return Verdict("fall_back", f"{reason} with compression, which was switched on again", rise.onset)
        if self.mode == "finished" and severe:
            return Verdict("stop", f"{reason} without compression, which is not the cause", rise.onset)
        if self.mode == "cooling":
            self._counts.cooling_left = self._cool_down()
            return Verdict("pass", f"{reason} without compression; the cool-down begins anew")
        return PASS

    def _judge_fidelity(self, record: StepRecord, compressed: bool) -> Verdict | None:
        counts = self._counts
        if record.sign_agreement is None or not math.isfinite(record.sign_agreement):
            return None
        start, counts.window_start = counts.window_start, record.step + 1
        if not compressed or record.sign_agreement >= self.config.min_agreement:
            counts.bad_windows = 0
            return None
        if counts.bad_windows == 0:
            counts.bad_window_onset = start
        counts.bad_windows += 1
        if counts.bad_windows < BAD_WINDOWS:
            return None
        reason = (
            f"fidelity: sign agreement {record.sign_agreement:.2f} of delivered and true gradients, below "
            f"{self.config.min_agreement} in {BAD_WINDOWS} windows running up to step {record.step}"
        )
        return self._alarm("roll_back", reason, counts.bad_window_onset)

    def _alarm(self, action: Literal["fall_back", "roll_back"], reason: str, onset: int | None = None) -> Verdict:
        counts = self._counts
        counts.alarms += 1
        counts.sound = 0
        counts.roll_backs += action == "roll_back"
        counts.cooling_left = self._cool_down()
        self.mode = "finished" if counts.roll_backs >= self.config.roll_backs else "cooling"
        # What follows is judged by itself: whether the loss rises without compression, too.
        self._drift.reset(self._logarithmic)
        self._forget_rows()
        return Verdict(action, reason, onset)

    def _cool_down(self) -> int:
        return self.config.cool_down * min(1 << min(self._counts.alarms - 1, 30), LONGEST_COOL_DOWN)

    def _forget_rows(self) -> None:
        self._counts.spikes = self._counts.bad_windows = self._counts.bad_validations = 0

    def state_dict(self) -> dict[str, Any]:
        """All that the guard remembers, as values that JSON can hold."""
        return {
            "mode": self.mode,
            "counts": asdict(self._counts),
            "ever_compressed": self._ever_compressed,
            "anchor": [] if self._anchor is None else [self._anchor],
            "logarithmic": self._logarithmic,
            "drift": self._drift.state(),
            "loss": self._loss.state(),
            "norm": self._norm.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave; of what it refuses, nothing.

        Raises:
            CheckpointError: ``state`` is not what ``state_dict`` gives.
        """
        fresh = Guard(self.config)
        fresh.mode = cast(Mode, read.word(state, "mode", *get_args(Mode)))
        counts = read.section(state, "counts")
        fresh._counts = _Counts(**{entry.name: read.integer(counts, entry.name) for entry in fields(_Counts)})
        fresh._ever_compressed = read.flag(state, "ever_compressed")
        fresh._anchor = next(iter(read.numbers(state, "anchor", most=1)), None)
        fresh._logarithmic = read.flag(state, "logarithmic")
        fresh._drift.load(read.section(state, "drift"))
        fresh._loss.load(read.section(state, "loss"))
        fresh._norm.load(read.section(state, "norm"))
        vars(self).update(vars(fresh))


def _cut(value: float) -> float:
    return max(-LARGEST, min(value, LARGEST))
