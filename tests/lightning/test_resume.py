"""A fit that goes on from a checkpoint has the bits of one that was never interrupted."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_commopt.pytorch_lightning
from commopt import CommOptWarning
from commopt.compressors import available
from commopt.errors import CheckpointError
from lightning_commopt import CommOptDDPStrategy
from tests.lightning.fits import Batches, Regression, flat, handle_of, make_trainer, rank_of_the_group
from tests.lightning.test_rollback import Points
from tests.lightning.test_training import Line
from tests.workers import Workers

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # a resumed fit saves elsewhere

OPTIONS: dict[str, dict[str, Any]] = {"topk": {"density": 0.05}, "randomk": {"density": 0.05}, "powersgd": {"rank": 2}}
TOPK: dict[str, Any] = {"compressor": "topk", "density": 0.05}


def train(
    world: int, folder: Path, strategy: dict[str, Any], epochs: int, ckpt_path: Path | None = None, **kwargs: Any
) -> tuple[pl.Trainer, Tensor]:
    """Fits for ``epochs`` of 6 batches, with a checkpoint at the end of each. The trainer, and the weights."""
    keep = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = make_trainer(
        world, CommOptDDPStrategy(**strategy), callbacks=[keep], enable_checkpointing=True, max_epochs=epochs, **kwargs
    )
    model = Regression()
    trainer.fit(model, DataLoader(Points(6 * 8 * world), batch_size=8, shuffle=True), ckpt_path=ckpt_path)
    return trainer, flat(model)


def listen(world: int, **kwargs: Any) -> tuple[Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        _, weights = train(world, **kwargs)
    return weights, [str(warning.message) for warning in caught]


def resume_each(rank: int, world: int, folder: Path, names: list[str]) -> dict[str, bool]:
    same = {}
    with rank_of_the_group(rank):
        for name in names:
            here, strategy = folder / name, {"compressor": name, **OPTIONS.get(name, {})}
            _, whole = train(world, here, strategy, epochs=2)
            _, resumed = train(world, here / "resumed", strategy, epochs=2, ckpt_path=here / "epoch=0.ckpt")
            same[name] = torch.equal(whole, resumed)
    return same


@pytest.mark.parametrize(("world", "names"), [(2, available()), (3, ["int8", "topk", "powersgd"])])
def test_every_compressor_goes_on_with_the_same_bits(
    workers: Workers, tmp_path: Path, world: int, names: list[str]
) -> None:
    for same in workers.run(resume_each, world, folder=tmp_path, names=names):
        assert same == dict.fromkeys(names, True)


def resume_without(rank: int, world: int, folder: Path) -> tuple[bool, list[str]]:
    with rank_of_the_group(rank):
        trainer, whole = train(world, folder, TOPK, epochs=2)
        trainer.strategy.barrier()
        rmtree(folder / "epoch=0.ckpt.commopt", ignore_errors=True)
        trainer.strategy.barrier()
        again = folder / "again"
        resumed, warned = listen(world, folder=again, strategy=TOPK, epochs=2, ckpt_path=folder / "epoch=0.ckpt")
        return torch.equal(whole, resumed), warned


def test_without_the_sidecar_residuals_begin_at_zero_and_that_is_said(workers: Workers, tmp_path: Path) -> None:
    for same, warned in workers.run(resume_without, folder=tmp_path):
        assert not same
        assert len(warned) == 1
        assert "comes without the state of commopt" in warned[0]


def resume_in_the_other_package(rank: int, world: int, folder: Path) -> tuple[bool, list[str]]:
    weights, package = [], pytorch_lightning
    data = DataLoader(Points(6 * 8 * world), batch_size=8, shuffle=True)
    with rank_of_the_group(rank), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        for name, ckpt_path in (("whole", None), ("resumed", folder / "whole" / "epoch=0.ckpt")):
            keep = package.callbacks.ModelCheckpoint(folder / name, "{epoch}", save_top_k=-1)
            strategy, model = lightning_commopt.pytorch_lightning.CommOptDDPStrategy(**TOPK), Line()
            how: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 2}
            make_trainer(world, strategy, package, **how).fit(model, data, ckpt_path=ckpt_path)
            weights.append(flat(model))
    return torch.equal(*weights), [str(warning.message) for warning in caught]


def test_the_other_package_goes_on_too(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(resume_in_the_other_package, folder=tmp_path) == [(True, [])] * 2


# ------------------------------------------------------------------------------------------- files, and other files


def rotate(rank: int, world: int, folder: Path) -> None:
    with rank_of_the_group(rank):
        keep = ModelCheckpoint(
            folder, "{step}", every_n_train_steps=2, monitor="step", mode="max", save_top_k=2, save_last=True
        )
        trainer = make_trainer(world, CommOptDDPStrategy(**TOPK), callbacks=[keep], enable_checkpointing=True)
        trainer.fit(Regression(), Batches(rank, 9))


def test_sidecars_come_and_go_with_their_checkpoints(workers: Workers, tmp_path: Path) -> None:
    workers.run(rotate, folder=tmp_path)
    names = {"last", "step=6", "step=8"}
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.ckpt{end}" for n in names for end in ("", ".commopt")}
    for name in names:
        carried = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["commopt"]
        (inside,) = (tmp_path / f"{name}.ckpt.commopt").iterdir()
        assert inside.name == carried["save_id"]
        assert {path.name for path in inside.iterdir()} == {
            f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)
        }


class LocalMetric(Regression):
    """Logs a loss that is another one on each rank."""

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        self.log("mine", loss)
        return loss


def local_metric(rank: int, world: int, folder: Path, name: str) -> None:
    with rank_of_the_group(rank):
        keep = ModelCheckpoint(folder, name, monitor="mine", save_top_k=2, every_n_train_steps=3)
        trainer = make_trainer(
            world, CommOptDDPStrategy(**TOPK), callbacks=[keep], enable_checkpointing=True, max_epochs=4
        )
        trainer.fit(LocalMetric(), DataLoader(Points(6 * 8 * world), batch_size=8, shuffle=True))


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.:UserWarning")
@pytest.mark.parametrize("name", ["{step}", "{step}-{mine:.5f}"])
def test_ranks_may_differ_in_the_metric_that_names_and_keeps_checkpoints(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    workers.run(local_metric, 2, folder=tmp_path, name=name)
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        files = checkpoint.with_name(checkpoint.name + ".commopt").glob("*/*")
        assert sorted(file.name for file in files) == [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert len(list(tmp_path.iterdir())) == 4  # and nothing else
    said = workers.run(resume_from, 2, path=checkpoints[0])
    assert said == [[], []]


def sums(rank: int, world: int, folder: Path, resume: bool) -> tuple[dict[str, Tensor], list[str]]:
    """The residuals of all ranks together: as saved, or as they are after a resume before the first batch."""
    summed: dict[str, Tensor] = {}

    class Look(pl.Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
            if not summed:
                add(trainer)

    def add(trainer: pl.Trainer) -> None:
        for name, residual in handle_of(trainer).engine.residuals.final().items():
            total = residual.clone()
            torch.distributed.all_reduce(total)
            summed[name] = total

    with rank_of_the_group(rank), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        path = folder / "kept.ckpt"
        trainer = make_trainer(
            world, CommOptDDPStrategy(**TOPK), callbacks=[Look()] if resume else [], max_epochs=2 if resume else 1
        )
        trainer.fit(Regression(), Batches(rank, 3), ckpt_path=path if resume else None)
        if not resume:
            trainer.save_checkpoint(path)
            add(trainer)
    return summed, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("others", [1, 2, 3])
def test_another_number_of_ranks_owes_the_same_residuals(workers: Workers, tmp_path: Path, others: int) -> None:
    (saved, _), _ = workers.run(sums, world=2, folder=tmp_path, resume=False)
    for resumed, warned in workers.run(sums, world=others, folder=tmp_path, resume=True):
        assert saved.keys() == resumed.keys()
        assert all(torch.allclose(saved[name], resumed[name]) for name in saved)
        assert any(float(residual.norm()) > 0 for residual in resumed.values())
        assert not warned


def resume_from(rank: int, world: int, path: Path, strategy: Any = None) -> list[str]:
    with rank_of_the_group(rank), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        trainer = make_trainer(world, strategy or CommOptDDPStrategy(**TOPK), max_epochs=5)
        trainer.fit(Regression(), Batches(rank, 3), ckpt_path=path)
    return [str(warning.message) for warning in caught]


def save(rank: int, world: int, path: Path, strategy: Any = None) -> None:
    with rank_of_the_group(rank):
        trainer = make_trainer(world, strategy or CommOptDDPStrategy(**TOPK))
        trainer.fit(Regression(), Batches(rank, 3))
        trainer.save_checkpoint(path)


def test_a_checkpoint_of_another_strategy_loads_and_that_is_said(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    workers.run(save, path=path, strategy="ddp")
    assert not path.with_name("plain.ckpt.commopt").exists()
    for warned in workers.run(resume_from, path=path):
        assert len(warned) == 1
        assert "comes without the state of commopt" in warned[0]
    workers.run(save, path=path)
    assert workers.run(resume_from, path=path, strategy="ddp") == [[], []]


@pytest.mark.parametrize("harm", ["cut", "foreign", "id"])
def test_what_cannot_be_trusted_is_refused_on_all_ranks(workers: Workers, tmp_path: Path, harm: str) -> None:
    path = tmp_path / "kept.ckpt"
    workers.run(save, path=path)
    file = next(path.with_name("kept.ckpt.commopt").glob("*/rank-00001-*"))
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif harm == "foreign":
        file.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    else:
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["commopt"]["save_id"] = "../../../etc"
        torch.save(checkpoint, path)
    told = workers.run(refused, path=path)
    assert all("rank 1" in text for text in told) if harm != "id" else all("'../../../etc'" in text for text in told)


def refused(rank: int, world: int, path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        resume_from(rank, world, path)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- when and by whom


class Save(pl.Callback):
    """Saves in the middle of a fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def save_within(rank: int, world: int, folder: Path) -> str:
    """Everybody saves within a fit and after it, then rank 0 alone, then as if an exception had ended its fit."""
    with rank_of_the_group(rank), mock.patch("lightning_commopt.supervision.PATIENCE", 0.5):
        trainer = make_trainer(world, CommOptDDPStrategy(**TOPK), callbacks=[Save(folder / "within.ckpt")])
        trainer.fit(Regression(), Batches(rank, 4))
        trainer.save_checkpoint(folder / "after.ckpt")
        if rank == 0:
            with pytest.raises(CheckpointError) as caught:
                trainer.save_checkpoint(folder / "alone.ckpt")
            trainer.state.status = TrainerStatus.INTERRUPTED
            after_an_error = mock.patch("lightning_commopt.supervision.PATIENCE_AFTER_AN_ERROR", 0.1)
            with after_an_error, pytest.raises(CheckpointError, match=r"did not come within 0\.1 s"):
                OnExceptionCheckpoint(folder).on_exception(trainer)
            return str(caught.value)
    return ""


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_fit_is_saved_at_any_time_by_all_ranks(workers: Workers, tmp_path: Path) -> None:
    said, _ = workers.run(save_within, folder=tmp_path)
    for name in ("within", "after"):
        assert workers.run(resume_from, path=tmp_path / f"{name}.ckpt") == [[], []]
    assert "alone.ckpt has no state of commopt: rank 1 of 2 did not come within 0.5 s. Call save on every rank" in said
    for name in ("alone", "on_exception"):  # all that is Lightning's is there
        assert "commopt" not in torch.load(tmp_path / f"{name}.ckpt", weights_only=True)


def save_elsewhere(rank: int, world: int, folder: Path) -> list[str]:
    with rank_of_the_group(rank), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=CommOptWarning)
        trainer = make_trainer(world, CommOptDDPStrategy(**TOPK))
        trainer.fit(Regression(), Batches(rank, 2))
        for name in ("one", "two"):
            trainer.save_checkpoint(f"memory://{name}.ckpt")
            trainer.strategy.remove_checkpoint(f"memory://{name}.ckpt")
        later = Save(folder / "later.ckpt")
        trainer = make_trainer(world, CommOptDDPStrategy(**TOPK), plugins=[AsyncCheckpointIO()], callbacks=[later])
        trainer.fit(Regression(), Batches(rank, 2))
    return [str(warning.message) for warning in caught]


def test_what_has_no_place_for_a_sidecar_says_so_once(workers: Workers, tmp_path: Path) -> None:
    for warned in workers.run(save_elsewhere, folder=tmp_path):
        assert [text.split(": ")[1].split(".ckpt")[0].rpartition("/")[2] for text in warned] == ["one", "later"]
    assert [path.name for path in tmp_path.iterdir()] == ["later.ckpt"]


KILLED = """
import os, signal, sys
import lightning.pytorch as pl
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_commopt import CommOptDDPStrategy
from tests.lightning.fits import Batches, Regression

class Dies(TorchCheckpointIO):
    saves = 0

    def save_checkpoint(self, *args, **kwargs):
        self.saves += 1
        if self.saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(*args, **kwargs)

class Save(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(sys.argv[1])

strategy = CommOptDDPStrategy("topk", density=0.05)
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False, callbacks=[Save()], plugins=[Dies()],
)
trainer.fit(Regression(), Batches(0, 4))
"""


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_kill_within_a_save_leaves_the_one_before(workers: Workers, tmp_path: Path) -> None:
    script, path = tmp_path / "killed.py", tmp_path / "last.ckpt"
    script.write_text(KILLED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(path.with_name("last.ckpt.commopt").iterdir())) == 2  # the next one's was written already
    assert workers.run(resume_from, world=1, path=path) == [[]]
    workers.run(save, world=1, path=path)
    assert len(list(path.with_name("last.ckpt.commopt").iterdir())) == 1
