"""Ranks meet through the store of their process group: its collectives may be under way."""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from commopt.errors import CheckpointError

SHOWN = 8  # ranks that an error lists


def meet(group: dist.ProcessGroup | None, word: str, seconds: float, remedy: str) -> list[str]:
    """The words of all ranks, by rank. Call it on every rank.

    Meetings are numbered in the store, and one value there closes a meeting and opens the next, so that all who came
    see one outcome and a rank that failed once can meet again.

    Raises:
        CheckpointError: on the ranks that came, naming those that did not within ``seconds``.
    """
    group = group or dist.group.WORLD
    assert group is not None
    rank, world = group.rank(), group.size()
    try:
        store = PrefixStore("commopt", group.get_group_store())
        opened = store.compare_set("meeting", "", json.dumps({"number": 0})).decode()
        number = json.loads(opened)["number"]
        store.set(f"{number}/{rank}", json.dumps(word))
        last = store.add(f"{number}/came", 1) == world
        deadline, pause = time.monotonic() + seconds, 0.001
        # Not store.wait: it would lock the store of this process against other threads.
        while (now := store.get("meeting").decode()) == opened:
            if last or time.monotonic() > deadline:
                _close(store, opened, number, world)
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
    except RuntimeError as error:
        raise CheckpointError(f"rank {rank} lost the store of the process group while saving: {error}") from error
    outcome = json.loads(now)
    if outcome["number"] == number + 1 and "words" in outcome:
        return list(outcome["words"])
    raise CheckpointError(
        f"rank {some(outcome.get('absent', []))} of {world} did not come within {seconds:g} s. {remedy}"
    )


def _close(store: Store, opened: str, number: int, world: int) -> None:
    keys = [f"{number}/{rank}" for rank in range(world)]
    absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
    outcome: dict[str, Any] = {"number": number + 1}
    if absent:
        outcome["absent"] = absent
    else:
        outcome["words"] = [json.loads(word) for word in store.multi_get(keys)]
    closed = json.dumps(outcome)
    if store.compare_set("meeting", opened, closed).decode() == closed:
        for key in [*keys, f"{number}/came"]:
            store.delete_key(key)


def some(ranks: Sequence[int]) -> str:
    """The first of ``ranks``, for an error."""
    return ", ".join(map(str, ranks[:SHOWN])) + (" ..." if len(ranks) > SHOWN else "")
