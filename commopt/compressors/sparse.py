"""Sparsifiers: a few elements of each row travel, the others wait in the residual."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commopt.compressors.contract import Contraction, RowCompressor, Unbiased, generator, option
from commopt.compressors.registry import register

STRIDE = 16  # one in so many elements is sampled to find a threshold


@dataclass(frozen=True)
class Sparse(RowCompressor):
    """A row is ``kept`` float32 values followed by as many 16-bit positions; unused slots hold zeros."""

    density: float = option(0.01, 1e-5, 1.0)

    @property
    def kept(self) -> int:
        """Elements of a row that travel."""
        return max(1, round(self.density * self.block))

    @property
    def guarantee(self) -> Contraction:
        return Contraction(self.kept / self.block)

    @property
    def width(self) -> int:
        return 4 * self.kept + 4 * -(-self.kept // 2)  # whole words, so that rows of floats stay aligned

    def pack(self, values: Tensor, positions: Tensor) -> Tensor:
        """``[rows, kept]`` float32 and int64 to ``[rows, width]`` bytes."""
        payload = torch.zeros(len(values), self.width, dtype=torch.uint8, device=values.device)
        split = 4 * self.kept
        payload[:, :split].view(torch.float32).copy_(values)
        payload[:, split : split + 2 * self.kept].view(torch.int16).copy_(positions)
        return payload

    def unpack(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pack`."""
        split = 4 * self.kept
        positions = payload[:, split : split + 2 * self.kept].view(torch.int16).to(torch.int64)
        return payload[:, :split].view(torch.float32), positions & 0xFFFF  # positions above 32767 were wrapped

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        rows = torch.zeros(len(payload), self.block, device=payload.device)
        self.accumulate(payload, rows, seed, 1.0)
        return rows

    def accumulate(self, payload: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        values, positions = self.unpack(payload)
        out.scatter_add_(1, positions, values * alpha)


@register("topk")
@dataclass(frozen=True)
class TopK(Sparse):
    """The elements of largest magnitude of each row (Stich et al. 2018, def. 2.1, a row at a time)."""

    block: int = option(4096, 64, 65536)

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        positions = rows.abs().topk(self.kept, dim=1, sorted=False).indices
        return self.pack(rows.gather(1, positions), positions)


@register("threshold")
@dataclass(frozen=True)
class Threshold(Sparse):
    """Top-k of long rows by a threshold that a sample of the row gives (Aji and Heafield 2017, sec. 3).

    The threshold aims at three quarters of ``kept``, and all that reaches it travels: these *are* the largest ones.
    A row in which more than ``kept`` elements reach it falls back to the exact top-k.
    """

    block: int = option(65536, 1024, 65536, multiple=STRIDE)

    @property
    def guarantee(self) -> Contraction:
        return Contraction(self._sampled / self.block)  # at least those of the sample reach the threshold

    @property
    def _sampled(self) -> int:
        return max(1, round(0.75 * self.kept / STRIDE))

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        magnitude = rows.abs()
        threshold = magnitude[:, ::STRIDE].topk(self._sampled, dim=1).values[:, -1:]
        threshold = threshold.clamp_min(torch.finfo(torch.float32).tiny)  # a zero never travels
        reaches = (magnitude < threshold).logical_not_()  # in this form a NaN reaches it
        counts = reaches.sum(1)
        crowded = counts > self.kept
        if crowded.any():
            reaches[crowded] = False
            counts.masked_fill_(crowded, 0)

        row, column = reaches.nonzero(as_tuple=True)
        slot = torch.arange(len(row), device=rows.device) - (counts.cumsum(0) - counts)[row]
        positions = torch.zeros(len(rows), self.kept, dtype=torch.int64, device=rows.device)
        values = torch.zeros(len(rows), self.kept, device=rows.device)
        positions[row, slot] = column
        values[row, slot] = rows[row, column]
        if crowded.any():
            positions[crowded] = magnitude[crowded].topk(self.kept, dim=1, sorted=False).indices
            values[crowded] = rows[crowded].gather(1, positions[crowded])
        return self.pack(values, positions)


@register("randomk")
@dataclass(frozen=True)
class RandomK(RowCompressor):
    """One random element in ``round(1 / density)`` (Stich et al. 2018, def. 2.1); a shared seed lets payloads sum."""

    summable: ClassVar[bool] = True
    payload_dtype = torch.float32
    density: float = option(0.01, 1e-5, 1.0)

    @property
    def block(self) -> int:  # type: ignore[override]
        return round(1 / self.density)

    @property
    def guarantee(self) -> Unbiased:
        return Unbiased(self.block - 1.0)

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        poison = (rows * 0).sum(1, keepdim=True)  # NaN where the row holds anything that is not finite, else zero
        return rows.gather(1, self._positions(rows, seed)) + poison

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        rows = torch.zeros(len(payload), self.block, device=payload.device)
        self.accumulate(payload, rows, seed, 1.0)
        return rows

    def accumulate(self, payload: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        out.scatter_add_(1, self._positions(payload, seed), payload * (alpha * self.block))
        out[:, :1].add_(payload * 0)  # the drawn element may be padding; the first one never is, so that a NaN is seen

    def _positions(self, like: Tensor, seed: int) -> Tensor:
        numbers = generator(seed, like.device)
        return torch.randint(self.block, (len(like), 1), generator=numbers, device=like.device)
