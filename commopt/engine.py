"""The one path from gradient to gradient, and its commit.

    bucket -> + residual -> compress -> exchange -> decompress -> mean gradient
                                 |                                     |
                            payload bytes                     new residual (staged)

`Engine.submit` hands a bucket to the executor, where `Engine._reduce` runs the path. After backward,
`Engine.finish_step` says whether the step may be taken; the next step, or `Engine.settle`, commits what was staged.
"""

import dataclasses
import time
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commopt.collectives.agreement import share_text
from commopt.collectives.exchange import Scratch, exchange, make_layout, transfers
from commopt.collectives.wire import Transfer, Wire, WireError
from commopt.compressors import create
from commopt.errors import CommOptWarning, ExchangeError
from commopt.executors import make_executor
from commopt.feedback import Residuals
from commopt.layout import Layout
from commopt.plan import Plan


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged as one message.

    Args:
        index: position in the step, from 0.
        names: one parameter name a gradient.
        buffer: all gradients, flat; receives the mean over ranks.
        gradients: views into ``buffer``, in the parameters' shapes.
        idle: names of parameters that took no part in this backward; their residuals stay where they are.
        last: whether this is the last bucket of the step.
    """

    index: int
    names: list[str]
    buffer: Tensor
    gradients: list[Tensor]
    idle: frozenset[str]
    last: bool


@dataclass(frozen=True)
class Stats:
    """Totals since the start, of this rank.

    ``bytes_sent`` is what was handed to the collectives, ``bytes_uncompressed`` what plain DDP would have handed to a
    ring all-reduce. On CUDA the seconds are those of enqueueing.
    """

    steps: int = 0
    skipped_steps: int = 0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    wire_seconds: float = 0.0
    codec_seconds: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """Uncompressed over sent bytes; 1 before anything was sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0


@dataclass
class _Step:
    """What is known of the step under way."""

    number: int
    finite: list[tuple[Bucket, Tensor]] = field(default_factory=list)
    failure: tuple[Bucket, BaseException] | None = None
    failure_text: str = ""
    warm: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ended: bool = False
    taken: bool = False


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
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, torch.Size],
        device: torch.device,
        group: dist.ProcessGroup,
        loss_scale: Callable[[], float] | None = None,
    ) -> None:
        self.wire = Wire(group)
        self.configured = plan
        self.plan = plan
        self.residuals = Residuals(shapes if plan.feedback else {}, device)
        self.warm: dict[str, Tensor] = {}
        self._device = device
        self._executor = make_executor(device)
        self._scratch = Scratch(device)
        self._layouts: dict[tuple[Plan, tuple[str, ...]], Layout] = {}
        self._loss_scale = loss_scale
        self._scale = 1.0
        self._wanted: Plan | None = None
        self._next_plan = plan
        self._dead: tuple[Bucket, Exception] | None = None
        self._step = _Step(-1)
        self._stats = Stats()
        self._said: set[str] = set()

    # The caller's side

    def submit(self, bucket: Bucket) -> "Future[Tensor]":
        """Exchanges ``bucket`` while backward goes on; the future holds its buffer when the mean is in it."""
        if bucket.index == 0 or self._step.ended:
            self._begin_step()
        return self._executor.submit(lambda: self._job(bucket), bucket.buffer)

    def finish_step(self) -> bool:
        """Call when all futures of the step are done. Whether the gradients may be used: False if they are not finite,
        in which case no residual was touched, on any rank.

        Raises:
            ExchangeError: a rank failed; raised on every rank, naming that rank and the bucket.
        """
        step = self._step
        step.ended = True
        if self._dead:
            bucket, error = self._dead
            raise ExchangeError(
                f"rank {self.wire.rank} lost its peers in {_where(bucket)}: {type(error).__name__}: {error} Look for "
                "the first error on the other ranks; training can go on from the last checkpoint."
            ) from error
        if step.failure_text:
            self.skip()
            raise ExchangeError(step.failure_text) from (step.failure[1] if step.failure else None)
        for note in step.notes:
            self.say_once(note)
        finite = [flag for _, flag in step.finite]
        if finite and not bool(torch.stack(finite).all()):
            self.skip()
            self._stats = dataclasses.replace(self._stats, skipped_steps=self._stats.skipped_steps + 1)
            where = _where(next(bucket for bucket, flag in step.finite if not flag))
            self.say_once(
                f"the mean gradient was not finite after {self.plan.compressor.name!r} in step {step.number}, first in "
                f"{where}. All ranks skip such steps and keep their residuals. If it happens often: a smaller learning "
                "rate, or 'bf16' or 'int8' where 'fp16' overflows."
            )
            return False
        self._stats = dataclasses.replace(self._stats, steps=self._stats.steps + 1)
        step.taken = True
        return True

    def settle(self) -> None:
        """Commits what the last finished step staged. The next step does so by itself."""
        step, self._step = self._step, _Step(self._step.number)
        if not step.ended:
            self.residuals.discard()  # backward did not come to its end
            return
        self.residuals.commit()
        self.warm.update(step.warm)
        if step.taken and self.plan.lossless and self.plan.feedback:
            # The residuals were delivered, and are zero now.
            delivered, self.plan = self.plan, dataclasses.replace(self.plan, feedback=False)
            if self._next_plan is delivered:
                self._next_plan = self.plan

    def skip(self) -> None:
        """Forgets what the last step staged, for a step that is not taken. Call it on all ranks."""
        self.residuals.discard()
        self._step.warm.clear()
        self._step.taken = False

    def request(self, compress: bool) -> None:
        """Switches compression on or off. Any rank may ask; all change in the step after the one that is under way.

        The first step without compression delivers what the residuals hold.
        """
        self._wanted = self.configured if compress else Plan(create("none"), feedback=self.configured.feedback)

    def stats(self) -> Stats:
        """Totals since the start."""
        return dataclasses.replace(self._stats, bytes_sent=self.wire.bytes_sent, wire_seconds=self.wire.seconds)

    def say_once(self, message: str) -> None:
        """Warns, the first time that this is said."""
        kind = message[:40]  # what follows may name a step or a bucket, another one each time
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(f"rank {self.wire.rank}: {message}", CommOptWarning, stacklevel=2)

    def close(self) -> None:
        """Waits for what is under way and ends the executor."""
        self._executor.close()

    def _begin_step(self) -> None:
        self.settle()
        self.plan = self._next_plan
        self._step = _Step(self._step.number + 1)
        if self._loss_scale is not None:
            scale = self._loss_scale()
            if self._step.number > 0 and scale != self._scale:
                self.residuals.scale_(scale / self._scale)
            self._scale = scale

    # The executor's side

    def _job(self, bucket: Bucket) -> None:
        if self._dead:
            return
        start, wire_seconds, sent = time.perf_counter(), self.wire.seconds, self.wire.bytes_sent
        try:
            self._reduce(bucket)
            if bucket.last:
                self._vote()
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
        plan = self.plan
        shapes = [gradient.shape for gradient in bucket.gradients]
        layout = self._layouts.get((plan, tuple(bucket.names)))
        if layout is None:
            layout = make_layout(plan, self.wire.world, bucket.names, shapes)
            self._layouts[plan, layout.names] = layout
        finished = self.wire.finished
        try:
            self._exchange(plan, layout, bucket)
        except WireError:
            raise
        except BaseException as error:  # a compressor that ends its process, too: on this thread it would only hang
            self._step.failure = self._step.failure or (bucket, error)
            schedule = transfers(plan, layout, self.wire.world, self._working_dtype(plan, bucket))
            for transfer in schedule[self.wire.finished - finished :]:
                self.wire.blank(transfer, self._device)
        else:
            self._step.finite.append((bucket, _all_finite(bucket.buffer)))

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

    def _pass_through(self, bucket: Bucket) -> None:
        self._step.notes.append(
            f"{'sparse' if bucket.buffer.is_sparse else bucket.buffer.dtype} gradients travel uncompressed, first in "
            f"{_where(bucket)}."
        )
        world = self.wire.world
        # Plain DDP divides sparse gradients and multiplies dense ones; this gives its bits.
        self.wire.all_reduce(bucket.buffer.div_(world) if bucket.buffer.is_sparse else bucket.buffer.mul_(1.0 / world))
        self._step.finite.append((bucket, _all_finite(bucket.buffer)))

    def _vote(self) -> None:
        """The last word of a step: whether a rank failed, and which plan is wanted."""
        wanted = self._wanted
        ballot = [
            self._step.failure is not None,
            wanted is not None and wanted is not self.configured,
            wanted is self.configured,
        ]
        votes = torch.tensor(ballot, dtype=torch.int64, device=self._device)
        failed, off, on = self.wire.all_reduce(votes, op=dist.ReduceOp.MAX).tolist()
        if failed:
            self._step.failure_text = self._failures()
        if off or on:
            # Where ranks ask for different things in one step, uncompressed is the safe one.
            self._next_plan = Plan(create("none"), feedback=self.configured.feedback) if off else self.configured
            if self._wanted is wanted:
                self._wanted = None

    def _failures(self) -> str:
        mine = ""
        if self._step.failure:
            bucket, error = self._step.failure
            mine = f"rank {self.wire.rank} failed in {_where(bucket)}: {type(error).__name__}: {error}"
        lines = [line for line in share_text(self.wire, mine, self._device) if line]
        return " | ".join(lines) + " | The step was not taken on any rank."

    def _working_dtype(self, plan: Plan, bucket: Bucket) -> torch.dtype:
        return bucket.buffer.dtype if plan.lossless and not plan.feedback else torch.float32


def _all_finite(tensor: Tensor) -> Tensor:
    """A boolean on the tensor's device, without waiting for it."""
    values = tensor._values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = torch.aminmax(values)
    return torch.isfinite(low) & torch.isfinite(high)


def _where(bucket: Bucket) -> str:
    more = f" and {len(bucket.names) - 1} more" if len(bucket.names) > 1 else ""
    return f"bucket {bucket.index} ({bucket.names[0]}{more})"
