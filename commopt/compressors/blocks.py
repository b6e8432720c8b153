"""Block quantizers: a row holds one float32 scale and ``block`` codes of a few bits.

Rounding is to nearest (a contraction), or stochastic (unbiased; QSGD, Alistarh et al. 2017, with the maximum in place
of the 2-norm).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from commopt.compressors.contract import Contraction, Guarantee, RowCompressor, Unbiased, generator, option
from commopt.compressors.registry import register
from commopt.errors import ConfigError

SCALE_BYTES = 4
PACK = 0x0102040810204080  # times eight bytes of 0 or 1, gathers them as the bits of the highest byte
TINY = 1e-35  # the least scale's reciprocal stays finite in float32


def pack_row(scale: Tensor, codes: Tensor) -> Tensor:
    """``[rows, 1]`` float32 and ``[rows, n]`` of one byte each to ``[rows, 4 + n]`` uint8."""
    return torch.cat([scale.contiguous().view(torch.uint8), codes.view(torch.uint8)], dim=1)


def unpack_row(payload: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_row`; both are views."""
    return payload[:, :SCALE_BYTES].view(torch.float32), payload[:, SCALE_BYTES:]


@dataclass(frozen=True)
class Quantizer(RowCompressor):
    """Codes are whole numbers from ``-levels`` to ``levels``, times the row's scale ``max|x| / levels``."""

    levels: ClassVar[int]
    stochastic: bool = option(False)

    @property
    def guarantee(self) -> Guarantee:
        # ||x||^2 >= max^2, the largest element is exact, and each other one is off by at most half a step (nearest) or
        # has variance of at most a quarter of a squared step (stochastic); a step is max / levels.
        lost = (self.block - 1) / (4 * self.levels**2)
        return Unbiased(lost) if self.stochastic else Contraction(1.0 - lost)

    def quantize(self, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """``[rows, 1]`` scales and ``[rows, block]`` whole numbers, both float32."""
        scale = rows.abs().amax(1, keepdim=True).clamp_min_(TINY).div_(self.levels)
        codes = rows * scale.reciprocal()
        if self.stochastic:
            noise = torch.empty_like(codes).uniform_(generator=generator(seed, rows.device))
            codes.add_(noise).floor_().clamp_(-self.levels, self.levels)
        else:
            codes.round_()
        return scale, codes


@register("int8")
@dataclass(frozen=True)
class Int8(Quantizer):
    """8-bit integers: a quarter of float32's bytes."""

    levels: ClassVar[int] = 127
    block: int = option(256, 32, 1024, multiple=4)

    @property
    def width(self) -> int:
        return SCALE_BYTES + self.block

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        scale, codes = self.quantize(rows, seed)
        return pack_row(scale, codes.to(torch.int8))

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        scale, codes = unpack_row(payload)
        return codes.view(torch.int8).to(torch.float32).mul_(scale)


@register("int4")
@dataclass(frozen=True)
class Int4(Quantizer):
    """4-bit integers, two a byte. ``hadamard`` first spreads outliers over the row (Suresh et al. 2017, sec. 3)."""

    levels: ClassVar[int] = 7
    block: int = option(128, 8, 128, multiple=8)
    hadamard: bool = option(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hadamard and self.block & (self.block - 1):
            raise ConfigError(f"option 'hadamard' of 'int4' needs a block that is a power of two, got {self.block}.")

    @property
    def width(self) -> int:
        return SCALE_BYTES + self.block // 2

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        if self.hadamard:
            rows = rows @ rotation(self.block, rows.device)
        scale, codes = self.quantize(rows, seed)
        pairs = codes.add_(8).to(torch.int8).view(torch.int16)  # the first of each two in the low byte
        return pack_row(scale, (pairs | (pairs >> 4)).to(torch.uint8))

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        scale, pairs = unpack_row(payload)
        codes = pair_table(payload.device).index_select(0, pairs.reshape(-1).to(torch.int32)).view(torch.float32)
        rows = codes.view(len(payload), self.block).mul_(scale)
        return rows @ rotation(self.block, rows.device).T if self.hadamard else rows


@register("fp8")
@dataclass(frozen=True)
class FP8(RowCompressor):
    """e4m3 floats with a scale a row (Micikevicius et al. 2022), sent as bytes since few backends carry the type."""

    block: int = option(256, 32, 1024, multiple=4)

    @property
    def guarantee(self) -> Contraction:
        # Normal numbers keep 3 bits of mantissa: off by 2^-4 of themselves. Smaller ones are off by 2^-10 in units of
        # a 448th of the maximum, which adds less than block * (2^-10 / 448)^2.
        return Contraction(1.0 - 2.0**-8 - self.block * (2.0**-10 / 448) ** 2)

    @property
    def width(self) -> int:
        return SCALE_BYTES + self.block

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        scale = rows.abs().amax(1, keepdim=True).clamp_min_(TINY).div_(448.0)
        codes = (rows * scale.reciprocal()).clamp_(-448.0, 448.0)
        return pack_row(scale, codes.to(torch.float8_e4m3fn))

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        scale, codes = unpack_row(payload)
        return codes.view(torch.float8_e4m3fn).to(torch.float32).mul_(scale)


@register("onebit")
@dataclass(frozen=True)
class OneBit(RowCompressor):
    """Signs, times the mean magnitude of the row (scaled signSGD, Karimireddy et al. 2019, algorithm 1)."""

    block: int = option(256, 32, 65536, multiple=32)

    @property
    def guarantee(self) -> Contraction:
        return Contraction(1.0 / self.block)  # ||x||_1^2 / (block * ||x||_2^2), which is least for a single spike

    @property
    def width(self) -> int:
        return SCALE_BYTES + self.block // 8

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        scale = rows.abs().mean(1, keepdim=True)
        octets = (rows >= 0).view(torch.int64)  # eight booleans each
        return pack_row(scale, ((octets * PACK) >> 56).to(torch.uint8))

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        scale, packed = unpack_row(payload)
        octets = sign_table(payload.device).index_select(0, packed.reshape(-1).to(torch.int32))
        return octets.view(len(payload), self.block).mul_(scale)


@lru_cache(maxsize=8)
def sign_table(device: torch.device) -> Tensor:
    """``[256, 8]`` float32: the bits of each byte, lowest first, as +1 and -1."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return (2.0 * bits - 1.0).to(device)


@lru_cache(maxsize=8)
def pair_table(device: torch.device) -> Tensor:
    """``[256]`` int64: the two codes of each byte, lower one first, as the bits of two float32."""
    byte = torch.arange(256)
    return torch.stack([byte & 15, byte >> 4], dim=1).sub(8).to(torch.float32).view(torch.int64).view(-1).to(device)


@lru_cache(maxsize=8)
def rotation(size: int, device: torch.device) -> Tensor:
    """``[size, size]`` float32, orthogonal: random signs (the same on all ranks), then the Walsh-Hadamard matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (size, 1), generator=generator(size, torch.device("cpu"))) * 2 - 1
    return (signs * matrix / math.sqrt(size)).to(device)
