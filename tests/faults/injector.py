"""Faults on demand: what goes wrong on one rank in one step.

    with Faults(handle.engine) as faults:
        faults.at(rank=1, step=7).nan_gradient()
        faults.at(rank=0, step=9).oom_in_compress()
        ...                                       # the training loop

Call it alike on all ranks; a fault strikes on its own rank, once, in the exchange with that number. Only the instances
of this engine are patched, and they are as they were when the block ends.
"""

import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from commopt.collectives.wire import Wire
from commopt.compressors import RoundsCompressor
from commopt.engine import Engine
from commopt.engine.executors import Turn
from commopt.engine.path import Lane
from commopt.engine.step import Step
from commopt.layout import Layout
from commopt.messages import Message
from commopt.plan import Plan

Place = Literal["gradient", "contribution", "codec", "received"]


@dataclass(frozen=True)
class Fault:
    """``strike`` is called with the tensor that is to be damaged: the first bucket, each bucket for a
    ``"contribution"``, or what was received; in a codec it raises."""

    kind: str
    step: int
    place: Place
    strike: Callable[[Tensor], Any]


class Faults:
    """Holds what is armed on this rank. ``struck`` counts what has struck here, by kind."""

    def __init__(self, engine: Engine) -> None:
        self.struck: Counter[str] = Counter()
        self._engine = engine
        self._armed: list[Fault] = []
        self._lock = threading.Lock()  # messages are exchanged by turns on several threads
        self._inside: set[int] = set()  # threads that are in an exchange: a vote is not a payload
        self._job, self._exchange = engine._job, engine._path.exchange
        self._undo = [_patch(engine, "_job", self._on_job), _patch(engine._path, "exchange", self._on_exchange)]
        for lane in engine._path.lanes:
            wire = lane.wire
            self._undo.append(_patch(wire, "all_reduce", partial(self._on_all_reduce, wire.all_reduce)))
            self._undo.append(_patch(wire, "all_gather", partial(self._on_all_gather, wire, wire.all_gather)))

    def __enter__(self) -> "Faults":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for undo in self._undo:
            undo()

    def at(self, rank: int, step: int) -> "At":
        """The place of a fault: the rank, and the number of the exchange."""
        return At(self, rank, step)

    def arm(self, rank: int, fault: Fault) -> "Faults":
        """Arms it if this is the rank."""
        if rank == self._engine.wire.rank:
            self._armed.append(fault)
        return self

    def _due(self, place: Place, last: bool = True) -> list[Fault]:
        """What strikes now; for the ``last`` time."""
        with self._lock:
            due = [fault for fault in self._armed if (fault.place, fault.step) == (place, self._engine.step)]
            for fault in due if last else ():
                self._armed.remove(fault)
                self.struck[fault.kind] += 1
        return due

    def _on_job(self, message: Message, under_way: Step, turn: Turn) -> None:
        buffer, step = message.carries[0].bucket.buffer, self._engine.step
        for fault in self._due("gradient") + self._due("contribution", message.last):
            fault.strike(buffer)
        self._job(message, under_way, turn)
        if message.last:  # what found no codec does not wait for a step of this number after a roll-back
            self._armed = [fault for fault in self._armed if fault.step != step]  # the engine may be in the next one

    def _on_exchange(self, message: Message, plan: Plan, layout: Layout, step: Step, lane: Lane) -> None:
        here = threading.get_ident()
        self._inside.add(here)
        method = "reduce" if isinstance(plan.compressor, RoundsCompressor) else "encode"
        due = [] if plan.lossless else self._due("codec")
        codec = getattr(plan.compressor, method)

        def fail(*args: Any) -> Any:
            if threading.get_ident() != here:
                return codec(*args)
            for fault in due:
                fault.strike(message.gradients[0])
            return None

        undo = _patch(plan.compressor, method, fail) if due else None
        try:
            self._exchange(message, plan, layout, step, lane)
        finally:
            self._inside.discard(here)
            if undo is not None:
                undo()

    def _on_all_reduce(self, all_reduce: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        all_reduce(tensor, *args, **kwargs)
        self._damage(tensor)
        return tensor

    def _on_all_gather(self, wire: Wire, all_gather: Callable[..., None], out: Tensor, tensor: Tensor) -> None:
        all_gather(out, tensor)
        self._damage(out.view(wire.world, -1)[(wire.rank + 1) % wire.world])  # a peer's part

    def _damage(self, received: Tensor) -> None:
        for fault in self._due("received") if threading.get_ident() in self._inside else ():
            fault.strike(received)


@dataclass(frozen=True)
class At:
    """Arms one fault. ``*_in_compress`` does nothing in a step without compression."""

    faults: Faults
    rank: int
    step: int

    def nan_gradient(self) -> Faults:
        """One element of this rank's gradient is NaN."""
        return self._arm("nan", "gradient", lambda gradient: gradient[:1].fill_(math.nan))

    def inf_gradient(self) -> Faults:
        """One element of this rank's gradient is infinite."""
        return self._arm("inf", "gradient", lambda gradient: gradient[:1].fill_(math.inf))

    def scale_payload(self, factor: float) -> Faults:
        """What this rank contributes is multiplied, before it is compressed."""
        return self._arm("scale", "contribution", lambda gradient: gradient.mul_(factor))

    def kill(self) -> Faults:
        """The process ends without a word."""
        return self._arm("kill", "gradient", lambda _: os.kill(os.getpid(), signal.SIGKILL))

    def stall(self, seconds: float) -> Faults:
        """The exchange of this rank does nothing for a while."""
        return self._arm("stall", "gradient", lambda _: time.sleep(seconds))

    def freeze(self, seconds: float) -> Faults:
        """The whole process stands still for a while, and with it a store that it hosts."""
        return self._arm("freeze", "gradient", lambda _: _freeze(seconds))

    def flip_bit(self, bit: int = 22) -> Faults:
        """One bit is damaged in what this rank, and no other, receives of the step's result. ``bit`` counts from the
        payload's beginning; 22 is the first one of the mantissa in a float32, where most payloads begin with one."""
        return self._arm("flip", "received", lambda received: _flip(received, bit))

    def oom_in_compress(self) -> Faults:
        """The codec finds no memory."""
        return self._arm("oom", "codec", _no_memory)

    def raise_in_compress(self, message: str = "broken codec") -> Faults:
        """The codec raises a ``ValueError``."""
        return self._arm("raise", "codec", lambda _: _raise(ValueError(message)))

    def _arm(self, kind: str, place: Place, strike: Callable[[Tensor], Any]) -> Faults:
        return self.faults.arm(self.rank, Fault(kind, self.step, place, strike))


def _patch(target: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Shadows a method in one instance, even of a frozen dataclass; the result undoes it."""
    object.__setattr__(target, name, replacement)
    return lambda: object.__delattr__(target, name)


def _flip(tensor: Tensor, bit: int) -> None:
    octets = tensor.view(-1).view(torch.uint8)
    octets[bit // 8 % len(octets)] ^= 1 << bit % 8


def _freeze(seconds: float) -> None:
    subprocess.run(["sh", "-c", f"(sleep {seconds}; kill -CONT {os.getpid()}) &"], check=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _no_memory(_: Tensor) -> NoReturn:
    raise torch.OutOfMemoryError("a fault: cannot allocate memory")


def _raise(error: Exception) -> NoReturn:
    raise error
