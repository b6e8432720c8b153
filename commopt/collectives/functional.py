"""``all_reduce``, ``reduce_scatter`` and ``all_gather`` with compression, outside any trainer.

As in torch.distributed, all ranks of a group call them in the same order with the same arguments and shapes. They keep
no residual. What cannot be compressed (integers, complex numbers, sparse and empty tensors) travels as it is.
"""

import itertools
import warnings
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.collectives.exchange import Scratch, exchange
from commopt.collectives.wire import Wire
from commopt.compressors import RoundsCompressor, RowCompressor, create
from commopt.errors import CommOptWarning, ConfigError, UnsupportedError
from commopt.layout import Layout
from commopt.plan import Plan
from commopt.transfers import make_layout

Op = Literal["mean", "sum"]
_calls: "WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]" = WeakKeyDictionary()
_said: set[str] = set()


@torch.no_grad()
def all_reduce(
    tensor: Tensor, compressor: str = "int8", op: Op = "mean", group: dist.ProcessGroup | None = None, **options: Any
) -> None:
    """Replaces ``tensor`` by its mean or sum over ranks, compressed on the way; the same bits on every rank.

    Args:
        tensor: any shape and floating dtype, changed in place.
        compressor: a registered name; ``options`` are its options.
        op: ``"mean"`` or ``"sum"``.
        group: a process group, by default the default one.

    Raises:
        ConfigError: unknown compressor, option or op.
        UnsupportedError: the mean of integers.
        ExchangeError: a peer is gone, or was not heard of for as long as the group waits.
    """
    plan, wire = _plan(compressor, options), Wire(group)
    share = _share(op, wire.world, tensor)
    if not _compressible(tensor) or plan.lossless:
        whole = tensor.mul_(share) if share != 1.0 else tensor
        if not whole.is_sparse:
            whole = whole.contiguous()
        wire.all_reduce(whole)
        if whole is not tensor:
            tensor.copy_(whole)
        return
    layout = make_layout(plan, wire.world, ["tensor"], [tensor.shape])
    out = _sum(plan, layout, [tensor], share, wire)
    tensor.copy_(layout.views(out)[0])


@torch.no_grad()
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    compressor: str = "int8",
    op: Op = "mean",
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> None:
    """``output`` becomes this rank's chunk of the mean or sum of ``input`` over ranks.

    It is accumulated in float32, or in its own dtype where it travels uncompressed.

    Args:
        output: any shape, contiguous.
        input: ``world`` times as many elements, in order of ranks.

    A rank's own contribution to its chunk does not travel and is not compressed, but for a compressor of several rounds
    (``powersgd``), which sums all of it. Arguments and errors are otherwise those of `all_reduce`.
    """
    plan, wire = _plan(compressor, options), Wire(group)
    share = _share(op, wire.world, input)
    chunks = _chunks("input", input, output, wire.world)
    if not _compressible(input) or plan.lossless:
        parts = torch.empty_like(chunks)
        wire.all_to_all(parts, chunks.mul(share) if share != 1.0 else chunks)
        output.copy_(parts.sum(0).view_as(output))
        return
    codec = plan.compressor
    if isinstance(codec, RoundsCompressor):
        layout = Layout([str(rank) for rank in range(wire.world)], [output.shape] * wire.world, plan.block)
        out = _sum(plan, layout, [chunk.view(output.shape) for chunk in chunks], share, wire)
        output.copy_(layout.views(out)[wire.rank])
        return
    assert isinstance(codec, RowCompressor)
    layout = Layout(["chunk"], [chunks[0].shape], plan.block)
    payload = torch.empty(wire.world, layout.rows, codec.width, dtype=codec.payload_dtype, device=input.device)
    received = torch.empty_like(payload)
    seed = _seed(group)
    mine = _rows(layout, [chunks[wire.rank]], share)
    for chunk, target in zip(chunks, payload, strict=True):
        codec.encode(_rows(layout, [chunk], share), target, seed if codec.summable else seed + wire.rank)
    wire.all_to_all(received, payload)
    for rank in range(wire.world):
        if rank != wire.rank:
            codec.add_decoded(received[rank], mine, seed)
    output.copy_(layout.views(mine)[0].view_as(output))


@torch.no_grad()
def all_gather(
    output: Tensor, input: Tensor, compressor: str = "int8", group: dist.ProcessGroup | None = None, **options: Any
) -> None:
    """``output`` becomes the ``input`` of every rank, in order of ranks, compressed on the way.

    All ranks see the same bits, so that a rank's own part is what the others got. Arguments and errors are those of
    `reduce_scatter`, with ``output`` the larger one.
    """
    plan, wire = _plan(compressor, options), Wire(group)
    chunks = _chunks("output", output, input, wire.world)
    if not _compressible(input) or plan.lossless or wire.world == 1:
        wire.all_gather(chunks, input.contiguous())
        return
    codec = plan.compressor
    if isinstance(codec, RoundsCompressor):
        # Factors sum: each rank fills its own place and leaves zeros in the others.
        layout = Layout([str(rank) for rank in range(wire.world)], [input.shape] * wire.world, plan.block)
        tensors = [input if rank == wire.rank else torch.zeros_like(input) for rank in range(wire.world)]
        out = _sum(plan, layout, tensors, 1.0, wire)
        for chunk, view in zip(chunks, layout.views(out), strict=True):
            chunk.copy_(view.reshape(-1))
        return
    assert isinstance(codec, RowCompressor)
    layout = Layout(["input"], [input.shape], plan.block)
    payload = torch.empty(layout.rows, codec.width, dtype=codec.payload_dtype, device=input.device)
    gathered = payload.new_empty(wire.world, *payload.shape)
    seed = _seed(group)
    codec.encode(_rows(layout, [input], 1.0), payload, seed if codec.summable else seed + wire.rank)
    wire.all_gather(gathered, payload)
    for chunk, part in zip(chunks, gathered, strict=True):
        rows = torch.zeros(layout.rows, layout.block, device=input.device)
        codec.add_decoded(part, rows, seed)
        chunk.copy_(layout.views(rows)[0].reshape(-1))


def _plan(compressor: str, options: dict[str, Any]) -> Plan:
    return Plan(create(compressor, **options), feedback=False)


def _share(op: str, world: int, tensor: Tensor) -> float:
    if op not in ("mean", "sum"):
        raise ConfigError(f"op must be 'mean' or 'sum', got {op!r}.")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedError(f"the mean of {tensor.dtype} is not defined; use op='sum', or a floating dtype.")
    return 1.0 / world if op == "mean" else 1.0


def _compressible(tensor: Tensor) -> bool:
    if tensor.is_floating_point() and not tensor.is_sparse and tensor.numel() > 0:
        return True
    kind = "sparse" if tensor.is_sparse else "empty" if tensor.numel() == 0 else str(tensor.dtype)
    if kind not in _said:
        _said.add(kind)
        warnings.warn(f"{kind} tensors travel uncompressed.", CommOptWarning, stacklevel=4)  # behind no_grad's wrapper
    return False


def _chunks(name: str, whole: Tensor, part: Tensor, world: int) -> Tensor:
    if whole.is_sparse or part.is_sparse:
        raise UnsupportedError("input and output must be dense; all_reduce takes sparse tensors.")
    if whole.numel() != world * part.numel() or not whole.is_contiguous() or whole.dtype != part.dtype:
        raise UnsupportedError(
            f"{name} must be contiguous, of {part.dtype}, and {world} times as large as the other tensor "
            f"({part.numel()} elements); got {whole.numel()} elements of {whole.dtype}."
        )
    return whole.view(world, -1)


def _rows(layout: Layout, tensors: list[Tensor], share: float) -> Tensor:
    rows = torch.zeros(layout.rows, layout.block, device=tensors[0].device)
    for view, tensor in zip(layout.views(rows), tensors, strict=True):
        view.copy_(tensor)
    return rows.mul_(share)


def _sum(plan: Plan, layout: Layout, tensors: list[Tensor], share: float, wire: Wire) -> Tensor:
    rows = _rows(layout, tensors, share)
    exchange(plan, rows, rows, layout, wire, Scratch(rows.device), _seed(wire.group))
    return rows


def _seed(group: dist.ProcessGroup | None) -> int:
    """The same on all ranks, since they make the same calls, and another one at each call."""
    calls = _calls.setdefault(group or dist.group.WORLD, itertools.count())  # type: ignore[arg-type]
    return next(calls) << 16
