"""Measures the network of a process group, through the process group itself: no socket of its own.

What a training step meets is messages that follow each other. A token bucket, in a switch or in the cloud, lets some
tens of kilobytes pass unshaped after a silence: such a burst is sent before anything is measured, every size is
repeated until that takes a while, and only the last and longest batch of repeats counts.
"""

import hashlib
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.collectives.agreement import share_text
from commopt.collectives.wire import PIECE, Wire, WireError
from commopt.network.curve import Curve
from commopt.network.table import COLLECTIVES, Link, Network

FIRST, ENOUGH, LAST = 1 << 10, 1 << 16, 1 << 24  # bytes: the sizes that are tried, always up to the second one
STEP, GROWTH = 8, 4  # from size to size: up to `ENOUGH`, and beyond, where a table is off by 6 % of a straight line
BURST = 1 << 17  # bytes that each rank sends before anything counts
LEAST, MOST = 3, 1000  # repeats of a size
LINKS = 0.2  # of the budget, for all links; the rest is for collectives
SHARES = 20  # of the time for a curve; a size is repeated for about one of them
FIT = 0.5  # of that time, for the largest size
LATE = 1.5  # of that time, after which no larger size is tried: a busy machine takes its own
HOSTS = 8  # links are measured between at most so many hosts, evenly spread over all
PINGS = 16
LOOKS, LOOK = 4, 0.02  # how often the size of pieces is fitted, and seconds for each
PIECE_SECONDS = 4e-3  # that a piece takes on the wire
GLANCE = 1 << 18  # bytes
POINTS = 1 + int(math.log2(LAST // FIRST))  # most sizes of a curve


@dataclass(frozen=True)
class Sampled:
    """Seconds of one repeat, of the slowest rank; and CPU seconds of this one in a second of repeats."""

    seconds: float
    cpu_share: float


Once = Callable[[], None]
Agree = Callable[[float], float]  # the maximum over the ranks that measure together, the same bits on all of them


def probe(wire: Wire, device: torch.device, budget: float = 2.0) -> Network:
    """Measures latencies, links and collectives in about ``budget`` seconds. Call it on every rank.

    Links are measured between the lowest ranks of two hosts, all pairs of a round at once, in as many rounds as hosts
    (round robin). Beyond `HOSTS` hosts, links are those between so many of them, evenly spread.

    Raises:
        WireError: a peer ended or stalled, on every rank within the group's timeout; it names what was being measured.
    """
    with _during("the list of hosts"):
        hosts = number_hosts(identify(wire, device))
    if wire.world == 1:
        return Network(hosts, {}, {}, 0.0, PIECE)
    drain(wire, device)
    wire.piece = _fit_pieces(wire, device)
    collectives, used = {}, []
    for op in COLLECTIVES:
        with _during(op):
            make = partial(collective, wire, op, device=device)
            points, cpu_share = climb(make, agree(wire, device), budget * (1 - LINKS) / len(COLLECTIVES), ENOUGH)
        collectives[op] = Curve.fit(points)
        used.append(cpu_share)
    with _during("the use of the CPU"):
        cpu_share = agree(wire, device)(statistics.fmean(used))
    links = _links(wire, hosts, device, budget * LINKS, collectives["all_gather"])
    return Network(hosts, links, collectives, cpu_share, wire.piece)


def glance(wire: Wire, device: torch.device) -> float:
    """About how many bytes/s are summed over ranks: the best of a few all-reduces, on the slowest rank. Takes
    milliseconds, and a token bucket can flatter it. Call it on every rank of a group of several."""
    summed, seconds = torch.zeros(GLANCE // 4, device=device), []
    for _ in range(LEAST):
        before = wire.seconds
        wire.all_reduce(summed)
        seconds.append(wire.seconds - before)
    return summed.nbytes / agree(wire, device)(min(seconds))


def rough_piece(wire: Wire, device: torch.device) -> int:
    """Bytes that messages from peer to peer are best cut into, by a `glance`: where no probe fits them."""
    sent = 2 * (wire.world - 1) / wire.world * glance(wire, device)
    return max(PIECE, min(int(sent * PIECE_SECONDS), LAST))


def identify(wire: Wire, device: torch.device) -> list[str]:
    """What tells the host of each rank from others, by rank. A network namespace is a host of its own.

    Starts with the host's name and a space.
    """
    boot, namespace = "", 0
    if Path("/proc/self/ns/net").exists():
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.stat("/proc/self/ns/net").st_ino
    name = socket.gethostname()
    return share_text(wire, f"{name} {hashlib.sha256(f'{name} {boot} {namespace}'.encode()).hexdigest()}", device)


def number_hosts(identities: list[str]) -> tuple[int, ...]:
    """The host of each rank, numbered in order of appearance."""
    known = list(dict.fromkeys(identities))
    return tuple(map(known.index, identities))


def drain(wire: Wire, device: torch.device) -> None:
    """Sends what the network lets through unshaped after a silence."""
    with _during("the first messages"):
        collective(wire, "all_gather", BURST // (wire.world - 1), device)()


def _fit_pieces(wire: Wire, device: torch.device) -> int:
    """Bytes that the link sends in a few milliseconds: pieces of that size keep both directions busy on a slow link,
    and cost little on a fast one. Larger pieces show a faster link, hence several looks."""
    wire.piece, size = PIECE, BURST
    for _ in range(LOOKS):
        with _during("the size of pieces"):
            seconds = sample(collective(wire, "all_gather", size, device), agree(wire, device), LOOK).seconds
        fitting = min(int(size * (wire.world - 1) / seconds * PIECE_SECONDS), LAST)
        if fitting < 2 * wire.piece:
            break
        wire.piece, size = fitting, max(size, fitting)
    return wire.piece


def collective(wire: Wire, op: str, size: int, device: torch.device) -> Once:
    """One collective to which each rank hands about ``size`` bytes: float32 to be summed, or payloads of bytes."""
    if op == "all_reduce":
        summed = torch.zeros(size // 4, device=device)
        return lambda: void(wire.all_reduce(summed))
    sent = torch.zeros(-(-size // wire.world) * wire.world, dtype=torch.uint8, device=device)
    if op == "all_gather":
        gathered = sent.new_empty(wire.world, len(sent))
        return lambda: wire.all_gather(gathered, sent)
    received = torch.empty_like(sent)
    return lambda: wire.all_to_all(received, sent)


def agree(wire: Wire, device: torch.device) -> Agree:
    """The maximum over all ranks."""
    return lambda value: float(wire.all_reduce(_scalar(value, device), dist.ReduceOp.MAX))


def climb(
    make: Callable[[int], Once], agree: Agree, seconds: float, enough: int, bound: Curve | None = None
) -> tuple[list[tuple[float, float]], float]:
    """Sizes up to ``enough``, and larger ones while their repeats fit well into ``seconds``: (size, seconds), and the
    CPU share at the largest.

    All who measure together stop alike, since they read the same seconds. ``bound``: no size takes longer than this, so
    that a hiccup does not end it.
    """
    points: list[tuple[float, float]] = []
    size, start = FIRST, time.perf_counter()
    while True:
        sampled = sample(make(size), agree, seconds / SHARES)
        points.append((size, sampled.seconds))
        if size < enough:
            size *= STEP
            continue
        late = agree(time.perf_counter() - start) > LATE * seconds
        for growth in () if late else (GROWTH, 2):
            expected = growth * sampled.seconds
            if bound is not None:
                expected = min(expected, bound.seconds(growth * size))
            if expected * (LEAST + 1) < FIT * seconds and growth * size <= LAST:
                size *= growth
                break
        else:
            return points, sampled.cpu_share


def sample(once: Once, agree: Agree, share: float) -> Sampled:
    """Batches of repeats, until one takes most of a share: that one counts."""
    repeats = 1
    while True:
        cpu, marks = time.process_time(), [time.perf_counter()]
        for _ in range(repeats):
            once()
            marks.append(time.perf_counter())
        elapsed = marks[-1] - marks[0]
        sampled = Sampled(agree(_typical(marks)), (time.process_time() - cpu) / elapsed)
        if repeats >= MOST or (repeats >= LEAST and sampled.seconds * repeats >= 0.6 * share):
            return sampled
        repeats = max(LEAST, min(math.ceil(share / sampled.seconds), 4 * repeats, MOST))


def _typical(marks: list[float]) -> float:
    """The median of the means of five batches: a single hiccup leaves no trace, and what happens all the time does."""
    parts = min(5, len(marks) - 1)
    edges = [i * (len(marks) - 1) // parts for i in range(parts + 1)]
    means = [(marks[end] - marks[start]) / (end - start) for start, end in pairwise(edges)]
    return statistics.median(means)


def _links(
    wire: Wire, hosts: tuple[int, ...], device: torch.device, seconds: float, bound: Curve
) -> dict[tuple[int, int], Link]:
    """Every rank learns what the lower rank of each pair measured: the others add zeros to it."""
    rounds = _rounds(hosts)
    pairs = [pair for pairs in rounds for pair in pairs]
    table = torch.zeros(len(pairs), 1 + 2 * POINTS, dtype=torch.float64, device=device)
    for round_ in rounds:
        for pair, (low, high) in round_.items():
            if wire.rank in (low, high):
                with _during(f"the link between ranks {low} and {high}"):
                    row = _measure_link(wire, high if wire.rank == low else low, device, seconds / len(rounds), bound)
                if wire.rank == low:
                    table[pairs.index(pair), : len(row)] = torch.tensor(row, dtype=torch.float64)
    with _during("the links of other ranks"):
        rows = wire.all_reduce(table).tolist()
    links = {}
    for pair, (latency, *flat) in zip(pairs, rows, strict=True):
        samples = zip(flat[::2], flat[1::2], strict=True)
        links[pair] = Link(latency, Curve.fit((size, seconds) for size, seconds in samples if size))
    return dict(sorted(links.items()))


def _measure_link(wire: Wire, peer: int, device: torch.device, seconds: float, bound: Curve) -> list[float]:
    """Latency, and size and seconds of each point."""

    def exchange(size: int) -> Once:
        sent = torch.zeros(size, dtype=torch.uint8, device=device)
        received = torch.empty_like(sent)
        return lambda: wire.exchange_with(peer, received, sent)

    def agree(value: float) -> float:
        theirs = _scalar(0.0, device)
        wire.exchange_with(peer, theirs, _scalar(value, device))
        return max(value, float(theirs))

    ping, times = exchange(1), []
    for _ in range(PINGS):
        start = time.perf_counter()
        ping()
        times.append(time.perf_counter() - start)
    latency = agree(statistics.median(times))
    exchange(BURST)()
    points, _ = climb(exchange, agree, seconds, STEP * FIRST, bound)
    return [latency, *(value for point in points for value in point)]


def _rounds(hosts: tuple[int, ...]) -> list[dict[tuple[int, int], tuple[int, int]]]:
    """Pairs of hosts, and the lowest ranks of both; each host at most once a round (the circle method)."""
    count = max(hosts) + 1
    if count == 1:
        return [{(0, 0): (0, 1)}]
    chosen: list[int | None] = [i * count // min(count, HOSTS) for i in range(min(count, HOSTS))]
    if len(chosen) % 2:
        chosen.append(None)  # whoever meets it has a pause
    rounds = []
    for _ in range(len(chosen) - 1):
        pairs = {}
        for one, other in zip(chosen, reversed(chosen[len(chosen) // 2 :]), strict=False):
            if one is not None and other is not None:
                low, high = sorted((one, other))
                pairs[low, high] = (hosts.index(low), hosts.index(high))
        rounds.append(pairs)
        chosen.insert(1, chosen.pop())
    return rounds


def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device=device)


def void(_: object) -> None:
    """Drops a result."""


@contextmanager
def _during(what: str) -> Iterator[None]:
    try:
        yield
    except WireError as error:
        raise WireError(f"the probe of the network failed during {what}: {error}") from error
