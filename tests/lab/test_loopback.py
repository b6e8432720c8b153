"""Processes of a lab: what they find, and that they end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commopt.lab import Loopback, NetLab, open_lab

SHOW_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""


def environments(lab: Loopback, folder: Path) -> list[dict[str, str]]:
    for process in lab.popen(
        [sys.executable, "-c", SHOW_ENVIRONMENT, str(folder)],
        env={"ALL": "yes"},
        per_rank_env=[{"OWN": "first"}, {"OWN": "second"}],
    ):
        assert process.wait(timeout=60) == 0
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def check_environments(seen: list[dict[str, str]], master: str, interface: str) -> None:
    for rank, env in enumerate(seen):
        assert env["RANK"] == env["NODE_RANK"] == env["GROUP_RANK"] == str(rank)
        assert (env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("2", "0", "1")
        assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == (master, interface)
        assert (env["OMP_NUM_THREADS"], env["ALL"]) == ("1", "yes")
    assert [env["OWN"] for env in seen] == ["first", "second"]
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]


def test_a_loopback_rank_finds_its_place(tmp_path: Path) -> None:
    with open_lab(2, "loopback") as lab:
        check_environments(environments(lab, tmp_path), "127.0.0.1", "lo")


@pytest.mark.usefixtures("machine")
def test_a_host_finds_its_place(tmp_path: Path) -> None:
    with NetLab(2, None) as lab:
        check_environments(environments(lab, tmp_path), "10.77.0.1", "eth0")


def test_a_failure_ends_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.lab.loopback.GRACE_SECONDS", 0.1)
    fail_or_stay = "import os, signal; raise SystemExit(3) if os.environ['RANK'] == '1' else signal.pause()"
    with Loopback(2) as lab:
        assert lab.run([sys.executable, "-c", fail_or_stay], timeout=60) == 3


def test_a_signal_has_the_status_that_a_shell_gives_it() -> None:
    with Loopback(1) as lab:
        assert lab.run(["sh", "-c", "kill -9 $$"], timeout=60) == 128 + 9


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    with Loopback(1) as lab:
        assert lab.run(["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid"], timeout=60) == 0
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_a_job_that_does_not_end_in_time_is_ended() -> None:
    with Loopback(1) as lab:
        with pytest.raises(subprocess.TimeoutExpired):
            lab.run(["sleep", "600"], timeout=0.1)
        assert [process.poll() for process in lab._processes] == [-15]
