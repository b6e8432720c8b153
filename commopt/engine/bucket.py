"""The message that gradients travel in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"bucket {self.index} ({self.names[0]}{more})"


def regroup(bucket: Bucket, layout: Sequence[Sequence[str]]) -> list[Bucket]:
    """The gradients of a bucket in messages of another layout, with buffers of their own.

    DDP sends the first step as one bucket and finds its layout afterwards. A resumed run that is to give the bits of
    the uninterrupted one sends its first step, too, in the layout that was found then.
    """
    gradients = dict(zip(bucket.names, bucket.gradients, strict=True))
    buckets = []
    for index, names in enumerate(layout):
        parts = [gradients[name] for name in names]
        buffer = torch.cat([part.reshape(-1) for part in parts])
        pieces = buffer.split([part.numel() for part in parts])
        views = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        last = bucket.last and index == len(layout) - 1
        buckets.append(Bucket(index, list(names), buffer, views, bucket.idle & set(names), last))
    return buckets


def put_back(parts: Sequence[Bucket], bucket: Bucket) -> None:
    """Copies what `regroup` took apart into the bucket that it came from."""
    gradients = dict(zip(bucket.names, bucket.gradients, strict=True))
    for part in parts:
        torch._foreach_copy_([gradients[name] for name in part.names], part.gradients)
