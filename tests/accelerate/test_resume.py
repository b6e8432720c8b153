"""A training that is resumed goes on with the bits of one that was never interrupted; and who saves on one rank alone
is told so."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate_commopt import attach, state
from commopt import CheckpointError
from tests.accelerate.training import (
    Regression,
    accelerator_of,
    closing,
    flat,
    heard,
    loader_of,
    ranks_of_the_group,
    sgd,
    train,
    trainer_of,
)
from tests.workers import Workers

STEPS = 8
CUT = 5
COMPRESSOR: dict[str, Any] = {"compressor": "topk", "density": 0.05}  # owes much from step to step


def through_accelerate(
    rank: int, world: int, folder: str | None = None, resume: bool = False, forget: bool = False
) -> torch.Tensor:
    """Trains to the end; with ``folder`` it saves there after `CUT` steps and stops, or goes on from it."""
    with accelerator_of(rank, world) as accelerator:
        attach(accelerator, **COMPRESSOR)
        raw = Regression(dropout=0.2)
        torch.manual_seed(rank)
        optimizer = sgd(raw)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        model, optimizer, loader, scheduler = accelerator.prepare(raw, optimizer, loader_of(STEPS, world), scheduler)
        batches = list(loader)
        if resume:
            assert folder is not None
            accelerator.load_state(folder)
            batches = batches[CUT:]
        elif folder is not None:
            batches = batches[:CUT]
        train(accelerator, model, optimizer, batches, scheduler)
        if folder is not None and not resume:
            accelerator.save_state(folder)
        return flat(raw)


@pytest.mark.parametrize("world", [2, 3])
def test_save_state_and_load_state_resume_bit_for_bit(workers: Workers, tmp_path: Path, world: int) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = workers.run(through_accelerate, world)
    workers.run(through_accelerate, world, folder=folder)
    resumed = workers.run(through_accelerate, world, folder=folder, resume=True)
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
    (sidecars,) = (tmp_path / "checkpoint" / "exchange.commopt").iterdir()
    assert len(list(sidecars.iterdir())) == world

    shutil.rmtree(sidecars)
    (tmp_path / "checkpoint" / "commopt.json").unlink()
    without = workers.run(resumed_without, world, folder=folder)
    assert not any(torch.equal(one, other) for one, (other, _) in zip(whole, without, strict=True))
    assert all("comes without the state of commopt" in said for _, (said,) in without)


def resumed_without(rank: int, world: int, folder: str) -> tuple[torch.Tensor, list[str]]:
    parameters: list[torch.Tensor] = []
    said = heard(lambda: parameters.append(through_accelerate(rank, world, folder, resume=True)))
    return parameters[0], said


def test_another_number_of_ranks_takes_over_what_is_owed(workers: Workers, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    workers.run(through_accelerate, 3, folder=folder)
    mine, theirs = workers.run(through_accelerate, 2, folder=folder, resume=True)
    assert torch.equal(mine, theirs)


def test_a_damaged_part_is_an_error_on_every_rank(workers: Workers, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    workers.run(through_accelerate, folder=str(folder))
    (part,) = folder.glob("exchange.commopt/*/rank-00001-of-00002.safetensors")
    part.write_bytes(part.read_bytes()[:-8])
    workers.run(damaged, folder=str(folder))


def damaged(rank: int, world: int, folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1: .*rank-00001-of-00002"):
        through_accelerate(rank, world, folder, resume=True)


def saves_twice(rank: int, world: int, folder: str) -> None:
    """Over the earlier checkpoint, and by numbers."""
    with accelerator_of(rank, world) as accelerator:
        attach(accelerator, **COMPRESSOR)
        ready = accelerator.prepare(raw := Regression(), sgd(raw), loader_of(2, world))
        accelerator.save_state(folder)  # nothing was exchanged yet
        for _ in range(2):
            train(accelerator, *ready)
            accelerator.save_state(folder)


def test_a_checkpoint_that_is_overwritten_has_one_save(workers: Workers, tmp_path: Path) -> None:
    workers.run(saves_twice, folder=str(tmp_path / "checkpoint"))
    assert len(list((tmp_path / "checkpoint" / "exchange.commopt").iterdir())) == 1


def saves_alone(rank: int, world: int, folder: str, numbered: bool) -> str:
    from accelerate.utils import ProjectConfiguration  # type: ignore[import-untyped]

    project = ProjectConfiguration(folder, automatic_checkpoint_naming=numbered)
    with (
        accelerator_of(rank, world, project_config=project) as accelerator,
        mock.patch.object(state, "PATIENCE", 0.5),
    ):
        attach(accelerator, **COMPRESSOR)
        train(accelerator, *accelerator.prepare(raw := Regression(), sgd(raw), loader_of(2, world)))
        said = ""
        if accelerator.is_main_process:
            with pytest.raises(CheckpointError, match="rank 1 of 2 did not come") as caught:
                accelerator.save_state(None if numbered else folder)
            said = str(caught.value)
        torch.distributed.barrier()
        accelerator.save_state(None if numbered else folder)
        return said


@pytest.mark.parametrize("numbered", [False, True])
def test_saving_on_the_main_process_alone_is_an_error(workers: Workers, tmp_path: Path, numbered: bool) -> None:
    said, _ = workers.run(saves_alone, folder=str(tmp_path), numbered=numbered)
    assert "Save and load on every rank, not only on the main process" in said


def through_the_trainer(
    rank: int, world: int, folder: str, save: bool = False, resume: bool | str = False
) -> tuple[torch.Tensor, list[float]]:
    with ranks_of_the_group(rank, world):
        model = Regression(dropout=0.2)
        saving = {"save_strategy": "steps", "save_steps": CUT} if save else {}
        trainer = trainer_of(model, folder, STEPS, world, seed=rank + 3, **saving)
        with closing(attach(trainer, **COMPRESSOR)):
            trainer.train(resume_from_checkpoint=resume)
            return flat(model), model.losses


def test_the_trainer_resumes_bit_for_bit(workers: Workers, tmp_path: Path) -> None:
    whole = workers.run(through_the_trainer, folder=str(tmp_path), save=True)
    assert (tmp_path / f"checkpoint-{CUT}" / "commopt.json").exists()
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")  # that of the end
    resumed = workers.run(through_the_trainer, folder=str(tmp_path), resume=True)
    for (one, losses), (other, later) in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)
        assert losses[CUT:] == later
    (tmp_path / f"checkpoint-{CUT}" / "commopt.json").write_text('{"version": 99}')
    workers.run(newer, folder=str(tmp_path))


def newer(rank: int, world: int, folder: str) -> None:
    with pytest.raises(CheckpointError, match="newer commopt"):
        through_the_trainer(rank, world, folder, resume=f"{folder}/checkpoint-{CUT}")
