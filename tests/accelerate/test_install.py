"""`install`: an unmodified script uses commopt, through Accelerate and through a Trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from accelerate_commopt import attach, plugin
from accelerate_commopt.plugin import install
from commopt import AttachError, CommOptConfig, Stats
from tests.accelerate.training import (
    Regression,
    accelerator_of,
    flat,
    heard,
    loader_of,
    ranks_of_the_group,
    sgd,
    train,
    trainer_of,
)
from tests.workers import Workers

STEPS = 4


@contextmanager
def installed(*compressors: str) -> Iterator[None]:
    """`install` for each in turn, and all as it was after that."""
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from transformers import Trainer

    with (
        mock.patch.object(Accelerator, "__init__", Accelerator.__init__),
        mock.patch.object(Trainer, "train", Trainer.train),
        mock.patch.object(plugin, "_installed", None),
    ):
        for compressor in compressors:
            install(CommOptConfig(compressor))
        yield


def script(rank: int, world: int) -> Stats:
    with installed("int4", "int8"), accelerator_of(rank, world) as accelerator:
        train(accelerator, *accelerator.prepare(raw := Regression(), sgd(raw), loader_of(STEPS, world)))
        with pytest.raises(AttachError, match="python -m accelerate_commopt"):
            attach(accelerator)
        assert accelerator._commopt.config.compressor == "int8"
        stats: Stats = accelerator._commopt.stats()
        return stats


def test_every_accelerator_that_is_made_afterwards_compresses(workers: Workers) -> None:
    for stats in workers.run(script):
        assert stats.steps == STEPS
        assert stats.bytes_sent < 0.4 * stats.bytes_uncompressed


def script_with_a_trainer(rank: int, world: int, folder: str) -> tuple[torch.Tensor, list[str], Stats]:
    with installed("topk"), ranks_of_the_group(rank, world):
        trainer = trainer_of(model := Regression(), folder, STEPS, world, save_strategy="steps", save_steps=2)
        trainer.train()
        whole = flat(model)
        attachment = trainer.accelerator._commopt
        stats = attachment.stats()
        attachment.close()

        trainer = trainer_of(model := Regression(), folder, STEPS, world)
        said = heard(lambda: trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2"))
        trainer.train()
        callbacks = [type(each).__name__ for each in trainer.callback_handler.callbacks]
        assert callbacks.count("CommOptCallback") == 1
        trainer.accelerator._commopt.close()
        assert not torch.equal(flat(model), whole)  # it has trained on
        return whole, said, stats


def test_a_trainer_of_an_unmodified_script_compresses_saves_and_resumes(workers: Workers, tmp_path: Path) -> None:
    (mine, said, stats), (theirs, *_) = workers.run(script_with_a_trainer, folder=str(tmp_path))
    assert torch.equal(mine, theirs)
    assert stats.steps == STEPS
    assert stats.bytes_sent < 0.4 * stats.bytes_uncompressed
    assert said == []
    assert (tmp_path / "checkpoint-2" / "commopt.json").exists()
