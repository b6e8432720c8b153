"""The exchange: what each rank contributes becomes the compressed sum over ranks, and this rank's residual.

Straight-line and synchronous. Every collective is in ``transfers.py`` too, so that its bytes are known beforehand, and
a rank that fails in between can still take part in the rest (see ``engine/path.py``).
"""

from collections.abc import MutableMapping

import torch
from torch import Tensor

from commopt.collectives.wire import Wire
from commopt.compressors import RoundsCompressor, RowCompressor
from commopt.errors import UnsupportedError
from commopt.layout import Layout
from commopt.plan import Plan


class Scratch:
    """Buffers that are used again by the next message of a lane, which has one at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer for ``use``; valid until the next call with the same ``use`` and ``dtype``."""
        numel = torch.Size(shape).numel()
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[use, dtype] = torch.empty(numel, dtype=dtype, device=self.device)
        return buffer[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def exchange(
    plan: Plan,
    x: Tensor,
    out: Tensor,
    layout: Layout,
    wire: Wire,
    scratch: Scratch,
    seed: int,
    warm: MutableMapping[str, Tensor] | None = None,
) -> None:
    """Sums ``x`` over ranks through ``plan``.

    Args:
        x: ``[rows, block]``, what this rank contributes. Float32, but for a lossless plan. Becomes this rank's
            residual if the plan keeps one, else its content is lost.
        out: ``[rows, block]`` of the same dtype, becomes the sum, the same bits on every rank. May be ``x`` itself if
            the plan keeps no residual.
        seed: the same on all ranks, another one for each message.
        warm: memory over steps of compressors that keep one.

    The sum over ranks of ``x`` before equals ``out`` plus the sum over ranks of the residuals.
    """
    compressor = plan.compressor
    if plan.lossless or wire.world == 1:
        _lossless(plan, x, out, wire)
        return
    if isinstance(compressor, RoundsCompressor):
        target = out if plan.feedback else scratch.take("sum", tuple(out.shape), out.dtype)
        sizes = list(compressor.payload_sizes(layout))

        def all_reduce(payload: Tensor) -> Tensor:
            expected = sizes.pop(0) if sizes else 0
            if (payload.numel(), payload.dtype) != (expected, torch.float32):
                raise UnsupportedError(
                    f"a round of {compressor.name!r} sends {payload.numel()} elements of {payload.dtype}, where "
                    f"payload_sizes has {expected} of torch.float32."
                )
            return wire.all_reduce(payload)

        compressor.reduce(x, target, layout, {} if warm is None else warm, seed, all_reduce)
        if sizes:
            raise UnsupportedError(f"{compressor.name!r} ended {len(sizes)} rounds before its payload_sizes did.")
        if target is not out:
            out.copy_(target)
        return
    assert isinstance(compressor, RowCompressor)
    route = plan.route(wire.world)
    exchange_rows = {"all_reduce": _all_reduce, "gather": _gather, "two_shot": _two_shot}[route]
    exchange_rows(plan, compressor, x, out, wire, scratch, seed)


def _lossless(plan: Plan, x: Tensor, out: Tensor, wire: Wire) -> None:
    if out is not x:
        out.copy_(x)
    if plan.feedback:
        x.sub_(out)
    wire.all_reduce(out)


def _all_reduce(
    plan: Plan, compressor: RowCompressor, x: Tensor, out: Tensor, wire: Wire, scratch: Scratch, seed: int
) -> None:
    payload = scratch.take("payload", (len(x), compressor.width), compressor.payload_dtype)
    compressor.encode(x, payload, seed)
    if plan.feedback:
        compressor.add_decoded(payload, x, seed, -plan.gain)
    wire.all_reduce(payload)
    out.zero_()
    compressor.add_decoded(payload, out, seed, plan.gain)


def _gather(
    plan: Plan, compressor: RowCompressor, x: Tensor, out: Tensor, wire: Wire, scratch: Scratch, seed: int
) -> None:
    payload = scratch.take("payload", (len(x), compressor.width), compressor.payload_dtype)
    gathered = scratch.take("gathered", (wire.world, *payload.shape), payload.dtype)
    compressor.encode(x, payload, seed + 1 + wire.rank)
    wire.all_gather(gathered, payload)
    parts = list(gathered)
    if plan.feedback and wire.world == 2 and plan.gain == 1.0:
        # The sum of two has the same bits in either order: what this rank delivers is decoded once for both uses. (Not
        # with a gain: it is multiplied and added in one rounding, where order matters.)
        out.zero_()
        compressor.add_decoded(parts.pop(wire.rank), out, seed, plan.gain)
        x.sub_(out)
    else:
        if plan.feedback:
            compressor.add_decoded(payload, x, seed, -plan.gain)
        out.zero_()
    for part in parts:
        compressor.add_decoded(part, out, seed, plan.gain)


def _two_shot(
    plan: Plan, compressor: RowCompressor, x: Tensor, out: Tensor, wire: Wire, scratch: Scratch, seed: int
) -> None:
    """Each rank sums one chunk of rows and sends the compressed sum to all.

    Its own contribution to that chunk never travels, so it enters exactly, and the chunk's part of the residual is free
    to keep what the second compression lost.
    """
    chunks = x.view(wire.world, -1, plan.block)
    mine = chunks[wire.rank]
    payload = scratch.take("payload", (len(x), compressor.width), compressor.payload_dtype)
    received = scratch.take("received", (wire.world, len(mine), compressor.width), compressor.payload_dtype)
    compressor.encode(x, payload, seed + 1 + wire.rank)
    wire.all_to_all(received, payload)
    sent = payload.view(received.shape)
    for rank in range(wire.world):
        if rank != wire.rank:
            compressor.add_decoded(received[rank], mine, seed, plan.gain)
            if plan.feedback:
                compressor.add_decoded(sent[rank], chunks[rank], seed, -plan.gain)

    second = scratch.take("second", (len(mine), compressor.width), compressor.payload_dtype)
    compressor.encode(mine, second, seed + 1 + wire.world + wire.rank)
    wire.all_gather(received, second)
    if plan.feedback:
        compressor.add_decoded(second, mine, seed, -plan.gain)
    out.zero_()
    compressor.add_decoded(received.view(len(x), compressor.width), out, seed, plan.gain)
