"""Unmodified programs on two ranks: that gradients were compressed is seen by the bytes that were counted."""

from pathlib import Path
from typing import Any

import pytest

from commopt import Stats
from tests.accelerate_launch.test_training import ended, summary
from tests.lightning_runner.programs import CLI, FABRIC, TRAINER, ran
from tests.workers import Workers

BYTES = 4 * (1024 * 16 + 16)  # of one gradient, and of what two ranks hand to a ring all-reduce
AS = {"int8": 3.5, "int4": 7, "topk": 30}  # ratio of the bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of jsonargparse, as Lightning calls it
]


def assert_sent(results: list[tuple[Any, list[tuple[str, Stats]]]], compressor: str, status: int = 0) -> None:
    """On both ranks there was one model, of which this was sent in four steps; the first one ended with ``status``."""
    assert [ended_with for ended_with, _ in results] == [status, 0]
    for _, ((used, stats),) in results:
        assert used == compressor
        assert stats.steps == 4
        assert stats.bytes_uncompressed == 4 * BYTES
        assert 0 < stats.bytes_sent < stats.bytes_uncompressed / AS[compressor]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("options", "asked", "compressor"),
    [
        ([], "commopt_ddp_int8", "int8"),
        (["--strategy", "commopt_ddp_int8"], "ddp", "int8"),
        (["--strategy", "commopt_ddp_int4"], "auto", "int4"),
        (["--config", "commopt.yaml"], "auto", "topk"),
    ],
)
def test_a_script_with_a_trainer(
    workers: Workers, tmp_path: Path, package: str, options: list[str], asked: str, compressor: str
) -> None:
    script, file = tmp_path / "train.py", tmp_path / "commopt.yaml"
    script.write_text(TRAINER.replace("PACKAGE", package))
    file.write_text("{compressor: topk, options: {density: 0.01}}")
    options = [str(file) if part == file.name else part for part in options]
    given = [*options, str(script), str(tmp_path), asked, "1", "2"]
    assert_sent(workers.run(ran, given=given), compressor, status=7)


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_a_script_with_a_fabric(workers: Workers, tmp_path: Path, package: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(FABRIC.replace("PACKAGE", package))
    assert_sent(workers.run(ran, given=["--strategy", "commopt_ddp_int8", str(script)]), "int8")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("options", "asked", "compressor"),
    [
        ([], ["--trainer.strategy", "commopt_ddp_int8"], "int8"),
        ([], ["--trainer.strategy", "CommOptDDPStrategy", "--trainer.strategy.compressor", "int4"], "int4"),
        ([], ["--config", "strategy.yaml"], "topk"),
        (["--strategy", "commopt_ddp_int8"], [], "int8"),
    ],
)
def test_a_program_with_a_command_line(
    workers: Workers, tmp_path: Path, package: str, options: list[str], asked: list[str], compressor: str
) -> None:
    script, file = tmp_path / "train.py", tmp_path / "strategy.yaml"
    script.write_text(CLI.replace("PACKAGE", package))
    ours = "lightning_commopt.CommOptDDPStrategy"
    if package == "pytorch_lightning":
        ours = "lightning_commopt.pytorch_lightning.CommOptDDPStrategy"
        asked = [ours if part == "CommOptDDPStrategy" else part for part in asked]
    init = "{compressor: topk, density: 0.01, timeout: 0:01:00}"
    file.write_text(f"trainer: {{strategy: {{class_path: {ours}, init_args: {init}}}}}")
    asked = [str(file) if part == file.name else part for part in asked]
    where = {"accelerator": "cpu", "devices": "1", "num_nodes": "2", "max_epochs": "1", "default_root_dir": tmp_path}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), "false")
    trainer = [f"--trainer.{key}={value}" for key, value in (where | quiet).items()]
    assert_sent(
        workers.run(ran, given=[*options, str(script), "fit", "--seed_everything=1", *trainer, *asked]), compressor
    )


def test_the_processes_that_lightning_starts_run_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER.replace("PACKAGE", "lightning.pytorch"))
    status, output = ended(
        ["lightning_commopt", "--strategy", "commopt_ddp_int8", "train.py", "runs", "auto", "2", "1"], tmp_path
    )
    assert status == 7, output
    assert "Traceback" not in output
    plans = summary(tmp_path / "runs" / "logs" / "commopt.jsonl")
    assert list(plans) == ["int8"]
    assert plans["int8"]["steps"] == 4
    assert plans["int8"]["bytes_uncompressed"] == 4 * BYTES
    assert 0 < plans["int8"]["bytes_sent"] < plans["int8"]["bytes_uncompressed"] / AS["int8"]
