"""What compression costs on the devices of this job: the rates of codecs, and what they take from the main thread."""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.collectives.wire import Wire
from commopt.compressors import Compressor, RoundsCompressor, RowCompressor, create
from commopt.errors import ConfigError
from commopt.layout import Layout
from commopt.network.curve import Curve, number

SIZES = (1 << 16, 1 << 20)  # elements
TIMED, WINDOW = 0.015, 0.005  # seconds that one codec is timed for, at each size and each way, and of a part of it
STEAL_TIMED = 0.06  # seconds for each part of `steal`
LEAST = 1e-9  # seconds: a clock that did not move between two calls


@dataclass(frozen=True)
class Codec:
    """Elements -> seconds on the slowest rank, while all ranks do the same."""

    encode: Curve
    decode: Curve


@dataclass(frozen=True)
class Machine:
    """What was measured of the devices.

    Args:
        codecs: by ``repr`` of the compressor.
        steal: seconds that the main thread's compute loses to a second of codec on another thread: 0 where codecs have
            a core of their own, 1 where they share one, more where they get into each other's way.
    """

    codecs: Mapping[str, Codec]
    steal: float

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        codecs = {
            name: {"encode": codec.encode.to_plain(), "decode": codec.decode.to_plain()}
            for name, codec in self.codecs.items()
        }
        return {"codecs": codecs, "steal": self.steal}

    @classmethod
    def from_plain(cls, plain: Any) -> "Machine":
        """The inverse of `to_plain`; raises ``ConfigError`` for anything else."""
        try:
            codecs = {
                str(name): Codec(Curve.from_plain(codec["encode"]), Curve.from_plain(codec["decode"]))
                for name, codec in plain["codecs"].items()
            }
            return cls(codecs, number(plain["steal"]))
        except (TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"these plain values are no machine: {type(error).__name__}: {error}.") from error


def measure_codecs(compressors: Iterable[Compressor], device: torch.device, wire: Wire) -> Machine:
    """Times each compressor on ``device``, some 60 ms each. Call it alike on every rank: all measure at the same time.

    Times are those of several calls and no minima: where ranks share cores, waiting for a turn is a part of it.

    Raises:
        WireError: a peer ended or stalled.
    """
    compressors = list(dict.fromkeys(compressors))
    with torch.no_grad():
        timed = [[_time(compressor, size, device) for size in SIZES] for compressor in compressors]
        steal = _measure_steal(device, wire)
    # Sizes are the same on all ranks, and travel along only because a maximum leaves them as they are.
    flat = torch.tensor([*(value for rows in timed for row in rows for value in row), steal], dtype=torch.float64)
    *values, steal = wire.all_reduce(flat.to(device), dist.ReduceOp.MAX).tolist()
    codecs, each = {}, iter(values)
    for compressor in compressors:
        rows = [(next(each), next(each), next(each)) for _ in SIZES]
        encode, decode = ([(row[0], row[way]) for row in rows] for way in (1, 2))
        codecs[repr(compressor)] = Codec(Curve.fit(encode), Curve.fit(decode))
    return Machine(codecs, steal)


def _time(compressor: Compressor, size: int, device: torch.device) -> tuple[float, float, float]:
    """Elements, and the seconds to encode and to decode them."""
    if isinstance(compressor, RoundsCompressor):
        return _time_rounds(compressor, size, device)
    assert isinstance(compressor, RowCompressor)
    rows = torch.randn(max(1, size // compressor.block), compressor.block, device=device)
    payload = torch.zeros(len(rows), compressor.width, dtype=compressor.payload_dtype, device=device)
    out = torch.zeros_like(rows)
    encode = _typical(lambda: compressor.encode(rows, payload, 0), device)
    return rows.numel(), encode, _typical(lambda: compressor.add_decoded(payload, out, 0), device)


def _time_rounds(compressor: RoundsCompressor, size: int, device: torch.device) -> tuple[float, float, float]:
    """Of a square matrix. All up to the last round counts as encoding, the rest as decoding."""
    side = int(size**0.5)
    layout = Layout(["matrix"], [torch.Size((side, side))], 1)
    source = torch.randn(layout.rows, 1, device=device)
    x, out, warm = source.clone(), torch.empty_like(source), dict[str, Tensor]()
    sent = [0.0]
    spent: list[tuple[float, float]] = []

    def send(payload: Tensor) -> Tensor:
        sent[0] = _now(device)
        return payload

    def step() -> None:
        x.copy_(source)
        start = _now(device)
        compressor.reduce(x, out, layout, warm, 0, send)
        spent.append((sent[0] - start, _now(device) - sent[0]))

    _typical(step, device)
    encode, decode = (statistics.median(part[way] for part in spent[1:]) for way in (0, 1))  # the first one warmed up
    return layout.numel, max(encode, LEAST), max(decode, LEAST)


def _typical(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, after one that warms up: the median of the means of a few windows."""
    work()
    start = began = _now(device)
    means, calls = [], 0
    while True:
        work()
        calls += 1
        now = _now(device)
        if now - began >= WINDOW:
            means.append((now - began) / calls)
            began, calls = now, 0
            if now - start >= TIMED:
                return statistics.median(means)


def _measure_steal(device: torch.device, wire: Wire) -> float:
    """Lost seconds of products of matrices by seconds of int8 encoding on another thread; both by what they take
    alone."""
    matrix = torch.randn(256, 256, device=device)
    product = torch.empty_like(matrix)
    codec = create("int8")
    assert isinstance(codec, RowCompressor)
    rows = torch.randn(SIZES[0] // codec.block, codec.block, device=device)
    payload = torch.empty(len(rows), codec.width, dtype=codec.payload_dtype, device=device)

    def compute() -> None:
        torch.mm(matrix, matrix, out=product)

    def encode() -> None:
        codec.encode(rows, payload, 0)

    def together() -> None:  # all ranks at the same time
        wire.all_reduce(torch.zeros(1, device=device))

    together()
    alone = _rate(compute, device)
    together()
    encode_alone = _rate(encode, device)
    together()
    encoded = [0]
    done = threading.Event()

    def encode_on() -> None:
        with _on_a_stream(device), torch.no_grad():
            while not done.is_set():
                encode()
                _settle(device)
                encoded[0] += 1

    thread = threading.Thread(target=encode_on)
    thread.start()
    before = encoded[0]
    start = _now(device)
    beside = _rate(compute, device)
    elapsed, during = _now(device) - start, encoded[0] - before
    done.set()
    thread.join()
    codec_seconds = max(during, 1) / encode_alone
    return min(max((1 - beside / alone) * elapsed / codec_seconds, 0.0), 2.0)


def _rate(work: Callable[[], object], device: torch.device) -> float:
    """Calls a second."""
    work()
    start, calls = _now(device), 0
    while (elapsed := _now(device) - start) < STEAL_TIMED:
        work()
        calls += 1
    return calls / elapsed


def _now(device: torch.device) -> float:
    _settle(device)
    return time.perf_counter()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@contextmanager
def _on_a_stream(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    else:
        yield
