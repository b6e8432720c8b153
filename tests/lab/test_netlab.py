import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commopt.errors import LabError
from commopt.lab import Loopback, NetLab, available, open_lab

SHOW_ENVIRONMENT = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
"""

# Rank 1 sends 500 kB to rank 0 and waits for its answer.
SEND = """
import os, socket
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        peer, _ = server.accept()
        with peer:
            left = 500_000
            while left:
                left -= len(peer.recv(left))
            peer.sendall(b"!")
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    with peer:
        peer.sendall(bytes(500_000))
        assert peer.recv(1) == b"!"
"""


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def on_a_lab(check: Callable[[], None]) -> None:
    """Run the check where a network can be made; elsewhere the refusal must carry the reason."""
    reason = available()
    if reason is None:
        check()
        return
    with pytest.raises(LabError) as refusal:
        open_lab(2, "100mbit")
    assert reason in str(refusal.value)
    assert "--rate loopback" in str(refusal.value)


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


def test_a_host_finds_its_place_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def check() -> None:
        before = namespaces()
        with NetLab(2, None) as lab:
            check_environments(environments(lab, tmp_path), "10.77.0.1", "eth0")
            assert len(namespaces() - before) == 3  # two hosts and the switch
        assert namespaces() == before

    on_a_lab(check)


def test_the_rate_holds_and_the_kernel_counts() -> None:
    def check() -> None:
        with NetLab(2, "1gbit") as lab:
            lab.set_rate("8mbit")  # 1 MB/s; what the token buckets let through at once is less than a fifth of 500 kB
            start = time.monotonic()
            assert lab.run([sys.executable, "-c", SEND], timeout=60) == 0
            assert time.monotonic() - start > 0.35
            assert 500_000 < lab.sent_bytes(1) < 600_000  # with what a busy machine sends again
            assert lab.sent_bytes(0) < 50_000

    on_a_lab(check)


def test_two_labs_do_not_know_each_other() -> None:
    def check() -> None:
        before = namespaces()
        with NetLab(2, "1gbit") as one:
            with NetLab(2, "1gbit") as other:
                assert other.run([sys.executable, "-c", SEND], timeout=60) == 0
            assert one.sent_bytes(1) < 50_000
            assert one.run([sys.executable, "-c", SEND], timeout=60) == 0  # leaving the other one took nothing of ours
        assert namespaces() == before

    on_a_lab(check)


def test_an_interrupt_ends_what_was_started() -> None:
    def check() -> None:
        before = namespaces()
        started: list[subprocess.Popen[bytes]] = []

        def interrupted() -> None:
            with NetLab(2, "100mbit") as lab:
                started.extend(lab.popen(["sleep", "600"]))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert [process.poll() for process in started] == [-15, -15]
        assert namespaces() == before

    on_a_lab(check)


def test_a_network_that_cannot_be_made_leaves_nothing_behind() -> None:
    def check() -> None:
        before = namespaces()
        with pytest.raises(LabError, match="rate"), NetLab(2, "fast"):
            raise AssertionError("unreachable")
        assert namespaces() == before

    on_a_lab(check)


def test_a_failure_ends_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.lab.loopback.GRACE_SECONDS", 0.1)
    fail_or_stay = "import os, signal; raise SystemExit(3) if os.environ['RANK'] == '1' else signal.pause()"
    with Loopback(2) as lab:
        assert lab.run([sys.executable, "-c", fail_or_stay], timeout=60) == 3


def test_a_job_that_does_not_end_in_time_is_ended() -> None:
    with Loopback(1) as lab:
        with pytest.raises(subprocess.TimeoutExpired):
            lab.run(["sleep", "600"], timeout=0.1)
        assert [process.poll() for process in lab._processes] == [-15]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert available() == "ip and tc not found: install iproute2 (apt-get install iproute2)"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert available() == "network namespaces need Linux"


def test_the_command_line_returns_the_status_of_its_job() -> None:
    base = [sys.executable, "-m", "commopt.cli", "lab", "run", "--hosts", "2", "--rate", "loopback", "--"]
    for status in (0, 4):
        done = subprocess.run([*base, sys.executable, "-c", f"raise SystemExit({status})"], check=False, timeout=60)
        assert done.returncode == status
