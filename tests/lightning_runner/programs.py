"""Programs that know nothing of commopt, and a process that forgets afterwards that they were run."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

from jsonargparse import ArgumentParser

from commopt import Handle, Stats
from lightning_commopt import arguments
from lightning_commopt.__main__ import main
from lightning_commopt.swap import LAUNCHER, installed
from tests.lightning.fits import rank_of_the_group

MODEL = """
import sys

import PACKAGE as pl
import torch
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.layer = torch.nn.Linear(1024, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.randn(64, 1024), batch_size=8)
"""

TRAINER = (
    MODEL
    + """
from PACKAGE.loggers import CSVLogger

if __name__ == "__main__":
    folder, strategy, devices, nodes = sys.argv[1:]
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(devices), num_nodes=int(nodes), max_epochs=1,
        logger=CSVLogger(folder, "", "logs"), log_every_n_steps=2,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Model(), Data())
    sys.exit(7 if trainer.is_global_zero else 0)
"""
)

CLI = (
    MODEL
    + """
from PACKAGE.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(Model, Data, save_config_callback=None)
"""
)

FABRIC = """
import sys

import torch
from PACKAGE import Fabric

fabric = Fabric(accelerator="cpu", devices=1, num_nodes=2)
fabric.launch()
layer = torch.nn.Linear(1024, 16)
model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), 0.1))
for _ in range(4):
    optimizer.zero_grad()
    fabric.backward(model(torch.randn(8, 1024)).square().mean())
    optimizer.step()
fabric.strategy.teardown()
"""


@contextmanager
def forgotten() -> Iterator[None]:
    """What the runner changes in its process is afterwards as it was before."""
    with ExitStack() as stack:

        def keep(owner: Any, name: str) -> None:
            stack.enter_context(mock.patch.object(owner, name, getattr(owner, name)))

        for end in installed():
            stack.enter_context(mock.patch.dict(getattr(import_module(f"{end.package}.strategies"), end.registry)))
            keep(getattr(import_module(end.package), end.door), "__init__")
            for command in ("_basic_subprocess_cmd", "_hydra_subprocess_cmd"):
                keep(import_module(f"{end.package}.{LAUNCHER}"), command)
        keep(ArgumentParser, "error")
        stack.enter_context(mock.patch.object(sys, "argv", list(sys.argv)))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        yield


def ran(rank: int, world: int, given: list[str]) -> tuple[Any, list[tuple[str, Stats]]]:
    """Runs ``python -m lightning_commopt`` with ``given`` as one rank of the group that is there. Returns its exit
    status, and for each model its compressor and what was counted."""
    handles = []

    def handle(*args: Any) -> Handle:
        handles.append(Handle(*args))
        return handles[-1]

    with rank_of_the_group(rank), forgotten(), mock.patch.object(arguments, "Handle", handle):
        try:
            status: Any = main(given)
        except SystemExit as end:
            status = end.code
    return status, [(each.config.compressor, each.stats()) for each in handles]
