"""Snapshots of a run in host memory, to roll back to.

ring = SnapshotRing({"model": model, "optimizer": optimizer, "random": RandomState()})
ring.take(step)                                  # where ring.due(step)
ring.restore(ring.newest_before(step - delay))   # on every rank, then compare `fingerprint(model.parameters())`
"""

import copy
import os
import random
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from commopt.errors import CheckpointError, CommOptWarning, ConfigError
from commopt.resume.trees import digest


class Stateful(Protocol):
    """What has a state: modules, optimizers, schedulers, scalers, samplers."""

    def state_dict(self) -> Any:
        """The state; it may share memory with this object."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Takes over a state that ``state_dict`` gave, with its tensors on the CPU; it may keep references to it."""


@dataclass(frozen=True)
class _Snapshot:
    step: int
    states: dict[str, Any]
    tensors: list[Tensor]  # those within ``states``

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class SnapshotRing:
    """The last few states of a run, copied to host memory; the oldest gives way to the newest.

    Dense tensors are copied to buffers in host memory, and only they are counted; all else is copied as
    ``copy.deepcopy`` does. Nothing here is collective: call it at the same steps on all ranks, and give all of them the
    same ``memory``, so that all hold the same steps.

    Args:
        states: what to save and restore, by name; restored in this order.
        every: steps between two snapshots.
        keep: most snapshots that are held.
        memory: most bytes of host memory that they may take, on this rank. None: a quarter of what is available when
            the ring is made, shared by the ranks of this host.

    Raises:
        ConfigError: an option out of range.
    """

    def __init__(
        self, states: Mapping[str, Stateful], every: int = 50, keep: int = 4, memory: int | None = None
    ) -> None:
        for name, value, least in (("every", every, 1), ("keep", keep, 1), ("memory", memory or 0, 0)):
            if value < least:
                raise ConfigError(f"{name} = {value} of the snapshot ring: it must be at least {least}.")
        self.every = every
        self.keep = keep
        self.memory = share_of_memory() if memory is None else memory
        self._states = dict(states)
        self._ring: deque[_Snapshot] = deque()
        self._fitting = keep  # as far as the user knows

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        return [snapshot.step for snapshot in self._ring]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the snapshots take."""
        return sum(snapshot.nbytes for snapshot in self._ring)

    def due(self, step: int) -> bool:
        """Whether a snapshot is to be taken at ``step``: a multiple of ``every`` lies between it and the last one."""
        return not self._ring or (step + 1) // self.every > (self._ring[-1].step + 1) // self.every

    def newest_before(self, step: int) -> int | None:
        """The latest step before ``step`` that can be restored; None where there is none."""
        return max((known for known in self.steps if known < step), default=None)

    def take(self, step: int) -> None:
        """Copies all states to host memory, as those of ``step``. Snapshots of that step or later ones are dropped.

        Where the limit of memory leaves room for fewer than ``keep``, fewer are held, and a warning says so.
        """
        states = {name: state.state_dict() for name, state in self._states.items()}
        sources = list({id(tensor): tensor for tensor in _dense(states)}.values())
        nbytes = sum(tensor.nbytes for tensor in sources)
        fitting = min(self.keep, self.memory // max(nbytes, 1))
        self._say(fitting, nbytes)

        self._ring = deque(snapshot for snapshot in self._ring if snapshot.step < step)
        spare: list[Tensor] = []
        while self._ring and (len(self._ring) >= fitting or self.nbytes + nbytes > self.memory):
            spare = self._ring.popleft().tensors
        if fitting:
            tensors = _copy(sources, spare)
            # deepcopy takes what its memo has for an object instead of copying that object.
            memo: dict[int, Any] = {id(source): tensor for source, tensor in zip(sources, tensors, strict=True)}
            self._ring.append(_Snapshot(step, copy.deepcopy(states, memo), tensors))

    def restore(self, step: int) -> None:
        """Loads the states of ``step``, one of `steps`, and drops the newer ones. It can be restored again."""
        snapshot = next(snapshot for snapshot in self._ring if snapshot.step == step)
        for name, state in self._states.items():
            # A copy, since optimizers and schedulers keep what they are given.
            state.load_state_dict(copy.deepcopy(snapshot.states[name]))
        self._ring = deque(other for other in self._ring if other.step <= step)

    def clear(self) -> None:
        """Drops all snapshots."""
        self._ring.clear()

    def _say(self, fitting: int, nbytes: int) -> None:
        if fitting >= self._fitting:
            return
        self._fitting = fitting
        what = f"the ring holds {fitting} of {self.keep} snapshots" if fitting else "training cannot be rolled back"
        warnings.warn(
            f"{what}: one takes {nbytes:,} bytes of host memory, {self.keep} take {self.keep * nbytes:,}, and the "
            f"limit is {self.memory:,} on this rank. Raise 'memory', or set 'keep' to a smaller number.",
            CommOptWarning,
            stacklevel=3,
        )


class RandomState:
    """The generators that programs share: of Python, NumPy (where it is imported), torch on the CPU and on each CUDA
    device that this process sees. A `Stateful` of tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """``python`` and ``numpy`` as their modules give them, with lists for arrays; ``torch`` and those in ``cuda``
        uint8 tensors on the CPU."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": []}
        if numpy := sys.modules.get("numpy"):
            name, key, *rest = numpy.random.get_state()
            state["numpy"] = (name, key.tolist(), *rest)
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: Any, /) -> None:
        """Sets them back. CUDA devices beyond those that are here are passed over.

        Raises:
            CheckpointError: ``state`` is not a state of generators; they are as they were.
        """
        before = self.state_dict()
        try:
            _set_generators(state)
        except Exception as error:  # each library has its own errors for a state that is none
            _set_generators(before)
            raise CheckpointError(f"the state of the random generators is damaged: {error}") from error


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """63 bits of the SHA-256 of dtypes, shapes and bytes: equal for equal tensors, and fit for an int64."""
    return int.from_bytes(digest(tensors)[:8], "big") >> 1


def share_of_memory() -> int:
    """A quarter of the host memory that is available, for each rank of this host its part."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # absent outside of containers; "max" where there is no limit
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return int(available) // 4 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _set_generators(state: Any) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(one, device)
    if "numpy" in state:
        import numpy

        name, key, position, *rest = state["numpy"]
        if not (0 <= position <= len(key) == 624):
            raise ValueError("NumPy's position lies outside its key")  # NumPy would read there
        numpy.random.set_state((name, key, position, *rest))


def _dense(tree: Any) -> Iterator[Tensor]:
    """The dense tensors in nested dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _dense(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _dense(value)
    elif type(tree) in (Tensor, torch.nn.Parameter) and tree.layout is torch.strided and not tree.is_quantized:
        yield tree


def _copy(sources: Iterable[Tensor], spare: Iterable[Tensor]) -> list[Tensor]:
    """Copies on the CPU, in ``spare`` buffers where they fit: fresh large ones cost far more than the copy."""
    pool: dict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor in spare:
        pool[_kind(tensor)].append(tensor)
    copies = []
    for source in sources:
        fitting = pool[_kind(source)]
        buffer = fitting.pop() if fitting else torch.empty_like(source, device="cpu", requires_grad=False)
        copies.append(buffer.copy_(source.detach()))
    return copies


def _kind(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, tensor.stride()
