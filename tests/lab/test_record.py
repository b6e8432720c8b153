"""What a lab leaves: nothing, and nobody else's is touched."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commopt.errors import LabError
from commopt.lab import NetLab, record
from commopt.lab.record import identity
from commopt.lab.system import namespaces, sh

Begin = Callable[..., "subprocess.Popen[str]"]
Made = Callable[[str], set[str]]

pytestmark = pytest.mark.usefixtures("machine")


def interfaces() -> list[str]:
    """Of the machine itself, without their state."""
    return sorted(line.split(": ")[1] for line in sh("ip", "-o", "link").splitlines())


def running(left: set[str]) -> list[int]:
    return [int(pid) for namespace in left for pid in sh("ip", "netns", "pids", namespace).split()]


def ended(processes: list[int]) -> bool:
    """They left their namespaces; a moment later they are gone."""
    deadline = time.monotonic() + 10
    while any(identity(pid) for pid in processes) and time.monotonic() < deadline:
        pass
    return not any(identity(pid) for pid in processes)


@pytest.fixture
def foreign(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A namespace of somebody else, named like a host, and a bridge in it named like a switch."""
    namespace = f"{name}-0-h7"
    sh("ip", "netns", "add", namespace)
    sh("ip", "-n", namespace, "link", "add", "rack0", "type", "bridge")
    monkeypatch.setattr("commopt.lab.record.secrets.token_hex", lambda length: "0")
    yield namespace
    sh("ip", "netns", "del", namespace)


def test_nothing_else_is_touched(foreign: str, name: str, made: Made) -> None:
    own = interfaces()
    with NetLab(2, "100mbit", name=name) as lab:
        assert made(name) == {foreign, lab.record.switch, *lab.record.hosts}
        assert interfaces() == own
    assert made(name) == {foreign}
    assert interfaces() == own
    assert "rack0" in sh("ip", "-n", foreign, "link")


def test_an_interrupt_ends_what_was_started(name: str, made: Made, folder: Path) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted() -> None:
        with NetLab(2, "100mbit", delay="1ms", name=name) as lab:
            started.extend(lab.popen(["sleep", "600"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [process.poll() for process in started] == [-15, -15]
    assert not made(name)
    assert not list(folder.iterdir())


def test_a_network_that_cannot_be_made_leaves_nothing(
    name: str, made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commopt.lab.links.BURST", "nothing")
    with pytest.raises(LabError, match="burst"), NetLab(2, "1gbit", name=name):
        raise AssertionError("unreachable")
    assert not made(name)
    assert not list(folder.iterdir())


def test_a_name_is_taken_once(folder: Path) -> None:
    with NetLab(1, None, name="one") as lab:
        with pytest.raises(LabError, match="'one' already"), NetLab(1, None, name="one"):
            raise AssertionError("unreachable")
        assert lab.record.hosts[0] in namespaces()
        assert [path.name for path in folder.iterdir()] == ["one.json"]


def test_down_leaves_the_lab_of_a_process_that_runs() -> None:
    with NetLab(1, None, name="one") as lab:
        assert record.down(None) == []
        with pytest.raises(LabError, match=f"process {os.getpid()}, which still runs"):
            record.down("one")
        assert lab.record.hosts[0] in namespaces()


def test_a_process_of_the_same_number_is_another_one() -> None:
    with NetLab(1, None) as lab:
        assert lab.record.owned()
        lab.record.owner = [str(os.getpid()), "1"]
        assert not lab.record.owned()


def test_the_lab_that_is_up_is_found_unless_there_is_a_choice() -> None:
    NetLab(1, None, name="one").up()
    try:
        assert record.find(None).name == "one"
        NetLab(1, None, name="two").up()
        for ask in (record.find, record.down):
            with pytest.raises(LabError, match="--name one or two"):
                ask(None)
        assert record.down("two") == ["two"]
    finally:
        assert record.down(None) == ["one"]
    with pytest.raises(LabError, match="no lab is up"):
        record.find(None)
    with pytest.raises(LabError, match="no lab 'one'"):
        record.find("one")


def test_a_record_that_is_none_is_named(folder: Path) -> None:
    folder.mkdir()
    (folder / "bad.json").write_text("{}")
    with pytest.raises(LabError, match=r"bad\.json"):
        record.everything()


def test_down_removes_what_a_crash_while_it_was_made_left(begin: Begin, name: str, made: Made, folder: Path) -> None:
    crash = "import os; links._limit = lambda *_: os.kill(os.getpid(), 9)"
    assert begin(["up", "--name", name, "--delay", "1ms"], crash).wait(timeout=60) == -signal.SIGKILL
    assert len(made(name)) == 3  # two hosts and the switch
    processes = running(made(name))
    assert record.down(None) == [name]
    assert not made(name)
    assert ended(processes)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_takes_its_lab_with_it(
    signum: signal.Signals, begin: Begin, made: Made, folder: Path
) -> None:
    script = "echo $RANK; exec sleep 600"
    network = ["--hosts", "2", "--rate", "none", "--delay", "1ms"]
    with begin(["run", *network, "--", "sh", "-c", script], stdout=subprocess.PIPE) as job:
        assert job.stdout
        assert {job.stdout.readline(), job.stdout.readline()} == {"0\n", "1\n"}
        name = f"run-{job.pid}"
        processes = running(made(name))
        assert len(processes) >= 2
        job.send_signal(signum)
        if signum == signal.SIGKILL:
            assert job.wait(timeout=60) == -signum
            assert len(made(name)) == 3
            assert len(record.down(None)) == 1
        else:
            assert job.wait(timeout=60) == 128 + signum
    assert not made(name)
    assert ended(processes)
    assert not list(folder.iterdir())
