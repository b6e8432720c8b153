"""Casts: each element on its own in fewer bits. Payloads sum, so they travel by an ordinary all-reduce."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commopt.compressors.contract import Contraction, RowCompressor
from commopt.compressors.registry import register


@dataclass(frozen=True)
class Cast(RowCompressor):
    """Rounds to ``payload_dtype``, to nearest."""

    summable: ClassVar[bool] = True

    @property
    def guarantee(self) -> Contraction:
        # Within the normal range of the type, an element is off by at most eps / 2 of itself.
        return Contraction(1.0 - (torch.finfo(self.payload_dtype).eps / 2) ** 2)

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        return rows.to(self.payload_dtype)

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        return payload.to(torch.float32)

    def encode(self, rows: Tensor, payload: Tensor, seed: int) -> None:
        payload.copy_(rows)  # in one pass, without a temporary


@register("none")
@dataclass(frozen=True)
class NoCompression(Cast):
    """Sends gradients as they are, in their own dtype: bit for bit what plain DDP does."""

    payload_dtype = torch.float32

    @property
    def guarantee(self) -> Contraction:
        return Contraction(1.0)


@register("fp16")
@dataclass(frozen=True)
class FP16(Cast):
    """IEEE half precision. What exceeds 65504 becomes infinite, which all ranks see: the step is skipped."""

    payload_dtype = torch.float16


@register("bf16")
@dataclass(frozen=True)
class BF16(Cast):
    """bfloat16: the range of float32 with 8 bits of precision."""

    payload_dtype = torch.bfloat16
