"""Small models in torch's DDP, trained for a few steps on every rank of the default group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt

SMALL_BUCKETS = 0.003  # MB: several buckets in `MLP`
INPUTS, CLASSES = 13, 7


class MLP(nn.Sequential):
    """Layers of odd sizes, so that hardly anything is divisible by anything."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__(
            nn.Linear(INPUTS, 67), nn.Tanh(), nn.Linear(67, 131), nn.LayerNorm(131), nn.Tanh(), nn.Linear(131, CLASSES)
        )


def batch(rank: int, step: int, size: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and classes that can be learned, others for each rank and step."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, INPUTS, generator=numbers)
    return inputs.to(dtype), inputs[:, :CLASSES].argmax(1)


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The loss of one batch."""
    inputs, classes = batch(rank, step, dtype=dtype)
    return nn.functional.cross_entropy(model(inputs).float(), classes)


@contextmanager
def attached(model: DDP, *args: Any, **kwargs: Any) -> Iterator[commopt.Handle]:
    """`commopt.attach`, and its end."""
    handle = commopt.attach(model, *args, timeout=20, **kwargs)
    try:
        yield handle
    finally:
        handle.close()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, dtype: torch.dtype = torch.float32
) -> float:
    """Plain steps; returns the last loss."""
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step, dtype)
        loss.backward()
        optimizer.step()
    return loss.item()


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(ones) == len(others) and all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
