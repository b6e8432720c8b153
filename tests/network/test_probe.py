"""The probe: the same tables on all ranks, what they say of a link of known rate, and peers that are lost."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commopt.collectives.wire import PIECE, Wire, WireError
from commopt.compressors import available as known
from commopt.compressors import create
from commopt.errors import LabError
from commopt.lab import available, open_lab
from commopt.network import Network
from commopt.network import probe as probing
from commopt.network.machine import Machine, measure_codecs
from commopt.network.probe import probe, rough_piece
from tests.workers import WorkerError, Workers

CPU = torch.device("cpu")
BUDGET = 0.2  # seconds
FAST = 2.0  # seconds a group waits for a stalled rank
PATIENT = {"die": 5.0, "stall": FAST}


def measure(rank: int, world: int, hosts: list[int] | None) -> dict[str, Any]:
    """``hosts``: pretended ones, by rank."""
    if hosts is None:
        return probe(Wire(None), CPU, BUDGET).to_plain()
    with mock.patch.object(probing, "identify", return_value=[f"node{host} {host}" for host in hosts]):
        return probe(Wire(None), CPU, BUDGET).to_plain()


@pytest.mark.parametrize(
    ("world", "hosts", "links"),
    [
        (2, None, [(0, 0)]),
        (3, None, [(0, 0)]),
        (2, [0, 1], [(0, 1)]),
        (3, [0, 1, 2], [(0, 1), (0, 2), (1, 2)]),
        (4, [0, 0, 1, 2], [(0, 1), (0, 2), (1, 2)]),
    ],
)
def test_all_ranks_hold_the_same_tables(
    workers: Workers, world: int, hosts: list[int] | None, links: list[tuple[int, int]]
) -> None:
    seen = workers.run(measure, world, hosts=hosts)
    assert all(plain == seen[0] for plain in seen)
    network = Network.from_plain(seen[0])  # which also says that no curve falls
    assert network.hosts == tuple(hosts or [0] * world)
    assert list(network.links) == links
    assert network.cpu_share > 0
    for curve in (*network.collectives.values(), *(link.curve for link in network.links.values())):
        assert curve.points[0][0] == probing.FIRST
        assert len(curve.points) > 1
    assert all(0 < link.latency < 0.1 for link in network.links.values())


def alone(rank: int, world: int) -> Network:
    return probe(Wire(None), CPU)


def test_one_rank_has_no_network(workers: Workers) -> None:
    assert workers.run(alone, 1) == [Network((0,), {}, {}, 0.0, PIECE)]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 100])
def test_rounds_let_each_host_measure_one_link_at_a_time(count: int) -> None:
    hosts = tuple(host for host in range(count) for _ in range(2))
    rounds = probing._rounds(hosts)
    measured = min(count, probing.HOSTS)
    assert len(rounds) == measured - 1 + measured % 2
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(set(busy)) == len(busy)
        assert all(ranks == (2 * low, 2 * high) and low < high for (low, high), ranks in pairs.items())
    assert len({pair for pairs in rounds for pair in pairs}) == measured * (measured - 1) // 2


STRIKES = {"all_reduce": 1}  # the number of the collective; else the third of its kind


def lose_a_peer(rank: int, world: int, op: str, fault: str, folder: Path) -> None:
    """The last rank ends, or stalls, in a collective whose part of the probe does not depend on speed."""
    dist.destroy_process_group()
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENT[fault]))
    wire = Wire(None)
    calls, method = [0], getattr(wire, op)

    def fail(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == STRIKES.get(op, 3) and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL) if fault == "die" else time.sleep(FAST + 1)
        return method(*arguments)

    object.__setattr__(wire, op, fail)
    start = time.monotonic()
    with pytest.raises(WireError) as caught:
        probe(wire, CPU, BUDGET)
    (folder / f"{rank}.json").write_text(json.dumps([time.monotonic() - start, str(caught.value)]))


def swap(rank: int, world: int) -> tuple[bool, float]:
    """Ranks 0 and 2 exchange more than fits into one piece; rank 1 has no part in it."""
    wire, size = Wire(None), 100_001
    if rank == 1:
        return True, wire.bytes_sent
    received = torch.zeros(size, dtype=torch.uint8)
    sent = torch.arange(size).to(torch.uint8) + rank
    wire.exchange_with(2 - rank, received, sent)
    return torch.equal(received, sent - rank + (2 - rank)), wire.bytes_sent


def test_two_ranks_exchange(workers: Workers) -> None:
    assert workers.run(swap, 3) == [(True, 100_001.0), (True, 0.0), (True, 100_001.0)]


NAMED = {
    "all_reduce": "the size of pieces",
    "all_gather": "the size of pieces",
    "all_to_all": "all_to_all",
    "exchange_with": "the link between ranks 0 and 1",
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_a_peer_that_dies_is_an_error_that_names_what_was_probed(
    workers: Workers, tmp_path: Path, op: str, world: int
) -> None:
    with pytest.raises(WorkerError, match="exit code -9"):
        workers.run(lose_a_peer, world, op=op, fault="die", folder=tmp_path)
    for rank in range(world - 1):
        waited, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert waited < PATIENT["die"] + 5  # a rank that is no neighbour of the dead one waits for it
        assert message.startswith(f"the probe of the network failed during {NAMED[op]}: ")


@pytest.mark.parametrize(
    ("world", "op"), [(2, "all_reduce"), (3, "all_gather"), (2, "all_to_all"), (2, "exchange_with")]
)
def test_a_peer_that_stalls_is_an_error_after_the_timeout(
    workers: Workers, tmp_path: Path, op: str, world: int
) -> None:
    workers.run(lose_a_peer, world, op=op, fault="stall", folder=tmp_path)
    for rank in range(world):
        waited, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert message.startswith("the probe of the network failed during ")
        if rank < world - 1:  # the one that stalled wakes up later, to the same error
            assert waited < FAST + 5  # with what was probed before
            assert NAMED[op] in message


def time_codecs(rank: int, world: int) -> dict[str, Any]:
    compressors = [create(name) for name in known()]
    return measure_codecs(compressors, CPU, Wire(None)).to_plain()


def test_codecs_are_timed_and_agreed(workers: Workers) -> None:
    seen = workers.run(time_codecs, 2)
    assert seen[0] == seen[1]
    machine = Machine.from_plain(json.loads(json.dumps(seen[0])))
    assert set(machine.codecs) == {repr(create(name)) for name in known()}
    for codec in machine.codecs.values():
        for curve in (codec.encode, codec.decode):
            assert [size for size, _ in curve.points] == pytest.approx([1 << 16, 1 << 20], rel=0.02)
            assert curve.seconds(1 << 20) < 10
    assert 0 <= machine.steal <= 2


REPORT = """
import json, sys, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from commopt.collectives.wire import Wire
from commopt.network.probe import probe, rough_piece
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
network = probe(Wire(None), torch.device("cpu"))
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(network.to_plain()))
dist.destroy_process_group()
"""


def cut(rank: int, world: int) -> int:
    return rough_piece(Wire(None), CPU)


def test_without_a_probe_pieces_follow_a_glance(workers: Workers) -> None:
    for world in (2, 3):
        pieces = set(workers.run(cut, world))
        assert len(pieces) == 1
        assert PIECE < pieces.pop() <= probing.LAST  # memory is faster than any link


def test_the_rate_of_a_shaped_link_is_found(tmp_path: Path) -> None:
    if reason := available():
        with pytest.raises(LabError, match="Without a shaped network"):
            open_lab(2, "25mbit")
        pytest.skip(reason)
    report = tmp_path / "network.json"
    with open_lab(2, "25mbit") as lab:
        assert lab.run([sys.executable, "-c", REPORT, str(report)], timeout=120) == 0
    network = Network.from_plain(json.loads(report.read_text()))
    assert network.hosts == (0, 1)
    rate = 25e6 / 8
    sent = {"all_reduce": 1.0, "all_gather": 1.0, "all_to_all": 0.5}  # bytes on the wire by bytes handed over, 2 ranks
    for size in (200_000, 1_000_000, 10_000_000):
        found = {op: size * part / network.collectives[op].seconds(size) for op, part in sent.items()}
        found["link"] = size / network.links[0, 1].curve.seconds(size)
        for what, value in found.items():  # a busy machine makes a link slower, and nothing makes it faster
            assert 0.6 * rate < value < 1.1 * rate, (what, size)
