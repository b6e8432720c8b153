"""Training with Fabric, and the same loop on bare torch, inside the living workers."""

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commopt
import lightning_commopt  # noqa: F401  (registers)
from commopt.config import BUCKET_CAP_MB
from tests.lightning.fits import Batches, flat, rank_of_the_group

PACKAGES = ["lightning.fabric", "lightning_fabric"]


@dataclass(frozen=True)
class Run:
    """What one rank tells of a training: a loss a batch, the parameters after the last, and the exchange's totals."""

    losses: list[float]
    parameters: Tensor
    stats: commopt.Stats


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def make_fabric(world: int, strategy: Any, package: str = "lightning.fabric", **kwargs: Any) -> Any:
    """A Fabric on the ranks of the group that is there; call it where `rank_of_the_group` holds."""
    fabric = import_module(package).Fabric(accelerator="cpu", devices=1, num_nodes=world, strategy=strategy, **kwargs)
    fabric.launch()
    return fabric


def train(fabric: Any, model: Any, optimizer: Any, batches: list[Any], accumulate: int = 1) -> list[float]:
    """The user's loop. Returns the losses."""
    losses = []
    for index, (inputs, targets) in enumerate(batches):
        waits = (index + 1) % accumulate > 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = F.mse_loss(model(inputs), targets)
            fabric.backward(loss)
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_fabric(
    rank: int, world: int, strategy: Any, package: str = "lightning.fabric", count: int = 6, accumulate: int = 1
) -> Run:
    with rank_of_the_group(rank):
        fabric = make_fabric(world, strategy, package)
        model, optimizer = fabric.setup(module := network(), sgd(module))
        losses = train(fabric, model, optimizer, Batches(rank, count).batches, accumulate)
        fabric.strategy.teardown()
    return Run(losses, flat(module), fabric.strategy.handle.stats())


def run_torch(rank: int, world: int, compressor: str, count: int = 6, accumulate: int = 1) -> Run:
    """As `run_fabric`, without Fabric."""
    model = DistributedDataParallel(module := network(), bucket_cap_mb=BUCKET_CAP_MB)
    handle = commopt.attach(model, compressor)
    optimizer, losses = sgd(module), []
    for index, (inputs, targets) in enumerate(Batches(rank, count).batches):
        waits = (index + 1) % accumulate > 0
        with model.no_sync() if waits else nullcontext():
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    handle.close()
    return Run(losses, flat(module), handle.stats())
