"""What backward hands over, and what is sent for it.

    buckets of DDP, as they become ready --Cutter--> messages, by the plan

A message holds whole tensors of one class and dtype, from one bucket or from several neighbours.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.futures import Future

from commopt.plan import Plan, TensorClass

ANY: TensorClass = "matrix"  # where classes make no difference
CLASSES: tuple[TensorClass, ...] = (ANY, "embedding", "small")
LANES = 2  # messages under way at a time: one on the wire, one in a codec


@dataclass(frozen=True)
class Bucket:
    """Gradients that became ready together.

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

    @property
    def compressible(self) -> bool:
        """Whether its elements are numbers that lie in rows."""
        return not self.buffer.is_sparse and self.buffer.is_floating_point()

    def __str__(self) -> str:
        return f"bucket {self.index} ({_named(self.names)})"


@dataclass(eq=False)
class Arrival:
    """A bucket on its way: done when all messages that carry a part of it are."""

    bucket: Bucket
    future: "Future[Tensor]"
    contributed: Tensor | None = None  # what is watched of it, before the exchange
    messages: int = 0  # that carry a part of it
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def part_done(self) -> bool:
        """A message was exchanged; whether it was the last one."""
        with self._lock:
            self._done += 1
            return self._done == self.messages


@dataclass(eq=False)
class Message:
    """Gradients that are exchanged together.

    Args:
        index: position in the step, from 0.
        plan: how they travel; None: as they are, uncounted by classes.
        names: one parameter name a gradient.
        gradients: views into the buckets, which receive the mean over ranks.
        carries: the buckets that these are of.
        last: whether this is the last message of the step.
    """

    index: int
    plan: Plan | None
    names: list[str] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    carries: list[Arrival] = field(default_factory=list)
    last: bool = False
    nbytes: int = 0

    @property
    def idle(self) -> frozenset[str]:
        """Names of parameters that took no part in this backward."""
        return frozenset().union(*(arrival.bucket.idle for arrival in self.carries))

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients."""
        return self.gradients[0].dtype

    def add(self, arrival: Arrival, name: str, gradient: Tensor) -> None:
        """Takes in one more gradient."""
        if not self.carries or self.carries[-1] is not arrival:
            self.carries.append(arrival)
            arrival.messages += 1
        self.names.append(name)
        self.gradients.append(gradient)
        self.nbytes += gradient.numel() * gradient.element_size()

    @property
    def buffer(self) -> Tensor | None:
        """All gradients, flat, where they lie in one piece of one bucket; None where they do not."""
        if len(self.carries) > 1:
            return None
        whole, first = self.carries[0].bucket.buffer, self.gradients[0]
        if whole is first:
            return whole
        start = first.storage_offset() - whole.storage_offset()
        offset = first.storage_offset()
        for gradient in self.gradients:
            if gradient.storage_offset() != offset:
                return None
            offset += gradient.numel()
        return whole[start : start + offset - first.storage_offset()]

    def __str__(self) -> str:
        return f"message {self.index} ({_named(self.names)})"


class Cutter:
    """Cuts the buckets of a step into messages, alike on all ranks. Made for a plan, and told when a step begins.

    Args:
        plan: how gradients travel.
        classes: the class of each parameter, by name.
    """

    def __init__(self, plan: Plan, classes: Mapping[str, TensorClass]) -> None:
        self.plan = plan
        self._parts = {kind: plan.of(kind) for kind in CLASSES}
        # Classes that travel alike are one: the first of them.
        alike = {kind: next(k for k in CLASSES if self._parts[k] == self._parts[kind]) for kind in CLASSES}
        self._of: dict[str, TensorClass] = {name: alike[kind] for name, kind in classes.items() if alike[kind] != ANY}
        self.begin()

    def begin(self, layout: Sequence[Sequence[str]] = ()) -> None:
        """A step begins. ``layout``: names a message, of an earlier step: a step that arrives as one bucket is cut
        so."""
        self._layout = layout
        self._open: dict[tuple[TensorClass, torch.dtype], Message] = {}
        self._count = 0

    def cut(self, arrival: Arrival) -> list[Message]:
        """The messages that are complete with this bucket."""
        bucket = arrival.bucket
        if not bucket.compressible or bucket.buffer.numel() == 0:
            message = self._message(None)
            message.add(arrival, bucket.names[0], bucket.buffer)
            message.names = list(bucket.names)
            cut = [message]
        elif (
            self._layout and bucket.last and sorted(bucket.names) == sorted(n for names in self._layout for n in names)
        ):
            cut = self._cut_as_before(arrival)
        else:
            cut = self._cut(arrival)
        if bucket.last:
            cut += self._open.values()
            self._open = {}
            cut[-1].last = True
        for message in cut:
            message.index, self._count = self._count, self._count + 1
        return cut

    def _cut(self, arrival: Arrival) -> list[Message]:
        bucket, limit, cut = arrival.bucket, self.plan.message_bytes, []
        if limit is None and not self._of:
            message = self._message(ANY)
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
                message.add(arrival, name, gradient)
            return [message]
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            kind = self._of.get(name, ANY)
            key = kind, gradient.dtype
            message = self._open.get(key) or self._open.setdefault(key, self._message(kind))
            message.add(arrival, name, gradient)
            if limit is not None and message.nbytes >= limit:
                cut.append(self._open.pop(key))
        if limit is None:
            cut += self._open.values()
            self._open = {}
        return cut

    def _cut_as_before(self, arrival: Arrival) -> list[Message]:
        gradients = dict(zip(arrival.bucket.names, arrival.bucket.gradients, strict=True))
        cut = []
        for names in self._layout:
            message = self._message(self._of.get(names[0], ANY))
            for name in names:
                message.add(arrival, name, gradients[name])
            cut.append(message)
        return cut

    def _message(self, kind: TensorClass | None) -> Message:
        return Message(0, None if kind is None else self._parts[kind])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"
