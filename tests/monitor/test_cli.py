"""The ``commopt`` command."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest

from commopt import cli
from commopt.cli import main
from tests.monitor.runs import eventful


def test_it_writes_the_page_and_the_picture_and_prints_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eventful(tmp_path)
    out, png = tmp_path / "out.html", tmp_path / "out.png"
    assert main(["report", str(tmp_path), "--out", str(out), "--png", str(png), "--gpu-hour-price", "50"]) == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert png.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "At 100.00 an" in printed.out
    assert f"Wrote {out}" in printed.out
    assert f"Wrote {png}" in printed.out
    assert not printed.err


def test_the_page_lies_in_the_run_by_default(tmp_path: Path) -> None:
    eventful(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "commopt.html").exists()
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("mistake", ["no run", "no place"])
def test_a_mistake_is_one_line_and_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    run = tmp_path / "run"
    if mistake == "no place":
        eventful(run)
    assert main(["report", str(run), "--out", str(tmp_path / "no" / "page.html")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("commopt: ")
    assert printed.err.count("\n") == 1
    assert str(tmp_path) in printed.err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["report"], ["report", "x", "--gpu-hour-price", "-1"]], ids=str)
def test_a_wrong_command_line_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: commopt" in capsys.readouterr().err


def test_what_is_missing_to_draw_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(sys.modules, {"commopt.monitor.report": None}):
        assert main(["report", str(tmp_path)]) == 2
    assert "needs matplotlib and jinja2: pip install matplotlib jinja2" in capsys.readouterr().err


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    for found in ({"return_value": "1.2.3"}, {"side_effect": PackageNotFoundError}):
        with mock.patch.object(cli, "version", **found), pytest.raises(SystemExit) as exit_:
            main(["--version"])
        assert exit_.value.code == 0
    assert capsys.readouterr().out == "commopt 1.2.3\ncommopt (not installed)\n"


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commopt.cli", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
