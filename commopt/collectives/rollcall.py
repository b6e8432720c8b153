"""Who is missing, after a collective failed: asked through the store, which needs no collective."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

T = TypeVar("T")
PATIENCE = 1.0  # seconds for the other ranks to meet the same failure


def missing_ranks(rank: int, group: dist.ProcessGroup | None) -> list[int] | None:
    """Ranks of ``group`` that did not say, within `PATIENCE`, that they too lost the exchange: those that died or
    stalled. None if the store itself does not answer; it lives on rank 0 of the job."""
    return _within(PATIENCE + 0.5, lambda: _absent(rank, group))


def roll_call(rank: int, group: dist.ProcessGroup | None) -> str:
    """`missing_ranks` in words: where to look."""
    missing = missing_ranks(rank, group)
    if missing is None:
        return "The store on rank 0 of the job does not answer either: look there first."
    if missing:
        return f"Rank {', '.join(map(str, missing))} did not answer: ended, or stalled. Look there first."
    return "All ranks answer: one was late, or met an error of its own. Look for the first error on the others."


def store_answers(seconds: float) -> bool:
    """Whether the store of the job is there: a new group would wait for it without end."""
    store = _world().get_group_store()
    return bool(_within(seconds, lambda: [store.check(["commopt-lost"])]))


def _within(seconds: float, ask: Callable[[], list[T]]) -> list[T] | None:
    """What the store says. None if it does not: where its process is stopped it blocks its callers."""
    found: list[list[T]] = []

    def asking() -> None:
        with suppress(RuntimeError):  # its process ended: that nothing was found says it
            found.append(ask())

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _absent(rank: int, group: dist.ProcessGroup | None) -> list[int]:
    group = group or _world()
    store = PrefixStore("commopt-lost", group.get_group_store())
    store.set_timeout(timedelta(seconds=PATIENCE))
    store.set(str(rank), "here")
    absent = [other for other in range(group.size()) if other != rank]
    until = time.monotonic() + PATIENCE
    while absent and time.monotonic() < until:
        absent = [other for other in absent if not store.check([str(other)])]
        time.sleep(0.02)
    return absent
