"""What a fit tells of its communication, and how callbacks tune that."""

import contextlib
import copy
import csv
import io
import json
import pickle  # noqa: TID251  (of a strategy, as launchers do it; nothing from outside)
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

import lightning_commopt.lightning
import lightning_commopt.pytorch_lightning
from commopt import CommOptWarning, ConfigError
from commopt.records import StepRecord
from lightning_commopt import CommMonitor, CommOptDDPStrategy, DivergenceGuard
from tests.lightning.fits import Batch, Batches, Regression, make_trainer, rank_of_the_group
from tests.lightning.test_training import Line
from tests.workers import Workers

LOGGED = {
    "ratio",
    "exposed_share",
    "compression_ratio",
    "throughput",
    "step_seconds",
    "exposed_seconds",
    "wire_seconds",
}
LOGGED |= {"codec_seconds", "bytes_sent", "events", "roll_backs"}


class Validated(Regression):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Records(pl.Callback):
    """The record of each batch, and the loss as the user sees it."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)  # Lightning has divided it
        strategy = trainer.strategy
        assert isinstance(strategy, CommOptDDPStrategy)
        assert strategy.supervisor is not None
        record = strategy.supervisor.engine.record
        if record is not None and record not in self.records:
            self.records.append(record)


def fit(rank: int, world: int, model: type[Any] = Validated, count: int = 12, **kwargs: Any) -> Any:
    with rank_of_the_group(rank):
        trainer = make_trainer(world, kwargs.pop("strategy", "commopt_ddp"), **kwargs)
        trainer.fit(model(), Batches(rank, count), Batches(rank, 2))
        return trainer


# ---------------------------------------------------------------------------------------------------------- callbacks


def kinds(rank: int, world: int, given: list[Any], folder: Path) -> list[list[str]]:
    seen = []
    kept = ModelCheckpoint(folder)
    with rank_of_the_group(rank):
        trainer = make_trainer(world, "commopt_ddp", callbacks=[kept, *given], enable_checkpointing=True, max_epochs=0)
        for _ in range(2):
            trainer.fit_loop.max_epochs += 1
            trainer.fit(Regression(), Batches(rank, 2))
            assert isinstance(trainer.callbacks[-1], Checkpoint)
            seen.append([type(callback).__name__ for callback in trainer.callbacks])
    return seen


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
def test_callbacks_that_the_user_did_not_give_are_there_once(workers: Workers, tmp_path: Path) -> None:
    order = ["CommMonitor", "DivergenceGuard", "EarlyStopping", "ModelCheckpoint"]
    given = [EarlyStopping("commopt/ratio", check_on_train_epoch_end=False), DivergenceGuard(sigma=8)]
    for name, callbacks in (("few", given[:1]), ("all", given)):
        assert workers.run(kinds, world=1, given=callbacks, folder=tmp_path / name) == [[order] * 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DivergenceGuard(sigmas=8), "did you mean 'sigma'"),
        (lambda: DivergenceGuard(snapshots_every=8), "argument of DivergenceGuard: .*did you mean 'snapshot_every'"),
        (lambda: DivergenceGuard(sigma=0), "sigma must be"),
        (lambda: DivergenceGuard(snapshot_every=0), "snapshot_every must be"),
        (lambda: DivergenceGuard(keep=0), "keep must be"),
        (lambda: DivergenceGuard(memory_gb=-1), "memory_gb must be"),
        (lambda: CommMonitor(every=0), "every must be at least 1"),
        (lambda: CommMonitor(threshold=2), "threshold must be"),
        (lambda: CommMonitor(gpu_hour_price=-1), "gpu_hour_price must be"),
    ],
)
def test_a_wrong_option_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def listen(rank: int, world: int, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        fit(rank, world, **kwargs)
    return [str(warning.message) for warning in caught]


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
def test_with_another_strategy_they_say_so_and_do_nothing(workers: Workers) -> None:
    (said,) = workers.run(listen, world=1, strategy="auto", callbacks=[CommMonitor(), DivergenceGuard()])
    assert said == [
        f"{name} does nothing with SingleDeviceStrategy: it needs Trainer(strategy='commopt_ddp')."
        for name in ("CommMonitor", "DivergenceGuard")
    ]


@pytest.mark.parametrize("package", [lightning_commopt.lightning, lightning_commopt.pytorch_lightning])
def test_help_lists_the_arguments(package: Any) -> None:
    assert "gpu_hour_price: of one GPU" in package.CommMonitor.__doc__
    assert "snapshot_every: steps between" in package.DivergenceGuard.__doc__


def in_the_other_package(rank: int, world: int) -> list[str]:
    ours = lightning_commopt.pytorch_lightning
    with rank_of_the_group(rank):
        trainer = make_trainer(world, "commopt_ddp", pytorch_lightning, callbacks=[ours.CommMonitor(every=2)])
        trainer.fit(Line(), Batches(rank, 4))
        assert type(trainer.callbacks[1]) is ours.DivergenceGuard
        return sorted(trainer.logged_metrics)


def test_the_other_package_logs_too(workers: Workers) -> None:
    assert workers.run(in_the_other_package) == [sorted(f"commopt/{name}" for name in LOGGED)] * 2


# ------------------------------------------------------------------------------------------------------------- figures


def logged(rank: int, world: int, folder: Path) -> tuple[Any, str]:
    said = io.StringIO()
    callbacks = [CommMonitor(gpu_hour_price=2.0, summary=True)]
    with contextlib.redirect_stdout(said):
        logger = CSVLogger(folder)
        trainer = fit(
            rank,
            world,
            callbacks=callbacks,
            logger=logger,
            log_every_n_steps=4,
            val_check_interval=6,
            strategy="commopt_ddp_int8",
        )
    assert trainer.strategy.supervisor.guard.state_dict()["anchor"] == []  # compressed all the time
    assert trainer.progress_bar_metrics.keys() == {"comm/comp", "saving"}
    assert not {"comm/comp", "saving"} & trainer.logged_metrics.keys()
    return dict(trainer.logged_metrics), said.getvalue()


def test_figures_reach_loggers_and_files_and_a_table(workers: Workers, tmp_path: Path) -> None:
    (metrics, table), (others, nothing) = workers.run(logged, folder=tmp_path)
    names = {f"commopt/{name}" for name in LOGGED}
    assert names <= metrics.keys()
    assert all(metrics[name] == others[name] for name in names)  # of all ranks
    assert "Communication" in table
    assert "int8" in table
    assert not nothing

    folder = tmp_path / "lightning_logs" / "version_0"
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["commopt/ratio"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11]
    assert all(3 < float(row["commopt/compression_ratio"]) < 4 and float(row["commopt/events"]) == 0 for row in rows)
    lines = [json.loads(line) for line in (folder / "commopt.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "window", "window", "window", "summary"]
    assert lines[0]["gpu_hour_price"] == 2.0
    assert "int8" in lines[0]["parameters"]["compressor"].lower()


def records(rank: int, world: int, **kwargs: Any) -> tuple[list[StepRecord], list[float]]:
    told = Records()
    fit(rank, world, callbacks=[told], **kwargs)
    return told.records, told.losses


@pytest.mark.parametrize("parts", [1, 3])
def test_losses_and_samples_are_those_of_the_user(workers: Workers, parts: int) -> None:
    (mine, first), (theirs, second) = workers.run(records, accumulate_grad_batches=parts)
    mean = torch.tensor([first, second], dtype=torch.float64).mean(0).view(-1, parts).mean(1)
    torch.testing.assert_close(torch.tensor([record.loss for record in mine], dtype=torch.float64), mean)
    assert [record.loss for record in mine] == [record.loss for record in theirs]
    assert [record.samples for record in mine] == [8.0 * parts] * (12 // parts)


class ValidatedOnOne(Regression):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("val_loss", self.loss(batch), rank_zero_only=True)


def anchor(rank: int, world: int, model: type[Regression]) -> tuple[list[float], float]:
    trainer = fit(rank, world, model, strategy="commopt_ddp_none")
    return trainer.strategy.supervisor.guard.state_dict()["anchor"], float(trainer.callback_metrics.get("val_loss", 0))


@pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")
def test_the_guard_hears_of_the_validation_loss_where_all_ranks_have_it(workers: Workers) -> None:
    (first, loss), (second, other) = workers.run(anchor, model=Validated)
    assert first == second == [pytest.approx(loss)] == [pytest.approx(other)]
    (first, _), (second, _) = workers.run(anchor, model=ValidatedOnOne)
    assert first == second == []


def scaled(rank: int, world: int) -> tuple[list[StepRecord], list[float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    return records(rank, world, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def test_losses_are_without_the_loss_scale(workers: Workers) -> None:
    (mine, first), (_, second) = workers.run(scaled)
    mean = torch.tensor([first, second]).mean(0)
    torch.testing.assert_close(torch.tensor([record.loss for record in mine]), mean, rtol=1e-3, atol=1e-3)


# ----------------------------------------------------------------------------------------------- all kinds of trainers


def quiet(rank: int, world: int, folder: Path, callbacks: Any, kwargs: dict[str, Any]) -> tuple[list[str], bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        trainer = fit(rank, world, default_root_dir=folder, callbacks=callbacks, **kwargs)
    supervisor = trainer.strategy.supervisor
    assert supervisor.ring is None or supervisor.ring.steps == []
    assert supervisor.handle.judge is None
    return [str(warning.message) for warning in caught], supervisor.guard is None


@pytest.mark.filterwarnings("ignore:You are trying to .self.log:UserWarning")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("written", "directory", "kwargs"),
    [
        (False, False, {}),  # without a logger there is no place of this fit's own
        (True, True, {}),
        (False, True, {"fast_dev_run": True}),
        (False, True, {"barebones": True}),
        (True, True, {"enable_progress_bar": True}),
    ],
)
def test_trainers_of_all_kinds(
    workers: Workers, tmp_path: Path, world: int, written: bool, directory: bool, kwargs: dict[str, Any]
) -> None:
    for json_lines in (False, True):
        callbacks = [CommMonitor(directory=tmp_path if directory else None, json_lines=json_lines)]
        assert workers.run(quiet, world, folder=tmp_path, callbacks=callbacks, kwargs=kwargs) == [([], False)] * world
        assert [path.name for path in tmp_path.iterdir()] == ["commopt.jsonl"] * (written and json_lines)


def test_a_guard_can_be_left_out(workers: Workers, tmp_path: Path) -> None:
    guard = [DivergenceGuard(enabled=False)]
    assert workers.run(quiet, folder=tmp_path, callbacks=guard, kwargs={}) == [([], True)] * 2


def evaluate(rank: int, world: int) -> bool:
    with rank_of_the_group(rank):
        trainer = make_trainer(world, "commopt_ddp")
        trainer.validate(Validated(), Batches(rank, 2), verbose=False)
        return trainer.strategy.supervisor is None and not trainer.callbacks


def test_validation_alone_needs_no_watch(workers: Workers) -> None:
    assert workers.run(evaluate, world=2) == [True, True]


def fit_and_evaluate(rank: int, world: int) -> list[int]:
    trainer = fit(rank, world, strategy="commopt_ddp_none")
    with rank_of_the_group(rank):
        trainer.validate(Validated(), Batches(rank, 2), verbose=False)
        trainer.fit_loop.max_epochs += 1
        trainer.fit(Validated(), Batches(rank, 2), Batches(rank, 2))
    return [trainer.strategy.supervisor.engine.step, len(trainer.callbacks)]


def test_validation_after_a_fit_is_not_the_guards_business(workers: Workers) -> None:
    assert workers.run(fit_and_evaluate, world=2) == [[1, 2]] * 2


def copies(rank: int, world: int) -> list[tuple[str, bool]]:
    strategy = fit(rank, world, strategy=CommOptDDPStrategy("topk", density=0.05)).strategy
    made = [copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))]  # noqa: S301
    assert strategy.handle is not None
    return [(other.config.compressor, other.handle is None and other.supervisor is None) for other in made]


def test_a_strategy_is_copied_without_its_exchange(workers: Workers) -> None:
    assert workers.run(copies) == [[("topk", True)] * 2] * 2
