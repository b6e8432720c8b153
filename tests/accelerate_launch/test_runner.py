"""`python -m accelerate_commopt` in this process: where the configuration comes from, and how the script is run."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from accelerate_commopt import runner
from commopt import CommOptConfig
from commopt.config import VARIABLE

SCRIPT = """
import json, sys
from pathlib import Path

if __name__ == "__main__":
    Path("seen.json").write_text(json.dumps([sys.argv, sys.path[0], __file__]))
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CommOptConfig]:
    """A folder with a script in a folder; and what was installed, which here is nothing that stays."""
    found: list[CommOptConfig] = []
    monkeypatch.setattr(runner, "install", found.append)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in (VARIABLE, "WORLD_SIZE", "RANK", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("scripts").mkdir()
    Path("scripts", "train.py").write_text(SCRIPT)
    return found


def test_a_script_is_run_as_python_would(installed: list[CommOptConfig]) -> None:
    assert runner.main(["scripts/train.py", "--config", "8", "-m"]) == 0
    argv, path, file = json.loads(Path("seen.json").read_text())
    assert argv == ["scripts/train.py", "--config", "8", "-m"]
    assert path == str(Path("scripts").resolve())
    assert file == "scripts/train.py"
    assert installed == [CommOptConfig()]


def test_a_module_is_run_as_python_would(tmp_path: Path) -> None:
    assert runner.main(["-m", "scripts.train", "--lr", "1"]) == 0
    argv, path, _ = json.loads(Path("seen.json").read_text())
    assert argv == [str(tmp_path / "scripts" / "train.py"), "--lr", "1"]
    assert path == str(tmp_path)


def test_the_exit_status_is_the_scripts() -> None:
    Path("ends.py").write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as caught:
        runner.main(["ends.py"])
    assert caught.value.code == 7


def test_a_file_comes_before_the_environment_and_that_before_the_default(installed: list[CommOptConfig]) -> None:
    Path("commopt.yaml").write_text("{compressor: topk, options: {density: 0.1}, error_feedback: true, timeout: 60}")
    os.environ.update(CommOptConfig("int4", checked=True).to_environment())
    for arguments in (
        ["--config", "commopt.yaml"],
        ["--config", "commopt.yaml", "--compressor", "topk"],
        ["--config", "commopt.yaml", "--compressor", "int8"],
        [],
        ["--compressor", "auto"],
    ):
        assert runner.main([*arguments, "scripts/train.py"]) == 0
    topk = CommOptConfig("topk", {"density": 0.1}, True, 60)
    int4 = CommOptConfig("int4", checked=True)
    assert installed == [topk, topk, CommOptConfig("int8", timeout=60), int4, CommOptConfig(checked=True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py', seen from"),
        (["scripts"], "there is no script 'scripts', seen from"),
        (["-m", "missing"], "there is no module 'missing' to run"),
        (["-m", "missing.train"], "there is no module 'missing.train' to run"),
        (["-m", "scripts.missing"], "there is no module 'scripts.missing' to run"),
        (["--config", "missing.yaml", "scripts/train.py"], "missing.yaml: cannot be read: No such file"),
        (["--compressor", "int9", "scripts/train.py"], "unknown compressor 'int9'; did you mean"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, installed: list[CommOptConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not installed
    assert not Path("seen.json").exists()


def test_an_environment_that_another_has_set_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ[VARIABLE] = "int8"
    assert runner.main(["scripts/train.py"]) == 2
    assert f"{VARIABLE} in the environment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "size", "told"), [(None, "2", "true"), ("mps", "2", "true"), ("cuda", "2", None), (None, "1", None)]
)
def test_processes_without_a_device_are_made_one_world(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str | None,
    size: str,
    told: str | None,
) -> None:
    found = None if device is None else torch.device(device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    os.environ.update({"WORLD_SIZE": size, "RANK": "0"})
    assert runner.main(["scripts/train.py"]) == 0
    assert os.environ.get("ACCELERATE_USE_CPU") == told
    said = "2 processes were launched and there is no GPU, so they train on CPUs, together"
    assert (said in capsys.readouterr().err) == (told is not None)
