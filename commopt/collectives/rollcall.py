"""Who is missing, after a collective failed: asked through the store, which needs no collective."""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

PATIENCE = 1.0  # seconds for the other ranks to meet the same failure


def missing_ranks(rank: int, group: dist.ProcessGroup | None) -> list[int] | None:
    """Ranks of ``group`` that did not say, within `PATIENCE`, that they too lost the exchange: those that died or
    stalled. None if the store itself does not answer; it lives on rank 0 of the job."""
    found: list[list[int]] = []
    # A store whose process is stopped blocks its callers, for longer than anybody wants to wait here.
    asking = threading.Thread(target=_ask, args=(rank, group, found), daemon=True)
    asking.start()
    asking.join(PATIENCE + 0.5)
    return found[0] if found else None


def _ask(rank: int, group: dist.ProcessGroup | None, found: list[list[int]]) -> None:
    with suppress(RuntimeError):  # a store whose process ended: that it was not found says it
        found.append(_absent(rank, group))


def _absent(rank: int, group: dist.ProcessGroup | None) -> list[int]:
    group = group or dist.group.WORLD
    assert group is not None
    store = PrefixStore("commopt-lost", group.get_group_store())
    store.set_timeout(timedelta(seconds=PATIENCE))
    store.set(str(rank), "here")
    absent = [other for other in range(group.size()) if other != rank]
    until = time.monotonic() + PATIENCE
    while absent and time.monotonic() < until:
        absent = [other for other in absent if not store.check([str(other)])]
        time.sleep(0.02)
    return absent
