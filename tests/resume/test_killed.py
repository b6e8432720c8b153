"""Killed anywhere while it overwrites a checkpoint, a run leaves the old pair or the new one, and can save again."""

import json
import os
import subprocess
import sys
from pathlib import Path

from commopt.resume.checkpoint import load, save_id_of
from tests.resume import killed

ROOT = Path(__file__).parents[2]


def test_a_kill_leaves_the_old_pair_or_the_new_one(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests/resume/killed.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    places = int(done.stdout)
    assert places >= 15

    found = []
    for place in range(places + 1):
        checkpoint = tmp_path / str(place) / "last.ckpt"
        save_id = save_id_of(json.loads(checkpoint.read_text()))
        for rank in range(killed.WORLD):
            loaded = load(checkpoint, save_id, rank=rank, world=killed.WORLD)
            assert loaded is not None
            assert loaded.tree["of"] == save_id
            assert loaded.tree["rank"].item() == rank
        found.append(save_id)
        killed.write(checkpoint, killed.NEW)  # and what was left over is in nobody's way
        assert os.listdir(f"{checkpoint}.commopt") == [killed.NEW]
    assert found == sorted(found)
    assert set(found) == {killed.OLD, killed.NEW}
