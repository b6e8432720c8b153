"""A plain script, started by Lightning on two processes of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import lightning_commopt


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


pl.seed_everything(0)
model = Model()
trainer = pl.Trainer(
    strategy="commopt_ddp_int8", accelerator="cpu", devices=2, max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, DataLoader(torch.randn(64, 1024), batch_size=8))
stats = trainer.strategy.handle.stats()
torch.save(
    {
        "weight": model.layer.weight.detach(),
        "world": trainer.world_size,
        "steps": stats.steps,
        "ratio": stats.compression_ratio,
        "backend": torch.distributed.get_backend(),
    },
    f"{sys.argv[1]}/rank{trainer.global_rank}.pt",
)
"""


def test_a_script_trains_on_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the rank that Lightning started, too
        pytest.fail(f"the script hung:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first["weight"], second["weight"])
    assert first | {"weight": None, "ratio": None} == {
        "weight": None,
        "world": 2,
        "steps": 4,
        "ratio": None,
        "backend": "gloo",
    }
    assert first["ratio"] == pytest.approx(4, rel=0.1)
