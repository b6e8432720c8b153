"""``commopt doctor``: the page, the mistakes, and one training from beginning to end."""

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from commopt.cli import main
from commopt.cli.doctor import page
from tests.test_doctor import FOUND

pytestmark = pytest.mark.usefixtures("handlers")

TRAINING = """
import os
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist

import commopt
from commopt.lab import on_each_rank

if "RANK" not in os.environ:
    sys.exit(on_each_rank("training", 2))
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
handle = commopt.attach(model, "int8")
try:
    for _ in range(1000):
        model(torch.randn(4, 64)).square().mean().backward()
finally:
    print(f"trained {handle.stats().steps} steps")
    dist.destroy_process_group()
"""


def shown(page: object) -> str:
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(page)
    return " ".join(capture.get().split())


def test_the_page_tells_links_shares_plans_time_and_money() -> None:
    text = shown(page(FOUND, hours=200.0, gpu_hour_price=2.5))
    assert "4 ranks on 2 hosts, 20 steps without compression" in text
    assert "│ 0 - 1 │ 0.500 │ 0.1 │" in text
    assert "gradients │ 20.0 MiB" in text
    assert "waits for communication │ 70.0%" in text
    assert "best possible gain │ 75.0%" in text
    assert "│ int4 │ 400 │ 50.0% │" in text
    assert "Recommended: int4, 400 ms a step predicted: 70% of an uncompressed step waits" in text
    assert "Of 200 hours of training it saves 100.0 hours, which is 1000.00 for 4 GPUs at 2.5 an hour." in text
    assert "compressor='auto' finds it" in text


def test_without_a_price_there_is_no_money_and_another_quality_is_named() -> None:
    text = shown(page(replace(FOUND, quality="aggressive")))
    assert "saves 50.0 hours. compressor='auto', quality='aggressive' finds it" in text


def test_where_nothing_pays_the_page_says_why() -> None:
    text = shown(page(replace(FOUND, recommended=None, reason="[it] would be slower"), gpu_hour_price=1.0))
    assert text.endswith("Recommended: do nothing: [it] would be slower.")


@pytest.mark.parametrize(
    ("arguments", "rank", "message"),
    [
        ([], None, "no command is given"),
        ([], "0", "has to be around it"),
        (["--", "true"], "1", "has to be around it"),
        (["--steps", "2", "--", "true"], None, "at least 4 steps"),
        (["--", "./no-such-command"], None, "No such file"),
        (["--", sys.executable, "-c", "raise SystemExit(7)"], None, "ended with status 7 before 20 steps"),
        (["--", sys.executable, "-c", ""], None, "ended with status 0 before 20 steps"),
    ],
)
def test_mistakes_are_explained(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    rank: str | None,
    message: str,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize("hours", ["0", "-1", "inf", "many"])
def test_hours_are_a_number(capsys: pytest.CaptureFixture[str], hours: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--hours", hours, "--", "true"])
    assert "hours" in capsys.readouterr().err


def test_whoever_ends_the_doctor_ends_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ends_it = f"echo $$ > {tmp_path}/pid; kill -TERM {os.getpid()}; exec sleep 600"
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        main(["doctor", "--", "sh", "-c", ends_it])
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_training_from_beginning_to_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COMMOPT_CACHE", "off")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    assert main(["doctor", "--steps", "8", "--", sys.executable, str(script)]) == 0
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    assert out.count("trained 8 steps") == 2
    assert out.count("2 ranks on 1 host, 8 steps without compression") == 1
    assert out.count("Recommended: ") == 1
