"""Takes the buckets of a model through the path, and decides with its peers what becomes of each step.

    buckets --Cutter--> messages --executor--> Path.run ... vote --> finish_step

`Engine.submit` takes a bucket and hands the messages that it completes to the executor. After backward,
`Engine.finish_step` says whether the step may be taken; the next step, or `Engine.settle`, commits what was staged.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commopt.collectives.agreement import share_text
from commopt.collectives.rollcall import roll_call
from commopt.collectives.wire import Wire
from commopt.engine.ballot import Failure, Result, Wish, decode, encode, hash_of
from commopt.engine.executors import Turn, make_executor
from commopt.engine.fidelity import Fidelity
from commopt.engine.path import Path
from commopt.engine.state import check_state
from commopt.engine.step import Stats, Step, kind_of
from commopt.errors import CommOptWarning, ExchangeError, MismatchError
from commopt.feedback import Residuals
from commopt.messages import LANES, Arrival, Bucket, Cutter, Message
from commopt.plan import Plan, TensorClass
from commopt.records import StepRecord


class Engine:
    """Exchanges the gradients of one model over a dedicated process group.

    Scratch memory is a few buffers of the size of the largest message or its payload, twice, since one message is
    compressed while another one travels; and 8 bytes a parameter for residuals where the plan keeps them.

    Args:
        plan: what to do, the same on all ranks.
        shapes: the shape of each parameter that may keep a residual, by name.
        device: where gradients are.
        group: a process group that nothing else uses.
        loss_scale: gives the factor that gradients are scaled by, where a gradient scaler is in use.
        checked: compare a checksum of the mean gradient over ranks in every step.
        classes: the class of each parameter, by name; what is not named is a matrix.
        adaptive: whether the plan follows measurements, so that a state may have been made with another one.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        device: torch.device,
        group: dist.ProcessGroup,
        loss_scale: Callable[[], float] | None = None,
        checked: bool = False,
        classes: Mapping[str, TensorClass] | None = None,
        adaptive: bool = False,
    ) -> None:
        self.wire = Wire(group)  # for what is said between two steps
        self.configured = plan  # what the user or the policy wants
        self.restraint: int | None = 0  # rungs milder than configured; None: nothing is compressed
        self.plan = plan  # what the step under way uses
        self.residuals = Residuals(shapes if plan.keeps_residuals else {}, device)
        self.record: StepRecord | None = None  # of the last finished step
        self.ready: list[tuple[Bucket, float]] = []  # of that step: seconds from its begin until a bucket was ready
        self.expected: tuple[Plan, float] | None = None  # seconds that a step with a plan was predicted to take
        self.after_vote: Callable[[], None] | None = None  # called at the end of each step's exchange, on all ranks
        self.pledge = ""  # what was decided of the last step outside of the vote; ranks compare it in the next one
        self.disabled = False  # whether compression is switched off, the same on all ranks
        self._adaptive = adaptive
        self._shapes = dict(shapes)
        self._classes = dict(classes or {})
        self._device = device
        self._executor = make_executor(device)
        self._fidelity = Fidelity(sum(shape.numel() for shape in shapes.values()))
        self._path = Path(group, device, self.residuals, self._fidelity, LANES, checked)
        self._cutter = Cutter(plan, self._classes)
        self._loss_scale = loss_scale
        self._wish = Wish.NONE
        self._agreed = plan  # what was planned at the last vote
        self._begun = plan  # what was agreed for the step under way
        self._last = plan  # and for the last one that was taken: until then, another plan is new
        self._warmed = plan.compressor  # whose warm starts are kept
        self._owed = False  # whether residuals wait to be delivered
        self._losses: list[Tensor] = []
        self._samples: float | None = None
        self._resumed_layout: list[list[str]] = []
        self._dead: tuple[Message, Exception] | None = None
        self._step = Step(-1)
        self._stats = Stats()
        self._before = self.stats()
        self._clock = time.perf_counter()
        self._began = self._executor.mark()
        self._said: set[str] = set()

    # The caller's side

    def observe(self, loss: Tensor | float, samples: float | None = None) -> None:
        """Tells the loss of the backward to come, and how many samples it is the mean of; both only for the record.
        Passed over where gradients are switched off."""
        if not torch.is_grad_enabled():  # of an evaluation
            return
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        self._losses.append(value.reshape(-1).float().mean())
        if samples is not None:
            self._samples = (self._samples or 0.0) + samples

    def submit(self, bucket: Bucket) -> "Future[Tensor]":
        """Exchanges ``bucket`` while backward goes on; the future holds its buffer when the mean is in it."""
        if bucket.index == 0 or self._step.ended:
            self._begin_step()
        step = self._step
        step.idle |= bool(bucket.idle)
        arrival = Arrival(bucket, self._executor.future())
        step.arrivals.append((arrival, self._executor.mark()))
        self._path.watch(arrival, self.plan)
        for message in self._cutter.cut(arrival):
            step.layout.append(message.names)
            self._executor.submit(partial(self._job, message, step))
        return arrival.future

    def finish_step(self) -> bool:
        """Call when all futures of the step are done; `record` is then about it. Whether the gradients may be used:
        where not, no residual was touched, on any rank.

        Raises:
            ExchangeError: a rank failed; raised on every rank, naming that rank and the message.
            MismatchError: ranks are not in the same step, or do not plan the same next one; raised on every rank.
        """
        step = self._step
        step.ended = True
        if self._dead:
            raise self._lost(*self._dead) from self._dead[1]
        if step.error:
            self.skip()
            raise step.error from (step.failure[1] if step.failure else None)
        for note in step.notes:
            self.say_once(note)
        assert step.result is not None
        self.record = self._measure(step, step.result)
        reason = step.unusable(self.plan.compressor.name)
        if reason:
            self.say_once(reason)
            self.skip()
            self._stats = dataclasses.replace(self._stats, skipped_steps=self._stats.skipped_steps + 1)
            return False
        self._stats = dataclasses.replace(self._stats, steps=self._stats.steps + 1)
        step.taken = True
        return True

    def settle(self) -> None:
        """Commits what the last finished step staged. The next step does so by itself."""
        step, self._step = self._step, Step(self._step.number, layout=self._step.layout)
        if not step.ended:
            self._executor.wait()
            self.residuals.discard()  # backward did not come to its end
            self._fidelity.discard()
            return
        self.residuals.commit()
        self._fidelity.commit()
        self._path.warm.update(step.warm)
        if step.taken and step.result:
            self._owed, self._last = step.result.owed, self._begun

    def skip(self) -> None:
        """Forgets what the last step staged, for a step that is not taken. Call it on all ranks."""
        step = self._step
        if step.taken:
            totals = self._stats
            self._stats = dataclasses.replace(totals, steps=totals.steps - 1, skipped_steps=totals.skipped_steps + 1)
        step.taken = False
        step.warm.clear()
        self.residuals.discard()
        self._fidelity.discard()

    def request(self, compress: bool) -> None:
        """Switches compression on or off. Any rank may ask; all change in the step after the one that is under way.

        The first step without compression delivers what the residuals hold.
        """
        self._wish = Wish.COMPRESS if compress else Wish.UNCOMPRESSED

    def set_pieces(self, nbytes: int) -> None:
        """Cuts what goes from peer to peer into pieces of this size, on all ranks alike; between two steps."""
        for wire in (self.wire, *(lane.wire for lane in self._path.lanes)):
            wire.piece = nbytes

    def configure(self, plan: Plan) -> None:
        """Changes what is wanted, from the step on whose predecessor's vote has found that all ranks want the same."""
        self.configured = plan

    def restrain(self, rungs: int | None, at_once: bool = False) -> None:
        """Exchanges so many rungs milder than configured, None uncompressed, from the step on whose predecessor's vote
        has found that all ranks plan the same. Ranks that know of their agreement already may change at once."""
        self.restraint = rungs
        if at_once:
            self._agreed = self.planned

    @property
    def planned(self) -> Plan:
        """What the next step uses where compression is not switched off."""
        return Plan.uncompressed() if self.restraint is None else self.configured.milder(self.restraint)

    @property
    def step(self) -> int:
        """The number of the last step that began; -1 before the first."""
        return self._step.number

    def stats(self) -> Stats:
        """Totals since the start."""
        lanes = self._path.lanes
        return dataclasses.replace(
            self._stats,
            bytes_sent=self.wire.bytes_sent + sum(lane.wire.bytes_sent for lane in lanes),
            bytes_uncompressed=sum(lane.bytes_uncompressed for lane in lanes),
            wire_seconds=self.wire.seconds + sum(lane.wire.seconds for lane in lanes),
            codec_seconds=sum(lane.codec_seconds for lane in lanes),
        )

    def restart_clock(self) -> None:
        """The time since the last step is not a part of the next one: a validation, a checkpoint."""
        self._clock = time.perf_counter()
        self._began = self._executor.mark()

    def say_once(self, message: str, kind: str = "") -> None:
        """Warns, the first time that something of this kind is said."""
        kind = kind or message[:40]  # what follows may name a step or a bucket, another one each time
        if kind not in self._said:
            self._said.add(kind)
            self.say(message)

    def say(self, message: str) -> None:
        """Warns."""
        warnings.warn(f"rank {self.wire.rank}: {message}", CommOptWarning, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on with the same bits, between two steps: tensors and plain values.

        The tensors are the engine's own, not copies.
        """
        self.settle()
        return {
            "step": self._step.number,
            "plan": repr(self.configured),
            "scale": self._path.scale,
            "disabled": self.disabled,
            "owed": self._owed,
            "layout": self._step.layout,
            "residuals": self.residuals.final(),
            "warm": dict(self._path.warm),
            "fidelity": self._fidelity.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Goes on from where `state_dict` was taken. A `request` that was not voted on yet stays.

        Args:
            state: of this rank.
            parts: states whose residuals this rank takes over, where the number of ranks has changed. Residuals are in
                units of the mean gradient, so that their sum over all ranks is what has to stay.

        Raises:
            CheckpointError: it is not a state of this model; nothing was changed.
        """
        loaded = check_state(state, [state] if parts is None else parts, self._shapes)
        self.settle()
        owed = state["owed"]
        if state["plan"] != repr(self.configured) and self._adaptive:
            loaded.warm.clear()
            self._last = Plan.uncompressed()  # so that the next step delivers what the other plan kept
        elif state["plan"] != repr(self.configured):
            keeps = self.configured.keeps_residuals
            kept = "kept" if keeps else "dropped, for nothing would deliver them"
            self.say_once(
                f"the checkpoint was made with {state['plan']}, and training goes on with {self.configured}. Warm "
                f"starts are dropped, residuals are {kept}."
            )
            loaded.warm.clear()
            if not keeps:
                loaded.residuals.clear()
                owed = False
        self.residuals.load(loaded.residuals)
        self._path.warm = {name: tensor.to(self._device, copy=True) for name, tensor in loaded.warm.items()}
        self._path.scale = state["scale"]
        self._step = Step(state["step"], layout=state["layout"])
        self._resumed_layout = state["layout"]
        self.disabled, self._owed = state["disabled"], owed
        self._losses, self._samples = [], None
        if parts is None:
            self._fidelity.load_state_dict(state["fidelity"], self._device)
        else:
            self._fidelity.reset()
        self.restart_clock()

    def close(self) -> None:
        """Waits for what is under way and ends the executor."""
        self._executor.close()

    def _begin_step(self) -> None:
        self.settle()
        plan = Plan.uncompressed() if self.disabled else self._agreed
        changed, self._begun = plan != self._last, plan
        if plan.lossless:  # the first such step delivers what residuals hold
            plan = plan.each(lambda part: dataclasses.replace(part, feedback=self._owed))
        elif changed and self._owed:  # and what keeps none delivers them as well as it can
            plan = plan.each(lambda part: dataclasses.replace(part, feedback=True))
        if not plan.lossless and plan.compressor != self._warmed:
            self._warmed = plan.compressor
            self._path.warm.clear()
        if plan != self.plan:
            self._fidelity.reset()
        self.plan = plan
        self._step = Step(self._step.number + 1)
        layout, self._resumed_layout = self._resumed_layout, []
        if plan != self._cutter.plan:
            self._cutter = Cutter(plan, self._classes)
        self._cutter.begin(layout)
        if self._loss_scale is not None:
            scale = self._loss_scale()
            if self._step.number > 0 and scale != self._path.scale:
                self.residuals.scale_(scale / self._path.scale)
            self._path.scale = scale

    def _measure(self, step: Step, result: Result) -> StepRecord:
        now, totals, before = time.perf_counter(), self.stats(), self._before
        seconds, self._clock, self._before = now - self._clock - step.looked, now, totals
        samples, self._samples = self._samples, None
        began, self._began = self._began, self._executor.mark()
        self.ready = [(arrival.bucket, self._executor.seconds(began, mark)) for arrival, mark in step.arrivals]
        return StepRecord(
            step=step.number,
            plan=self.plan.compressor.name,
            finite=result.finite,
            out_of_memory=result.failure is Failure.OUT_OF_MEMORY,
            corrupt=bool(result.disputed),
            loss=result.loss,
            gradient_norm=result.gradient_norm / self._path.scale,
            step_seconds=seconds,
            exposed_seconds=step.exposed,
            exchange_seconds=step.span,
            wire_seconds=totals.wire_seconds - before.wire_seconds,
            codec_seconds=totals.codec_seconds - before.codec_seconds,
            bytes_sent=totals.bytes_sent - before.bytes_sent,
            bytes_uncompressed=totals.bytes_uncompressed - before.bytes_uncompressed,
            samples=samples,
            cosine=step.fidelity[0] if step.fidelity else None,
            sign_agreement=step.fidelity[1] if step.fidelity else None,
            residual_ratio=step.residual_ratio(),
            predicted_seconds=self.expected[1] if self.expected and self.expected[0] == self.plan else None,
        )

    def _lost(self, message: Message, error: Exception) -> ExchangeError:
        who = roll_call(self.wire.rank, self.wire.group)
        return ExchangeError(
            f"rank {self.wire.rank} lost its peers in {message}: {type(error).__name__}: {error} {who} Training can go "
            "on from the last checkpoint."
        )

    # The executor's side

    def _job(self, message: Message, step: Step, turn: Turn) -> None:
        self._attempt(message, partial(self._path.run, message, step, turn))
        whole = [arrival for arrival in message.carries if arrival.part_done()]
        for arrival in whole:
            self._attempt(message, partial(self._path.deliver, arrival, step, turn))
        done = [arrival for arrival in whole if not arrival.bucket.last]
        if message.last:
            turn.join()
            self._attempt(message, partial(self._end, step, self._path.lanes[turn.lane].wire))
            done.append(step.arrivals[-1][0])  # it is told last, whoever completed it
        for arrival in done:
            arrival.future.set_result(arrival.bucket.buffer)

    def _attempt(self, message: Message, action: Callable[[], None]) -> None:
        """Nothing is raised here, whatever it is: backward would wait for ever."""
        if self._dead is not None:
            return
        try:
            action()
        except Exception as error:
            self._dead = self._dead or (message, error)
            self._executor.abandon()

    def _end(self, step: Step, wire: Wire) -> None:
        self._vote(step, wire)
        now, seconds = self._executor.mark(), self._executor.seconds
        step.span = seconds(step.arrivals[0][1], now)
        step.exposed = seconds(step.arrivals[-1][1], now)
        if self.after_vote is not None and step.error is None:
            start = time.perf_counter()
            self.after_vote()
            step.looked = time.perf_counter() - start

    def _vote(self, step: Step, wire: Wire) -> None:
        """The last word of a step; what is decided here holds on all ranks from the next step on."""
        wish, planned = self._wish, self.planned
        losses, self._losses = self._losses, []
        norm = step.norm
        zero = torch.zeros((), device=self._device)
        votes = encode(
            failure=kind_of(step.failure),
            wish=wish,
            owes=(step.idle or not self.plan.lossless) if self.plan.keeps_residuals else self._owed,
            same=(step.number, hash_of(f"{planned} {self.pledge}"), sum(step.checksums, zero.long())),
            norm=zero if norm is None else norm,
            loss=torch.stack([loss.to(self._device) for loss in losses]).mean() if losses else zero + math.nan,
            rank=wire.rank,
            world=wire.world,
        )
        result = decode(wire.all_reduce(votes, op=dist.ReduceOp.MAX).tolist())
        step.result = result
        if result.failure is Failure.ERROR:
            mine = f"rank {wire.rank} failed in {step.failure[0]}: {_describe(step.failure[1])}" if step.failure else ""
            step.error = ExchangeError(f"{self._shared(mine, wire)} | The step was not taken on any rank.")
        elif set(result.disputed) - {"checksum"}:
            mine = f"rank {wire.rank} is in step {step.number} and plans {planned}"
            step.error = MismatchError(
                f"ranks disagree on {' and '.join(result.disputed)}: {self._shared(mine, wire)}."
            )
        if "next plan" not in result.disputed:
            self._agreed = planned
        if result.failure is Failure.OUT_OF_MEMORY:
            self.restrain(None, at_once=True)
        if result.wish:
            self.disabled = result.wish is Wish.UNCOMPRESSED
            if not self.disabled and self.restraint is None:
                self.restrain(0, at_once=True)
            if self._wish is wish:
                self._wish = Wish.NONE
        if step.closes_window and not self.plan.lossless and step.error is None:
            step.fidelity = self._fidelity.measure(wire)

    def _shared(self, mine: str, wire: Wire) -> str:
        return " | ".join(line for line in share_text(wire, mine, self._device) if line)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
