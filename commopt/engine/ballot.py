"""The last word of a step: one small integer vector a rank, reduced by MAX, decides for all.

What must be the same on all ranks travels twice, as ``x`` and ``-x``: the two maxima cancel only if all ranks agree. A
number that each rank has its own of (its loss) has a place a rank.
"""

import enum
import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

ABSENT = -(1 << 62)  # less than any number that is voted on
INFINITE = 0x7F800000  # float32 bits of infinity; those of numbers are less, those of a NaN are more


class Failure(enum.IntEnum):
    """What kept a rank from exchanging its gradients; the gravest decides."""

    NONE = 0
    OUT_OF_MEMORY = 1
    ERROR = 2


class Wish(enum.IntEnum):
    """A rank's wish for the next step. Where ranks differ, uncompressed is the safe one."""

    NONE = 0
    COMPRESS = 1
    UNCOMPRESSED = 2


AGREED = ("step", "next plan", "checksum")  # what `encode` takes as ``same``, in this order


@dataclass(frozen=True)
class Result:
    """What all ranks know after the vote, bit for bit the same.

    ``owed`` says whether residuals wait on some rank, ``gradient_norm`` is the largest that a rank computed, ``loss``
    the mean over the ranks that told theirs, and ``disputed`` those of `AGREED` that ranks do not agree on.
    """

    failure: Failure
    wish: Wish
    owed: bool
    gradient_norm: float
    finite: bool
    loss: float | None
    disputed: tuple[str, ...]


def hash_of(text: str) -> int:
    """32 bits, the same on all ranks for the same text."""
    return zlib.crc32(text.encode())


def encode(
    failure: Failure,
    wish: Wish,
    owes: bool,
    same: tuple[int, int, Tensor],
    norm: Tensor,
    loss: Tensor,
    rank: int,
    world: int,
) -> Tensor:
    """The vector that a rank hands to the vote: int64, on the device of ``norm``.

    Args:
        owes: whether residuals of this rank will wait after this step.
        same: what has to agree, see `AGREED`; the last one is an int64 scalar on the device.
        norm: scalar of the mean gradient.
        loss: scalar of this rank; NaN for none.
    """
    floats = torch.stack([norm.float(), loss.float().to(norm.device)])
    norm_bits, loss_bits = floats.view(torch.int32).long().unbind()
    told = torch.where(loss.isfinite().to(norm.device), loss_bits, torch.full_like(loss_bits, ABSENT))
    step, plan, checksum = same
    host = torch.tensor([failure, wish, owes, step, -step, plan, -plan], dtype=torch.int64, device=norm.device)
    places = torch.full((world,), ABSENT, dtype=torch.int64, device=norm.device)
    places[rank] = told
    return torch.cat([host, torch.stack([checksum, -checksum, norm_bits & 0x7FFFFFFF]), places])


def decode(votes: list[int]) -> Result:
    """Reads the maxima over all ranks."""
    failure, wish, owed, *rest = votes
    pairs, norm_bits, places = rest[:6], rest[6], rest[7:]
    disputed = [name for name, high, low in zip(AGREED, pairs[::2], pairs[1::2], strict=True) if high != -low]
    losses = [_float(bits) for bits in places if bits != ABSENT]
    return Result(
        failure=Failure(failure),
        wish=Wish(wish),
        owed=bool(owed),
        gradient_norm=_float(norm_bits),
        finite=norm_bits < INFINITE,
        loss=math.fsum(losses) / len(losses) if losses else None,
        disputed=tuple(disputed),
    )


def _float(bits: int) -> float:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
