"""The one path from gradient to gradient, and its commit.

    bucket -> + residual -> compress -> exchange -> decompress -> mean gradient
                                 |                                     |
                            payload bytes                     new residual (staged)

`Engine.submit` hands a bucket to the executor, where `Engine._reduce` runs the path. After backward,
`Engine.finish_step` says whether the step may be taken; the next step, or `Engine.settle`, commits what was staged.
"""

import dataclasses
import math
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commopt.collectives.agreement import share_text
from commopt.collectives.exchange import Scratch, exchange, make_layout, transfers
from commopt.collectives.rollcall import missing_ranks
from commopt.collectives.wire import Transfer, Wire, WireError
from commopt.engine.ballot import Failure, Result, Wish, decode, encode, hash_of
from commopt.engine.bucket import Bucket, put_back, regroup
from commopt.engine.executors import make_executor
from commopt.engine.fidelity import Fidelity
from commopt.engine.state import check_state
from commopt.engine.step import Stats, Step, checksum, kind_of, norm
from commopt.errors import CommOptWarning, ExchangeError, MismatchError
from commopt.feedback import Residuals
from commopt.layout import Layout
from commopt.plan import Plan
from commopt.records import StepRecord


class Engine:
    """Exchanges the buckets of one model over a dedicated process group.

    Scratch memory is a few buffers of the size of the largest bucket or its payload, plus 8 bytes a parameter for
    residuals where the plan keeps them.

    Args:
        plan: what to do, the same on all ranks.
        shapes: the shape of each parameter that may keep a residual, by name.
        device: where gradients are.
        group: a process group that nothing else uses.
        loss_scale: gives the factor that gradients are scaled by, where a gradient scaler is in use.
        checked: compare a checksum of the mean gradient over ranks in every step.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        device: torch.device,
        group: dist.ProcessGroup,
        loss_scale: Callable[[], float] | None = None,
        checked: bool = False,
    ) -> None:
        self.wire = Wire(group)
        self.configured = plan
        self.plan = plan
        self.planned = plan  # what the next step uses where compression is not switched off
        self.residuals = Residuals(shapes if plan.feedback else {}, device)
        self.warm: dict[str, Tensor] = {}
        self.record: StepRecord | None = None  # of the last finished step
        self.pledge = ""  # what was decided of the last step outside of the vote; ranks compare it in the next one
        self._shapes = dict(shapes)
        self._device = device
        self._checked = checked
        self._executor = make_executor(device)
        self._scratch = Scratch(device)
        self._layouts: dict[tuple[Plan, tuple[str, ...]], Layout] = {}
        self._fidelity = Fidelity(sum(shape.numel() for shape in shapes.values()))
        self._loss_scale = loss_scale
        self._scale = 1.0
        self._wish = Wish.NONE
        self.disabled = False  # whether compression is switched off, the same on all ranks
        self._agreed = plan  # what was planned at the last vote
        self._owed = False  # whether residuals wait to be delivered
        self._losses: list[Tensor] = []
        self._samples: float | None = None
        self._resumed_layout: list[list[str]] = []
        self._dead: tuple[Bucket, Exception] | None = None
        self._step = Step(-1)
        self._stats = Stats()
        self._before = self.stats()
        self._clock = time.perf_counter()
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
        layout, self._resumed_layout = self._resumed_layout, []
        if layout and bucket.last and sorted(bucket.names) == sorted(name for names in layout for name in names):
            parts = regroup(bucket, layout)
            for part in parts:
                self._enqueue(part)
            return self._executor.submit(lambda: put_back(parts, bucket), bucket.buffer)
        return self._enqueue(bucket)

    def finish_step(self) -> bool:
        """Call when all futures of the step are done; `record` is then about it. Whether the gradients may be used:
        where not, no residual was touched, on any rank.

        Raises:
            ExchangeError: a rank failed; raised on every rank, naming that rank and the bucket.
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
            self.residuals.discard()  # backward did not come to its end
            self._fidelity.discard()
            return
        self.residuals.commit()
        self._fidelity.commit()
        self.warm.update(step.warm)
        if step.taken and step.result:
            self._owed = step.result.owed

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

    def adopt(self, plan: Plan, at_once: bool = False) -> None:
        """Plans to exchange by ``plan``, once the vote of the next step has found that all ranks plan the same. Ranks
        that know of their agreement already may change at once."""
        self.planned = plan
        if at_once:
            self._agreed = plan

    @property
    def step(self) -> int:
        """The number of the last step that began; -1 before the first."""
        return self._step.number

    def stats(self) -> Stats:
        """Totals since the start."""
        return dataclasses.replace(self._stats, bytes_sent=self.wire.bytes_sent, wire_seconds=self.wire.seconds)

    def restart_clock(self) -> None:
        """The time since the last step is not a part of the next one: a validation, a checkpoint."""
        self._clock = time.perf_counter()

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
            "scale": self._scale,
            "disabled": self.disabled,
            "owed": self._owed,
            "layout": self._step.layout,
            "residuals": self.residuals.final(),
            "warm": dict(self.warm),
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
        if state["plan"] != repr(self.configured):
            kept = "kept" if self.configured.feedback else "dropped, for nothing would deliver them"
            self.say_once(
                f"the checkpoint was made with {state['plan']}, and training goes on with {self.configured}. Warm "
                f"starts are dropped, residuals are {kept}."
            )
            loaded.warm.clear()
            if not self.configured.feedback:
                loaded.residuals.clear()
                owed = False
        self.residuals.load(loaded.residuals)
        self.warm = {name: tensor.to(self._device, copy=True) for name, tensor in loaded.warm.items()}
        self._step = Step(state["step"], layout=state["layout"])
        self._resumed_layout = state["layout"]
        self._scale, self.disabled, self._owed = state["scale"], state["disabled"], owed
        self._losses, self._samples = [], None
        if parts is None:
            self._fidelity.load_state_dict(state["fidelity"], self._device)
        else:
            self._fidelity.reset()
        self.restart_clock()

    def close(self) -> None:
        """Waits for what is under way and ends the executor."""
        self._executor.close()

    def _enqueue(self, bucket: Bucket) -> "Future[Tensor]":
        if bucket.index == 0 or self._step.ended:
            self._begin_step()
        self._step.layout.append(bucket.names)
        self._step.idle |= bool(bucket.idle)
        if bucket.last:
            self._step.ready = self._executor.mark()
        return self._executor.submit(lambda: self._job(bucket), bucket.buffer)

    def _begin_step(self) -> None:
        self.settle()
        plan = Plan.uncompressed() if self.disabled else self._agreed
        if plan.lossless:  # the first such step delivers what residuals hold
            plan = dataclasses.replace(plan, feedback=self._owed)
        if plan != self.plan:
            self._fidelity.reset()
        self.plan = plan
        self._step = Step(self._step.number + 1)
        if self._loss_scale is not None:
            scale = self._loss_scale()
            if self._step.number > 0 and scale != self._scale:
                self.residuals.scale_(scale / self._scale)
            self._scale = scale

    def _measure(self, step: Step, result: Result) -> StepRecord:
        now, totals, before = time.perf_counter(), self.stats(), self._before
        seconds, self._clock, self._before = now - self._clock, now, totals
        samples, self._samples = self._samples, None
        return StepRecord(
            step=step.number,
            plan=self.plan.compressor.name,
            finite=result.finite,
            out_of_memory=result.failure is Failure.OUT_OF_MEMORY,
            corrupt=bool(result.disputed),
            loss=result.loss,
            gradient_norm=result.gradient_norm / self._scale,
            step_seconds=seconds,
            exposed_seconds=step.exposed,
            wire_seconds=totals.wire_seconds - before.wire_seconds,
            codec_seconds=totals.codec_seconds - before.codec_seconds,
            bytes_sent=totals.bytes_sent - before.bytes_sent,
            bytes_uncompressed=totals.bytes_uncompressed - before.bytes_uncompressed,
            samples=samples,
            cosine=step.fidelity[0] if step.fidelity else None,
            sign_agreement=step.fidelity[1] if step.fidelity else None,
            residual_ratio=step.residual_ratio(),
        )

    def _lost(self, bucket: Bucket, error: Exception) -> ExchangeError:
        missing = missing_ranks(self.wire.rank, self.wire.group)
        if missing is None:
            who = "The store on rank 0 of the job does not answer either: look there first."
        elif missing:
            ranks = ", ".join(map(str, missing))
            who = f"Rank {ranks} did not answer: ended, or stalled. Look there first."
        else:
            who = "All ranks answer: one was late, or met an error of its own. Look for the first error on the others."
        return ExchangeError(
            f"rank {self.wire.rank} lost its peers in {bucket}: {type(error).__name__}: {error} {who} Training can go "
            "on from the last checkpoint."
        )

    # The executor's side

    def _job(self, bucket: Bucket) -> None:
        if self._dead:
            return
        start, wire_seconds, sent = time.perf_counter(), self.wire.seconds, self.wire.bytes_sent
        try:
            self._reduce(bucket)
            if bucket.last:
                self._vote()
                self._step.exposed = self._executor.seconds_since(self._step.ready)
        except Exception as error:  # whatever it is: were it raised here, backward would wait for ever
            self._dead = (bucket, error)
        spent = time.perf_counter() - start - (self.wire.seconds - wire_seconds)
        if bucket.buffer.is_sparse:
            plain = self.wire.bytes_sent - sent
        else:
            plain = Transfer("all_reduce", bucket.buffer.numel(), bucket.buffer.dtype).sent(self.wire.world)
        self._stats = dataclasses.replace(
            self._stats,
            codec_seconds=self._stats.codec_seconds + spent,
            bytes_uncompressed=self._stats.bytes_uncompressed + plain,
        )

    def _reduce(self, bucket: Bucket) -> None:
        """The path. A rank that fails on it goes on sending zeros, so that its peers reach the vote of this step."""
        if bucket.buffer.numel() == 0:
            return
        if bucket.buffer.is_sparse or not bucket.buffer.is_floating_point():
            self._pass_through(bucket)
            return
        plan, lossy = self.plan, not self.plan.lossless
        shapes = [gradient.shape for gradient in bucket.gradients]
        layout = self._layouts.get((plan, tuple(bucket.names)))
        if layout is None:
            layout = make_layout(plan, self.wire.world, bucket.names, shapes)
            self._layouts[plan, layout.names] = layout
        finished = self.wire.finished
        unit = 1.0 / self._scale
        try:
            contributed = self._fidelity.sample(bucket.names, bucket.buffer) if lossy else None
            self._exchange(plan, layout, bucket)
        except WireError:
            raise
        except BaseException as error:  # a compressor that ends its process, too: on this thread it would only hang
            self._step.failure = self._step.failure or (bucket, error)
            schedule = transfers(plan, layout, self.wire.world, self._working_dtype(plan, bucket))
            for transfer in schedule[self.wire.finished - finished :]:
                self.wire.blank(transfer, self._device)
        else:
            self._deliver(bucket)
            if contributed is not None:
                delivered = self._fidelity.sample(bucket.names, bucket.buffer)
                share = unit / self.wire.world
                self._fidelity.stage(bucket.names, contributed.mul_(share), delivered.mul_(unit))

    def _deliver(self, bucket: Bucket) -> None:
        self._step.norms.append((bucket, norm(bucket.buffer)))
        if self._checked:
            self._step.checksums.append(checksum(bucket.buffer))

    def _exchange(self, plan: Plan, layout: Layout, bucket: Bucket) -> None:
        dtype = self._working_dtype(plan, bucket)
        share = 1.0 / self.wire.world  # before anything is summed, so that low precision does not overflow
        seed = (self._step.number << 16) + bucket.index
        warm = ChainMap(self._step.warm, self.warm)
        in_place = bucket.buffer.dtype == dtype and not layout.padded
        rows = bucket.buffer.view(layout.rows, layout.block) if in_place else None

        if rows is not None and not plan.feedback:
            exchange(plan, rows.mul_(share), rows, layout, self.wire, self._scratch, seed, warm)
            return

        shape = (layout.rows, layout.block)
        slot = self.residuals.slot(layout) if plan.feedback else None
        x = slot.back if slot else self._scratch.take("x", shape, dtype)
        stale: dict[str, Tensor] = {}
        if slot:
            parts = zip(layout.names, layout.views(x), layout.views(slot.front), bucket.gradients, strict=True)
            for name, contribution, residual, gradient in parts:
                if name in bucket.idle:
                    contribution.copy_(gradient).mul_(share)
                    stale[name] = contribution.any()  # DDP sends what an earlier backward left over
                else:
                    torch.add(residual, gradient, alpha=share, out=contribution)
        else:
            torch._foreach_copy_(layout.views(x), bucket.gradients)
            x.mul_(share)
        layout.zero_padding(x)
        sent = norm(x) if self._step.closes_window else None

        out = rows if rows is not None else self._scratch.take("out", shape, dtype)
        exchange(plan, x, out, layout, self.wire, self._scratch, seed, warm)
        if rows is None:
            torch._foreach_copy_(bucket.gradients, layout.views(out))
        if slot:
            residuals = zip(layout.names, layout.views(x), layout.views(slot.front), strict=True)
            for name, staged, residual in residuals:
                if name in bucket.idle:
                    # A parameter that is idle here may not be elsewhere: two shots leave a part of their loss with us.
                    staged.masked_fill_(stale[name], 0.0).add_(residual)
            self.residuals.stage(slot)
            if sent is not None:
                self._step.squares.append(torch.stack([norm(x), sent]) ** 2)

    def _pass_through(self, bucket: Bucket) -> None:
        self._step.notes.append(
            f"{'sparse' if bucket.buffer.is_sparse else bucket.buffer.dtype} gradients travel uncompressed, first in "
            f"{bucket}."
        )
        world = self.wire.world
        # Plain DDP divides sparse gradients and multiplies dense ones; this gives its bits.
        self.wire.all_reduce(bucket.buffer.div_(world) if bucket.buffer.is_sparse else bucket.buffer.mul_(1.0 / world))
        self._deliver(bucket)

    def _vote(self) -> None:
        """The last word of a step; what is decided here holds on all ranks from the next step on."""
        step, wish, planned = self._step, self._wish, self.planned
        losses, self._losses = self._losses, []
        zero = torch.zeros((), device=self._device)
        votes = encode(
            failure=kind_of(step.failure),
            wish=wish,
            owes=(step.idle or not self.plan.lossless) if self.plan.feedback else self._owed,
            same=(step.number, hash_of(f"{planned} {self.pledge}"), sum(step.checksums, zero.long())),
            norm=torch.stack([each for _, each in step.norms]).norm() if step.norms else zero,
            loss=torch.stack([loss.to(self._device) for loss in losses]).mean() if losses else zero + math.nan,
            rank=self.wire.rank,
            world=self.wire.world,
        )
        result = decode(self.wire.all_reduce(votes, op=dist.ReduceOp.MAX).tolist())
        step.result = result
        if result.failure is Failure.ERROR:
            mine = (
                f"rank {self.wire.rank} failed in {step.failure[0]}: {_describe(step.failure[1])}"
                if step.failure
                else ""
            )
            step.error = ExchangeError(f"{self._shared(mine)} | The step was not taken on any rank.")
        elif set(result.disputed) - {"checksum"}:
            mine = f"rank {self.wire.rank} is in step {step.number} and plans {planned}"
            step.error = MismatchError(f"ranks disagree on {' and '.join(result.disputed)}: {self._shared(mine)}.")
        if "next plan" not in result.disputed:
            self._agreed = planned
        if result.failure is Failure.OUT_OF_MEMORY:
            self.adopt(Plan.uncompressed(), at_once=True)
        if result.wish:
            self.disabled = result.wish is Wish.UNCOMPRESSED
            if not self.disabled and self.planned.lossless:
                self.adopt(self.configured, at_once=True)
            if self._wish is wish:
                self._wish = Wish.NONE
        if step.closes_window and not self.plan.lossless and step.error is None:
            step.fidelity = self._fidelity.measure(self.wire)

    def _shared(self, mine: str) -> str:
        return " | ".join(line for line in share_text(self.wire, mine, self._device) if line)

    def _working_dtype(self, plan: Plan, bucket: Bucket) -> torch.dtype:
        return bucket.buffer.dtype if plan.lossless and not plan.feedback else torch.float32


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
