"""Unmodified scripts on two real ranks: that their gradients were compressed is seen by the bytes that were counted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PLAIN = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator(project_dir=sys.argv[1])
model = torch.nn.Linear(1024, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.randn(48, 1024), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
accelerator.end_training()
sys.exit(7 if accelerator.process_index == 0 else 0)
"""

RUN_CLM = """
from dataclasses import dataclass, field

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    n_layer: int = field(default=1)


@dataclass
class DataArguments:
    train_file: str = field(default="")
    block_size: int = field(default=32)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, file, size):
        tokens = torch.tensor(list(open(file, "rb").read()))
        self.blocks = tokens[: len(tokens) // size * size].view(-1, size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    size = {"n_positions": data_args.block_size, "n_embd": 32, "n_layer": model_args.n_layer, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))
    data = Blocks(data_args.train_file, data_args.block_size)
    trainer = Trainer(model=model, args=training_args, train_dataset=data)
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
"""


def ended(command: list[str], folder: Path) -> tuple[int, str]:
    """Exit status and all output of a command, of which nothing is left afterwards."""
    given = {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "home"),  # where the machine's own configuration would be
        "HF_HUB_OFFLINE": "1",
        "COMMOPT_CACHE": "off",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | given
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=180)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hung: {process.communicate()[0]}")
    return process.returncode, output


def summary(file: Path) -> dict[str, Any]:
    """What the first rank's monitor says of the whole run, by plan."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["world"] == 2
    plans: dict[str, Any] = lines[-1]["plans"]
    return plans


def test_one_file_and_an_unmodified_script_on_two_cpus(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "launch.yaml").write_text(
        "{distributed_type: MULTI_CPU, num_processes: 2, use_cpu: true, commopt: {version: 1, compressor: int8}}"
    )
    status, output = ended(["accelerate_commopt.launch", "--config_file", "launch.yaml", "train.py", "runs"], tmp_path)
    assert status == 7, output
    assert "2 processes on CPUs are started by torchrun" in output
    assert "Traceback" not in output
    plans = summary(tmp_path / "runs" / "commopt.jsonl")
    assert list(plans) == ["int8"]
    assert plans["int8"]["steps"] == 6
    assert plans["int8"]["bytes_uncompressed"] == 6 * 4 * (1024 * 32 + 32)
    assert 0 < plans["int8"]["bytes_sent"] < plans["int8"]["bytes_uncompressed"] / 3.5


def test_a_trainer_of_transformers_under_accelerates_own_launcher(tmp_path: Path) -> None:
    (tmp_path / "run_clm.py").write_text(RUN_CLM)
    (tmp_path / "commopt.yaml").write_text("{version: 1, compressor: int8}")
    launcher = ["accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "gpt" / "accelerate.yaml")]
    runner = ["-m", "accelerate_commopt", "--config", "commopt.yaml"]
    data = ["--train_file", "run_clm.py", "--block_size", "16"]
    training = ["--output_dir", "out", "--max_steps", "6", "--per_device_train_batch_size", "4"]
    quiet = ["--report_to", "none", "--save_strategy", "no", "--dataloader_pin_memory", "false"]
    status, output = ended([*launcher, *runner, "run_clm.py", *data, *training, *quiet], tmp_path)
    assert status == 0, output
    assert "2 processes were launched and there is no GPU, so they train on CPUs, together" in output
    plans = summary(tmp_path / "out" / "commopt.jsonl")
    assert list(plans) == ["int8"]
    assert plans["int8"]["steps"] == 6
    assert 0 < plans["int8"]["bytes_sent"] < plans["int8"]["bytes_uncompressed"] / 3
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["train_loss"] > 0
