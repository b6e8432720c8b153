"""`python -m lightning_commopt` in this process: how the script is run, and what is said to mistakes."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_commopt import swap
from lightning_commopt.__main__ import main
from tests.lightning_runner.programs import forgotten

SCRIPT = """
import json, sys
from pathlib import Path

import __main__
from lightning.pytorch.strategies.launchers.subprocess_script import _basic_subprocess_cmd

MINE = object()

if __name__ == "__main__":
    assert __main__.MINE is MINE
    Path("seen.json").write_text(json.dumps([sys.argv, sys.path[0], __file__, _basic_subprocess_cmd()]))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a script in a folder, and files for ``--config``."""
    monkeypatch.chdir(tmp_path)
    Path("scripts").mkdir()
    Path("scripts", "train.py").write_text(SCRIPT)
    Path("topk.yaml").write_text("{compressor: topk, options: {density: 0.1}}")
    Path("key.yaml").write_text("{compresor: topk}")
    Path("option.yaml").write_text("{compressor: topk, options: {rank: 4}}")
    Path("range.yaml").write_text("{compressor: topk, options: {density: 7}}")
    with forgotten():
        sys.path.insert(0, str(tmp_path))  # as python -m does
        yield tmp_path


def seen() -> Any:
    return json.loads(Path("seen.json").read_text())


def test_a_script_is_run_as_python_would(here: Path) -> None:
    assert main(["scripts/train.py", "--strategy", "8", "-m"]) == 0
    argv, path, file, command = seen()
    assert argv == ["scripts/train.py", "--strategy", "8", "-m"]
    assert path == str(here / "scripts")
    assert file == "scripts/train.py"
    assert command == [sys.executable, "-m", "lightning_commopt", str(here / "scripts/train.py"), *argv[1:]]
    assert StrategyRegistry["ddp"]["strategy"].__name__ == "DDPStrategy"  # nothing was swapped


def test_a_module_is_run_as_python_would(here: Path) -> None:
    options = ["--strategy", "commopt_ddp", "--config", "topk.yaml"]
    assert main([*options, "-m", "scripts.train", "--lr", "1"]) == 0
    argv, path, _, command = seen()
    assert argv == [str(here / "scripts" / "train.py"), "--lr", "1"]
    assert path == str(here)
    options[-1] = str(here / "topk.yaml")
    assert command == [sys.executable, "-m", "lightning_commopt", *options, "-m", "scripts.train", "--lr", "1"]
    assert StrategyRegistry.get("ddp").config.options == {"density": 0.1}


@pytest.mark.parametrize("end", swap.FRONT_ENDS, ids=lambda end: end.package)
def test_hydras_command_is_led_too(monkeypatch: pytest.MonkeyPatch, end: swap.FrontEnd) -> None:
    launcher = import_module(f"{end.package}.{swap.LAUNCHER}")
    command = [sys.executable, "-m", "train", "lr=1"]
    monkeypatch.setattr(launcher, "_hydra_subprocess_cmd", lambda local_rank: (command, f"/{local_rank}"))
    swap.lead(["--strategy", "commopt_ddp"])
    led = [sys.executable, "-m", "lightning_commopt", "--strategy", "commopt_ddp", *command[1:]]
    assert launcher._hydra_subprocess_cmd(local_rank=1) == (led, "/1")


def test_how_a_script_ends_is_its_own_affair() -> None:
    Path("ends.py").write_text("raise SystemExit(7)")
    Path("fails.py").write_text("1 / 0")
    with pytest.raises(SystemExit) as caught:
        main(["ends.py"])
    assert caught.value.code == 7
    with pytest.raises(ZeroDivisionError):
        main(["fails.py"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py', seen from "),
        (["scripts"], "there is no script 'scripts', seen from "),
        (["-m", "missing"], "there is no module 'missing' to run"),
        (["-m", "missing.train"], "there is no module 'missing.train' to run"),
        (["-m", "scripts/train.py"], "there is no module 'scripts/train.py' to run"),
        (["--strategy", "commopt_ddp_in8", "scripts/train.py"], "'commopt_ddp_in8'; did you mean 'commopt_ddp_int8'?"),
        (["--strategy", "ddp", "scripts/train.py"], "unknown strategy 'ddp'; did you mean 'commopt_ddp"),
        (["--config", "missing.yaml", "scripts/train.py"], "missing.yaml: cannot be read: No such file"),
        (["--config", "key.yaml", "scripts/train.py"], "'compresor'; did you mean 'compressor'?"),
        (["--config", "option.yaml", "scripts/train.py"], "unknown argument of the strategy with 'topk': 'rank'"),
        (["--config", "range.yaml", "scripts/train.py"], "'density' "),
        (
            ["--strategy", "commopt_ddp_int8", "--config", "topk.yaml", "scripts/train.py"],
            "--strategy commopt_ddp_int8 and the configuration, with compressor 'topk', are of two minds",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("lightning_commopt: ")
    assert message in said
    assert not Path("seen.json").exists()
    assert StrategyRegistry["ddp"]["strategy"].__name__ == "DDPStrategy"


@pytest.mark.parametrize("arguments", [[], ["--stratgy", "commopt_ddp", "scripts/train.py"]])
def test_a_command_that_cannot_be_read_shows_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "python -m lightning_commopt [--strategy NAME]" in capsys.readouterr().err
