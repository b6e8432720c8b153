"""Ranks that end without a word, and ranks that are late: the others say who it is, soon."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.errors import ExchangeError
from tests.faults.injector import Faults
from tests.hooks.training import MLP, SMALL_BUCKETS, loss_of, train
from tests.workers import WorkerError, Workers

TIMEOUT = 2.0  # seconds, of a group that waits for a stalled rank
LATE = TIMEOUT + 2.5
STEP = 3


def share_a_store(rank: int, world: int) -> None:
    """Ranks meet again through a store that is a part of rank 0, as with most launchers."""
    port = torch.zeros((), dtype=torch.int64)
    store = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    store = store or TCPStore("127.0.0.1", int(port), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def fail(rank: int, world: int, patience: float, victim: int, fault: str, tcp: bool) -> tuple[float, str]:
    """How long the step with the fault took on this rank, and what it said."""
    if tcp:
        share_a_store(rank, world)
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    handle = commopt.attach(model, "int8", timeout=patience)
    with Faults(handle.engine) as faults:
        at = faults.at(victim, STEP)
        arms: dict[str, Callable[[], Faults]] = {
            "kill": at.kill,
            "stall": lambda: at.stall(LATE),
            "freeze": lambda: at.freeze(LATE),
        }
        arms[fault]()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(STEP))
        loss = loss_of(model, rank, STEP)
        start = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            loss.backward()
        waited = time.monotonic() - start
    handle.close()
    return waited, str(caught.value)


def survive(rank: int, world: int, victim: int, folder: Path, tcp: bool) -> None:
    seen = fail(rank, world, 20.0, victim, "kill", tcp)
    (folder / f"{rank}.json").write_text(json.dumps(seen))  # the pool reports the rank that died, and nothing else


@pytest.mark.parametrize(
    ("world", "victim", "tcp"),
    [(2, 1, False), (2, 0, False), (3, 1, False), (4, 2, False), (2, 0, True), (3, 0, True), (3, 2, True)],
)
def test_a_killed_peer_is_named_within_five_seconds(
    workers: Workers, tmp_path: Path, world: int, victim: int, tcp: bool
) -> None:
    with pytest.raises(WorkerError, match=rf"rank {victim} died .*exit code -9"):
        workers.run(survive, world, victim=victim, folder=tmp_path, tcp=tcp)
    for rank in set(range(world)) - {victim}:
        waited, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert waited < 5.0
        assert message.startswith(f"rank {rank} lost its peers in message 0 (")
        if tcp and victim == 0:
            assert "The store on rank 0 of the job does not answer either" in message
        else:
            assert f"Rank {victim} did not answer: ended, or stalled." in message


@pytest.mark.parametrize(
    ("world", "victim", "fault", "tcp"),
    [
        (2, 1, "stall", False),
        (2, 0, "stall", True),
        (3, 1, "stall", False),
        (2, 1, "freeze", True),
        (3, 0, "freeze", True),
    ],
)
def test_a_late_peer_is_named_after_the_timeout(
    workers: Workers, world: int, victim: int, fault: str, tcp: bool
) -> None:
    seen = workers.run(fail, world, patience=TIMEOUT, victim=victim, fault=fault, tcp=tcp)
    for rank, (waited, message) in enumerate(seen):
        assert message.startswith(f"rank {rank} lost its peers in message ")  # the late one, too, when it wakes up
        if rank == victim:
            continue
        assert TIMEOUT - 0.5 < waited < TIMEOUT + 2.0
        if fault == "freeze" and victim == 0:
            assert "The store on rank 0 of the job does not answer either" in message
        else:
            assert f"Rank {victim} did not answer: ended, or stalled." in message
