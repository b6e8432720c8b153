"""Mid-rise quantizers: 2 or 3 bits an element, with levels that suit the bulk of a row instead of its maximum.

With so few levels, an outlier would push all else to the smallest codes if the scale were the maximum. Here thresholds
are equally spaced and levels are the centroids of a Gaussian between them, which is close to the best that is possible
(Max 1960, table I). What exceeds the outer level is clipped and waits in the residual.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from commopt.compressors.blocks import PACK, TINY
from commopt.compressors.contract import Contraction, RowCompressor, option
from commopt.compressors.registry import register

SCALE_BYTES = 2
PACK_PAIRS = 0x01041040  # times four bytes of 0 to 3, gathers them as the pairs of bits of the highest byte


@dataclass(frozen=True)
class MidRise(RowCompressor):
    """A row is its scale as bfloat16, which has the range of float32, then the codes.

    Levels are whole numbers times the scale, which is ``unit`` of the row's root mean square. None of them is zero:
    rows of zeros stay zero, zeros among others do not.
    """

    levels: ClassVar[tuple[int, ...]]  # those above zero
    unit: ClassVar[float]
    step: ClassVar[float]  # between thresholds, in scales
    block: int = option(128, 32, 128, multiple=32)

    @property
    def guarantee(self) -> Contraction:
        # In units of the root mean square, an element z sent as q takes g = q (2 z - q) off the squared error z^2. As a
        # function of z^2, g lies above the line through its values at 0 and at the block, the most that z^2 can be;
        # the mean of z^2 is 1. Rounding the scale by up to 2^-8 adds to what is sent for zeros.
        inner, outer = self.levels[0] * self.unit, self.levels[-1] * self.unit
        slope = (outer * (2 * math.sqrt(self.block) - outer) + inner**2) / self.block
        return Contraction(slope - inner**2 * (1 + 2.0**-6))

    @property
    def width(self) -> int:
        return SCALE_BYTES + self.block * len(self.levels).bit_length() // 8

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)  # squares leave float32's range
        scale = norm.mul_(self.unit / math.sqrt(self.block)).to(torch.bfloat16)
        per_step = scale.to(torch.float32).clamp_min_(TINY).mul_(self.step).reciprocal_()
        half = len(self.levels)
        codes = (rows * per_step).floor_().clamp_(-half, half - 1).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), *self.pack(codes)], dim=1)

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        scale = payload[:, :SCALE_BYTES].view(torch.bfloat16).to(torch.float32)
        return self.unpack(payload[:, SCALE_BYTES:]).view(len(payload), self.block).to(torch.float32).mul_(scale)

    @abstractmethod
    def pack(self, codes: Tensor) -> list[Tensor]:
        """``[rows, block]`` int8, counting steps from ``-len(levels)`` to ``len(levels) - 1``, as columns of uint8."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of `pack`, as levels in int8."""


@register("int2")
@dataclass(frozen=True)
class Int2(MidRise):
    """2-bit integers, four a byte: 2.1 bits an element."""

    levels: ClassVar[tuple[int, ...]] = (3, 10)
    unit: ClassVar[float] = 0.151
    step: ClassVar[float] = 6.5

    def pack(self, codes: Tensor) -> list[Tensor]:
        return [pack_pairs(codes + 2)]

    def unpack(self, packed: Tensor) -> Tensor:
        inner, outer = self.levels
        return lookup(packed, (-outer, -inner, inner, outer))


@register("int3")
@dataclass(frozen=True)
class Int3(MidRise):
    """3-bit integers, 3.1 bits an element: magnitudes of all elements, four a byte, then signs, eight a byte."""

    levels: ClassVar[tuple[int, ...]] = (13, 39, 65, 100)
    unit: ClassVar[float] = 0.0207
    step: ClassVar[float] = 26.6

    def pack(self, codes: Tensor) -> list[Tensor]:
        signs = codes >> 7  # 0 or -1; by exclusive or, -1 turns -1 to -4 into 0 to 3
        octets = (signs & 1).view(torch.int64)
        return [pack_pairs(codes ^ signs), ((octets * PACK) >> 56).to(torch.uint8)]

    def unpack(self, packed: Tensor) -> Tensor:
        magnitudes, signs = packed.split([self.block // 4, self.block // 8], dim=1)
        return lookup(magnitudes, self.levels).mul_(lookup(signs, (1, -1)))


def pack_pairs(codes: Tensor) -> Tensor:
    """``[rows, n]`` int8 from 0 to 3 to ``[rows, n / 4]`` uint8, the first code in the lowest bits."""
    return ((codes.view(torch.int32) * PACK_PAIRS) >> 24).to(torch.uint8)


def lookup(packed: Tensor, values: tuple[int, ...]) -> Tensor:
    """Flat int8: for each code in the bytes of ``packed``, lowest bits first, the value that it stands for."""
    return table(values, packed.device).index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.int8)


@lru_cache(maxsize=16)
def table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """``[256]``: the values of all codes of each byte in int8, seen as one integer of 4 or 8 bytes."""
    bits = (len(values) - 1).bit_length()
    codes = (torch.arange(256).unsqueeze(1) >> torch.arange(0, 8, bits)) & (len(values) - 1)
    whole = torch.int64 if bits == 1 else torch.int32
    return torch.tensor(values, dtype=torch.int8)[codes].view(whole).view(-1).to(device)
