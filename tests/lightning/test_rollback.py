"""A fit that compression spoils goes back, and ends with the bits of one that was never compressed."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from commopt import CommOptWarning
from commopt.records import Event
from lightning_commopt import CommOptDDPStrategy, DivergenceGuard
from tests.lightning.fits import Batch, Regression, flat, make_trainer, rank_of_the_group
from tests.workers import Workers

SPOILED: dict[str, Any] = {"compressor": "topk", "density": 0.01, "error_feedback": False}
UNCOMPRESSED: dict[str, Any] = {"compressor": "none"}
FOUND = 100  # two windows of fidelity


class Points(Dataset[Batch]):
    """What a linear model has made."""

    def __init__(self, count: int) -> None:
        numbers = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 16, generator=numbers)
        self.outputs = self.inputs @ torch.randn(16, 4, generator=numbers)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.outputs[index]


class Stream(IterableDataset[Batch]):
    """The same without an index."""

    def __init__(self, count: int) -> None:
        self.points = Points(count)

    def __iter__(self) -> Iterator[Batch]:
        return iter([self.points[index] for index in range(len(self.points))])


class Scheduled(Regression):
    """Has all that a roll-back has to restore."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.Dropout(0.2), nn.Linear(256, 4))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 25, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Scheduled):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()


class Seen(pl.Callback):
    """Which batches of which epoch were trained on, and the loss."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.current_epoch, batch_idx))


@dataclass(frozen=True)
class Outcome:
    weights: Tensor
    seen: list[tuple[int, int]]
    steps: int
    epoch: int
    lr: float
    events: list[Event]
    warned: list[str]


def train(
    rank: int,
    world: int,
    strategy: dict[str, Any],
    model: type[Regression] = Scheduled,
    batches: int = 110,
    data: type[Points | Stream] = Points,
    folder: Path | None = None,
    **kwargs: Any,
) -> Outcome:
    seen, callbacks = Seen(), list[pl.Callback]()
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=20, save_top_k=-1))
    guard = DivergenceGuard(min_agreement=0.95, cool_down=1000)
    with rank_of_the_group(rank), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        trainer = make_trainer(
            world,
            CommOptDDPStrategy(**strategy),
            callbacks=[*callbacks, seen, guard],
            enable_checkpointing=folder is not None,
            num_sanity_val_steps=0,
            **kwargs,
        )
        module = model()
        made = data(batches * 8 * world)
        loader = DataLoader(made, batch_size=8, shuffle=isinstance(made, Points))
        trainer.fit(module, loader, DataLoader(Points(32), batch_size=8))
        return Outcome(
            flat(module),
            seen.batches,
            trainer.global_step,
            trainer.current_epoch,
            trainer.optimizers[0].param_groups[0]["lr"],
            list(trainer.strategy.supervisor.monitor.summary().events),
            [str(warning.message) for warning in caught],
        )


def assert_replayed(spoiled: list[Outcome], plain: list[Outcome], found: int = FOUND) -> None:
    for mine, theirs in zip(spoiled, plain, strict=True):
        assert [event.action for event in mine.events] == ["roll_back"]
        assert mine.seen[found:] == theirs.seen
        assert (mine.steps, mine.epoch, mine.lr) == (theirs.steps, theirs.epoch, theirs.lr)
        assert torch.equal(mine.weights, theirs.weights)
        assert len(mine.warned) == 1


@pytest.mark.parametrize("model", [Scheduled, Manual])
def test_it_goes_back_to_the_start(workers: Workers, model: type[Regression]) -> None:
    spoiled, plain = (workers.run(train, strategy=strategy, model=model) for strategy in (SPOILED, UNCOMPRESSED))
    assert_replayed(spoiled, plain)


def test_it_goes_back_over_epochs_validations_and_checkpoints(workers: Workers, tmp_path: Path) -> None:
    how: dict[str, Any] = {"batches": 40, "max_epochs": 3, "val_check_interval": 15}
    spoiled = workers.run(train, strategy=SPOILED, folder=tmp_path, **how)
    assert_replayed(spoiled, workers.run(train, strategy=UNCOMPRESSED, **how))
    saved = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob("*.ckpt")}
    again = {f"step={step}-v1" for step in (20, 40, 60, 80)}  # the first ones stay where they are
    assert saved.keys() == {f"step={step}" for step in range(0, 121, 20)} | again
    assert all(f"step={each['global_step']}" == name.removesuffix("-v1") for name, each in saved.items())


def test_accumulated_steps_are_replayed_with_all_their_batches(workers: Workers) -> None:
    how: dict[str, Any] = {"batches": 105, "max_epochs": 2, "accumulate_grad_batches": 2}
    spoiled, plain = (workers.run(train, strategy=strategy, **how) for strategy in (SPOILED, UNCOMPRESSED))
    assert plain[0].steps == 106  # the last batch of an epoch makes a step of its own
    assert_replayed(spoiled, plain, found=105 + 94)


def test_a_stream_goes_on_and_that_is_said(workers: Workers) -> None:
    for outcome in workers.run(train, strategy=SPOILED, data=Stream):
        assert [event.action for event in outcome.events] == ["note", "roll_back"]
        assert any("goes on with those that come: the data are no map-style" in text for text in outcome.warned)
        assert outcome.seen == [(0, batch) for batch in range(110 * 2)]  # every rank draws the whole stream
        assert outcome.steps == 110 * 2 - FOUND
