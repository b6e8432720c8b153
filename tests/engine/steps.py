"""Steps of an engine without a trainer: buckets of named gradients, on every rank of the default group."""

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from commopt.engine import Engine
from commopt.messages import Bucket
from commopt.plan import Plan, TensorClass

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def make_engine(
    plan: Plan,
    shapes: dict[str, tuple[int, ...]],
    loss_scale: Callable[[], float] | None = None,
    classes: Mapping[str, TensorClass] | None = None,
) -> Engine:
    """An engine over a group of its own, as the DDP hook makes it."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier()  # a rank that is done at once must not leave while others still connect
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    return Engine(plan, sizes, CPU, group, loss_scale, classes=classes)


def exchange(
    engine: Engine,
    gradients: Tensors,
    buckets: Iterable[Iterable[str]] | None = None,
    idle: frozenset[str] = frozenset(),
) -> tuple[Tensors, bool]:
    """One step: the mean gradients by name, and whether they may be used. One bucket a gradient, unless told."""
    parts = [list(names) for names in buckets or [[name] for name in gradients]]
    futures: list[Future[Tensor]] = []
    delivered: Tensors = {}
    for index, names in enumerate(parts):
        buffer = torch.cat([gradients[name].flatten() for name in names])
        split = buffer.split([gradients[name].numel() for name in names])
        views = [part.view(gradients[name].shape) for name, part in zip(names, split, strict=True)]
        delivered.update(zip(names, views, strict=True))
        last = index == len(parts) - 1
        futures.append(engine.submit(Bucket(index, names, buffer, views, idle & set(names), last)))
    for future in futures:
        future.wait()
    return delivered, engine.finish_step()


def gradients(rank: int, step: int, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """What a rank sees at a step: a direction that all share, and noise."""
    numels = [math.prod(shape) for shape in shapes.values()]
    common = torch.randn(sum(numels), generator=torch.Generator().manual_seed(1))
    noise = torch.randn(sum(numels), generator=torch.Generator().manual_seed(1000 * (step + 2) + rank))
    parts = (common + noise).split(numels)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def summed(tensor: Tensor) -> Tensor:
    """The sum over ranks, in float64."""
    total = tensor.double()
    dist.all_reduce(total)
    return total


def same_on_all_ranks(tensors: Iterable[Tensor]) -> bool:
    """Bit for bit."""
    flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(every[0], other) for other in every)
