"""The one path from gradient to gradient.

gradients -> + residual -> compress -> exchange -> decompress -> mean gradients
                              |                                       |
                         payload bytes                       new residual (staged)
"""

import dataclasses
import time
from collections import ChainMap

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.collectives.exchange import Scratch, exchange
from commopt.collectives.wire import Wire, WireError
from commopt.engine.executors import Turn
from commopt.engine.fidelity import Fidelity
from commopt.engine.step import Step, checksum, norm
from commopt.feedback import Residuals
from commopt.layout import Layout
from commopt.messages import Arrival, Message
from commopt.plan import Plan
from commopt.transfers import Transfer, make_layout, transfers


@dataclasses.dataclass
class Lane:
    """What one message at a time has for itself."""

    wire: Wire
    scratch: Scratch
    codec_seconds: float = 0.0
    bytes_uncompressed: float = 0.0


class Path:
    """Exchanges messages, each on the lane that its turn names; called by the executor.

    Args:
        group: a process group that nothing else uses.
        device: where gradients are.
        residuals: what earlier messages owe.
        fidelity: watches what is delivered.
        lanes: messages under way at a time.
        checked: make a checksum of what is delivered.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        residuals: Residuals,
        fidelity: Fidelity,
        lanes: int,
        checked: bool,
    ) -> None:
        self.lanes = [Lane(Wire(group), Scratch(device)) for _ in range(lanes)]
        self.residuals = residuals
        self.warm: dict[str, Tensor] = {}
        self.scale = 1.0  # of the loss
        self._fidelity = fidelity
        self._device = device
        self._checked = checked
        self._world = self.lanes[0].wire.world
        self._layouts: dict[tuple[Plan, tuple[str, ...]], Layout] = {}

    def run(self, message: Message, step: Step, turn: Turn) -> None:
        """Exchanges a message. A rank that fails on it goes on sending zeros, so that its peers reach the vote.

        Raises:
            WireError: peers are gone.
        """
        lane = self.lanes[turn.lane]
        wire = lane.wire
        start, elsewhere = time.perf_counter(), wire.seconds + wire.waited
        wire.begin(turn)
        if message.plan is not None and any(gradient.numel() for gradient in message.gradients):
            self._reduce(message, message.plan, step, lane, turn)
        elif message.carries[0].bucket.buffer.numel():
            self._pass_through(message, step, lane)
        lane.codec_seconds += time.perf_counter() - start - (wire.seconds + wire.waited - elsewhere)

    def deliver(self, arrival: Arrival, step: Step, turn: Turn) -> None:
        """A bucket has its means, if all went well."""
        bucket = arrival.bucket
        if arrival.messages > 1:
            turn.see_others()
        if step.failure is not None or bucket.buffer.numel() == 0:
            return
        step.norms[bucket.index] = (bucket, norm(bucket.buffer))
        if self._checked:
            step.checksums.append(checksum(bucket.buffer))
        if arrival.contributed is not None:
            unit = 1.0 / self.scale
            delivered = self._fidelity.sample(bucket.names, bucket.buffer)
            contributed = arrival.contributed.mul_(unit / self._world)
            self._fidelity.stage(bucket.index, bucket.names, contributed, delivered.mul_(unit))

    def watch(self, arrival: Arrival, plan: Plan) -> None:
        """Before the first message of a bucket."""
        bucket = arrival.bucket
        if bucket.compressible and bucket.buffer.numel() and not plan.lossless:
            arrival.contributed = self._fidelity.sample(bucket.names, bucket.buffer)

    def layout(self, plan: Plan, names: list[str], shapes: list[torch.Size]) -> Layout:
        """Where the tensors of a message lie in rows."""
        layout = self._layouts.get((plan, tuple(names)))
        if layout is None:
            layout = self._layouts[plan, tuple(names)] = make_layout(plan, self._world, names, shapes)
        return layout

    def _reduce(self, message: Message, plan: Plan, step: Step, lane: Lane, turn: Turn) -> None:
        layout = self.layout(plan, message.names, [gradient.shape for gradient in message.gradients])
        schedule = transfers(plan, layout, self._world, working_dtype(plan, message.dtype))
        # The last one keeps its turn, for the vote.
        lane.wire.begin(turn, None if message.last or not schedule else len(schedule))
        finished = lane.wire.finished
        try:
            self.exchange(message, plan, layout, step, lane)
        except WireError:
            raise
        except BaseException as error:  # a compressor that ends its process, too: on this thread it would only hang
            step.fail(message, error)
            for transfer in schedule[lane.wire.finished - finished :]:
                lane.wire.blank(transfer, self._device)
        numel = sum(gradient.numel() for gradient in message.gradients)
        lane.bytes_uncompressed += Transfer("all_reduce", numel, message.dtype).sent(self._world)

    def exchange(self, message: Message, plan: Plan, layout: Layout, step: Step, lane: Lane) -> None:
        """The path itself."""
        dtype = working_dtype(plan, message.dtype)
        share = 1.0 / self._world  # before anything is summed, so that low precision does not overflow
        seed = (step.number << 16) + message.index
        warm = ChainMap(step.warm, self.warm)
        whole = message.buffer
        in_place = whole is not None and whole.dtype == dtype and not layout.padded
        rows = whole.view(layout.rows, layout.block) if whole is not None and in_place else None

        if rows is not None and not plan.feedback:
            exchange(plan, rows.mul_(share), rows, layout, lane.wire, lane.scratch, seed, warm)
            return

        shape = (layout.rows, layout.block)
        slot = self.residuals.slot(layout) if plan.feedback else None
        x = slot.back if slot else lane.scratch.take("x", shape, dtype)
        stale: dict[str, Tensor] = {}
        idle = message.idle
        if slot:
            parts = zip(layout.names, layout.views(x), layout.views(slot.front), message.gradients, strict=True)
            for name, contribution, residual, gradient in parts:
                if name in idle:
                    contribution.copy_(gradient).mul_(share)
                    stale[name] = contribution.any()  # DDP sends what an earlier backward left over
                else:
                    torch.add(residual, gradient, alpha=share, out=contribution)
        else:
            torch._foreach_copy_(layout.views(x), message.gradients)
            x.mul_(share)
        layout.zero_padding(x)
        sent = norm(x) if step.closes_window else None

        out = rows if rows is not None else x if not slot else lane.scratch.take("out", shape, dtype)
        exchange(plan, x, out, layout, lane.wire, lane.scratch, seed, warm)
        if rows is None:
            torch._foreach_copy_(message.gradients, layout.views(out))
        if slot:
            residuals = zip(layout.names, layout.views(x), layout.views(slot.front), strict=True)
            for name, staged, residual in residuals:
                if name in idle:
                    # A parameter that is idle here may not be elsewhere: two shots leave a part of their loss with us.
                    staged.masked_fill_(stale[name], 0.0).add_(residual)
            self.residuals.stage(slot)
            if sent is not None:
                step.squares.append(torch.stack([norm(x), sent]) ** 2)

    def _pass_through(self, message: Message, step: Step, lane: Lane) -> None:
        bucket = message.carries[0].bucket
        buffer, wire, sent = bucket.buffer, lane.wire, lane.wire.bytes_sent
        step.notes.append(
            f"{'sparse' if buffer.is_sparse else buffer.dtype} gradients travel uncompressed, first in {bucket}."
        )
        # Plain DDP divides sparse gradients and multiplies dense ones; this gives its bits.
        wire.all_reduce(buffer.div_(self._world) if buffer.is_sparse else buffer.mul_(1.0 / self._world))
        plain = Transfer("all_reduce", buffer.numel(), buffer.dtype).sent(self._world)
        lane.bytes_uncompressed += wire.bytes_sent - sent if buffer.is_sparse else plain


def working_dtype(plan: Plan, dtype: torch.dtype) -> torch.dtype:
    """Of the contribution of gradients of this dtype."""
    return dtype if plan.lossless and not plan.feedback else torch.float32
