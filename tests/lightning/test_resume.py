"""A fit that goes on from a checkpoint has the bits of one that was never interrupted."""

import warnings
from pathlib import Path
from shutil import rmtree
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from commopt import CommOptWarning
from commopt.compressors import available
from lightning_commopt import CommOptDDPStrategy
from tests.lightning.fits import Regression, flat, make_trainer, rank_of_the_group
from tests.lightning.test_rollback import Points
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
