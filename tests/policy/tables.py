"""Made-up tables: networks of a latency and a bandwidth, codecs of a rate, steps of training."""

from collections.abc import Iterable

import torch

from commopt.compressors import Compressor
from commopt.network.curve import Curve
from commopt.network.machine import Codec, Machine
from commopt.network.table import Link, Network
from commopt.plan import Plan, TensorClass
from commopt.policy.choice import allowed
from commopt.policy.cost import Ready, Workload

SIZES = tuple(4.0**exponent for exponent in range(3, 15))  # 64 bytes to 256 MiB
EVERYTHING = (Plan.uncompressed().compressor, *allowed("aggressive"))


def network(bandwidth: float, latency: float = 1e-4, world: int = 2, cpu_share: float = 0.0) -> Network:
    """A host a rank; ``bandwidth`` in bytes/s each way, ``latency`` in seconds of each collective."""
    shares = {"all_reduce": 2 * (world - 1) / world, "all_gather": world - 1.0, "all_to_all": (world - 1) / world}
    curves = {
        op: Curve(tuple((size, latency + share * size / bandwidth) for size in SIZES)) for op, share in shares.items()
    }
    link = Link(latency, Curve(tuple((size, size / bandwidth) for size in SIZES)))
    return Network(tuple(range(world)), {(0, 1): link}, curves, cpu_share, 32_000)


def machine(rate: float = 1e9, steal: float = 0.0, compressors: Iterable[Compressor] = EVERYTHING) -> Machine:
    """``rate`` in elements/s of each codec, one way."""
    curve = Curve(tuple((size, size / rate) for size in SIZES))
    return Machine({repr(compressor): Codec(curve, curve) for compressor in compressors}, steal)


def workload(
    buckets: int,
    shape: tuple[int, ...],
    backward: float = 0.1,
    tail: float = 0.05,
    kind: TensorClass = "matrix",
    tensors: int = 1,
) -> Workload:
    """Buckets of ``tensors`` gradients of ``shape`` in float32, ready evenly over ``backward`` seconds."""
    ready = []
    for index in range(buckets):
        names = tuple(f"p{index}.{each}" for each in range(tensors))
        ready.append(Ready(backward * (index + 1) / buckets, names, (torch.Size(shape),) * tensors, torch.float32))
    return Workload(tuple(ready), tail, {name: kind for part in ready for name in part.names})
