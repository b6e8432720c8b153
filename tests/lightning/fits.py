"""Fits that run inside the living workers: a Trainer on each rank, over the process group that is there already."""

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from commopt import CommOptWarning, Handle, Stats
from lightning_commopt import CommOptDDPStrategy

Batch = tuple[Tensor, Tensor]
SCRATCH = tempfile.TemporaryDirectory()  # of this process, for what trainers write that nobody reads


class Batches:
    """A regression that can be learned; every rank sees other inputs. (Lightning takes a list for several loaders.)"""

    def __init__(self, rank: int, count: int, size: int = 8) -> None:
        truth = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
        numbers = torch.Generator().manual_seed(100 + rank)
        inputs = [torch.randn(size, 16, generator=numbers) for _ in range(count)]
        self.batches: list[Batch] = [(x, x @ truth) for x in inputs]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Regression(pl.LightningModule):
    """Two layers, of which the first is large enough for every compressor to have something to do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4))

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 0.01, momentum=0.9)


@dataclass(frozen=True)
class Fit:
    """What one rank tells of a fit.

    Args:
        parameters: all of them, flat float32, after every batch.
        losses: one a batch, of this rank.
        stats: totals of the exchange after every batch; empty where the strategy is Lightning's.
        steps: optimizer steps.
    """

    parameters: list[Tensor]
    losses: list[float]
    stats: list[Stats]
    steps: int


class Ledger(pl.Callback):
    """Writes down what happens, batch by batch."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.losses: list[float] = []
        self.stats: list[Stats] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.parameters.append(flat(module))
        if outputs:
            self.losses.append(float(outputs["loss"]))
        if isinstance(trainer.strategy, CommOptDDPStrategy):
            self.stats.append(handle_of(trainer).stats())


def flat(module: nn.Module) -> Tensor:
    """A copy of all parameters, ``[numel]`` float32."""
    return torch.cat([p.detach().flatten().float() for p in module.parameters()])


def handle_of(trainer: pl.Trainer) -> Handle:
    """The handle of a trainer that uses our strategy and has trained."""
    assert isinstance(trainer.strategy, CommOptDDPStrategy)
    assert trainer.strategy.handle is not None
    return trainer.strategy.handle


@contextmanager
def rank_of_the_group(rank: int) -> Iterator[None]:
    """Lightning's own way to say that the processes are there already: every rank is a node with one device."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "NODE_RANK": str(rank)}):
        yield


def make_trainer(world: int, strategy: Any, package: Any = pl, **kwargs: Any) -> Any:
    """A Trainer on ``world`` ranks without decoration, of ``lightning.pytorch`` or of ``package``."""
    plain = {
        "default_root_dir": SCRATCH.name,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    where = {"accelerator": "cpu", "devices": 1, "num_nodes": world, "max_epochs": 1}
    return package.Trainer(strategy=strategy, **(plain | where | kwargs))


def fit(
    rank: int,
    world: int,
    strategy: str | dict[str, Any],
    model: type[pl.LightningModule] = Regression,
    count: int = 4,
    callbacks: Sequence[pl.Callback] = (),
    **kwargs: Any,
) -> Fit:
    """Trains a new ``model`` for ``count`` batches.

    Args:
        strategy: a registered name, or the arguments of our strategy, or of Lightning's where ``"ddp"`` is among them.
        kwargs: for the Trainer.
    """
    if isinstance(strategy, dict):
        arguments = {key: value for key, value in strategy.items() if key != "ddp"}
        made: Any = DDPStrategy(**arguments) if "ddp" in strategy else CommOptDDPStrategy(**arguments)
    else:
        made = strategy
    with rank_of_the_group(rank):
        ledger = Ledger()
        trainer = make_trainer(world, made, callbacks=[*callbacks, ledger], **kwargs)
        trainer.fit(model(), Batches(rank, count))
    return Fit(ledger.parameters, ledger.losses, ledger.stats, trainer.global_step)


def fit_and_listen(rank: int, world: int, **kwargs: Any) -> tuple[Fit, list[str]]:
    """`fit`, and what commopt warned of on this rank. (``pytest.warns`` would raise what the filters ignore.)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        result = fit(rank, world, **kwargs)
    return result, [str(warning.message) for warning in caught]


def assert_ranks_equal(fits: list[Fit]) -> None:
    """All ranks held the same finite bits after every batch, and learned something."""
    assert_same_bits(fits[1:], fits[:1] * (len(fits) - 1))
    parameters = fits[0].parameters
    assert all(torch.isfinite(after).all() for after in parameters)
    assert not torch.equal(parameters[0], parameters[-1])


def assert_same_bits(fits: list[Fit], others: list[Fit]) -> None:
    """Rank by rank, two fits held the same bits after every batch."""
    for mine, theirs in zip(fits, others, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine.parameters, theirs.parameters, strict=True))
