"""``commopt bench``."""

import json
import sys
from pathlib import Path

import pytest

from commopt.cli import main
from commopt.compressors import available, create
from commopt.lab import Loopback
from commopt.network import Network
from commopt.network.machine import Machine


def test_without_a_launcher_it_shows_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench"]) == 2
    said = capsys.readouterr().err
    assert "RANK and WORLD_SIZE are not set" in said
    assert "torchrun --nproc-per-node 2 --no-python commopt bench" in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_measures_prints_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: int) -> None:
    out = tmp_path / "bench.json"
    with Loopback(ranks) as lab:
        assert lab.run([sys.executable, "-m", "commopt.cli", "bench", "--json", str(out)], timeout=120) == 0
    printed = capfd.readouterr().out
    assert printed.count("Codecs, Gbit/s of float32") == 1  # rank 0 alone
    assert printed.count("Links, each way") == printed.count("Collectives, ms") == (ranks > 1)
    figures = json.loads(out.read_text())
    assert Network.from_plain(figures["network"]).hosts == (0,) * ranks
    assert set(Machine.from_plain(figures["machine"]).codecs) == {repr(create(name)) for name in available()}
