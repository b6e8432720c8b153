"""What an exchange puts on the wire, known from shapes alone before it happens."""

from dataclasses import dataclass
from typing import Literal

import torch

from commopt.compressors import RoundsCompressor, RowCompressor
from commopt.layout import Layout
from commopt.plan import Plan


@dataclass(frozen=True)
class Transfer:
    """One collective: what each rank hands over. ``"exchange"`` is with one peer."""

    op: Literal["all_reduce", "all_gather", "all_to_all", "exchange"]
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What a rank hands over."""
        return self.numel * self.dtype.itemsize

    def sent(self, world: int) -> float:
        """Bytes that a rank puts on the wire: a ring for the all-reduce, each peer once for the others."""
        if self.op == "all_reduce":
            return 2 * (world - 1) / world * self.nbytes
        if self.op == "exchange":
            return self.nbytes
        return (world - 1) * self.nbytes if self.op == "all_gather" else (world - 1) / world * self.nbytes


def make_layout(plan: Plan, world: int, names: list[str], shapes: list[torch.Size]) -> Layout:
    """The layout of a message of these tensors; two shots deal rows out to ranks in equal parts."""
    return Layout(names, shapes, plan.block, world if plan.route(world) == "two_shot" else 1)


def transfers(plan: Plan, layout: Layout, world: int, dtype: torch.dtype) -> tuple[Transfer, ...]:
    """Every collective of one exchange, in order. ``dtype`` is the contribution's, which a lossless plan keeps."""
    compressor = plan.compressor
    if world == 1:
        return ()
    if plan.lossless:
        return (Transfer("all_reduce", layout.rows * layout.block, dtype),)
    if isinstance(compressor, RoundsCompressor):
        return tuple(Transfer("all_reduce", numel, torch.float32) for numel in compressor.payload_sizes(layout))
    assert isinstance(compressor, RowCompressor)
    kind, numel = compressor.payload_dtype, layout.rows * compressor.width
    route = plan.route(world)
    if route == "all_reduce":
        return (Transfer("all_reduce", numel, kind),)
    if route == "gather":
        return (Transfer("all_gather", numel, kind),)
    return (Transfer("all_to_all", numel, kind), Transfer("all_gather", numel // world, kind))
