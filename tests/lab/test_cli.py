"""``commopt lab``."""

import os
import sys
from collections.abc import Callable

import pytest

from commopt.cli import main
from commopt.lab import record
from commopt.lab.system import sh

pytestmark = pytest.mark.usefixtures("handlers")


def lab(*arguments: str) -> int:
    return main(["lab", *arguments])


def job(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        lab("run", *arguments)
    return ended.value.code


@pytest.mark.usefixtures("machine")
def test_a_lab_stays_until_it_goes(made: Callable[[str], set[str]], capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        lab("up", "--hosts", "3", "--rate", "100mbit", "--delay", "2ms", "--racks", "2", "--between-racks", "50mbit")
        == 0
    )
    try:
        printed = capfd.readouterr().out
        assert printed.startswith("lab: 3 hosts, delay 2ms, loss 0%, 2 racks, 50mbit between\n")
        assert job("--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE") == 0
        assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]
        assert job("--", "sh", "-c", "exit $RANK") == 1
        assert lab("rate", "25mbit") == lab("rate", "5mbit", "--host", "1") == lab("delay", "3ms") == 0
        assert lab("status") == 0
        printed = capfd.readouterr().out
        assert "delay 3ms" in printed
        assert "host 1: 10.77.0.2, 5mbit, rack 0, namespace " in printed
        assert "host 2: 10.77.0.3, 25mbit, rack 1, namespace " in printed
        found = record.find("lab")
        assert made(found.prefix) == {found.switch, *found.hosts}
        assert "rate 5Mbit" in sh("tc", "-n", found.hosts[1], "qdisc", "show", "dev", "eth0")
        assert lab("up") == 2
        assert "'lab' already" in capfd.readouterr().err
    finally:
        assert lab("down") == 0
    assert capfd.readouterr().out == "Removed: lab\n"
    assert not made(found.prefix)
    assert lab("down") == 0
    assert capfd.readouterr().out == "Removed: nothing was up\n"


def test_a_command_that_does_not_exist_is_said_before_anything_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert job("--hosts", "2", "--", "no-such-command") == 127
    assert capsys.readouterr().err == "commopt: no-such-command: no such command\n"


@pytest.mark.usefixtures("machine")
def test_one_call_makes_runs_and_removes(name: str, made: Callable[[str], set[str]]) -> None:
    assert job("--hosts", "2", "--name", name, "--", sys.executable, "-c", "raise SystemExit(4)") == 4
    assert not made(name)


@pytest.mark.usefixtures("machine")
def test_a_lab_that_is_not_whole_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab("up", "--hosts", "1") == 0
    sh("ip", "netns", "del", record.find("lab").hosts[0])
    assert lab("run", "--", "true") == 2
    assert "not whole" in capsys.readouterr().err
    assert lab("down") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "0"], "1 to 250 hosts"),
        (["--hosts", "251"], "1 to 250 hosts"),
        (["--hosts", "2", "--racks", "3"], "in 1 to 2 racks"),
        (["--racks", "0"], "in 1 to 2 racks"),
        (["--between-racks", "1mbit"], "two or more racks"),
        (["--racks", "2", "--between-racks", "much"], "'much' is not a rate"),
        *((["--rate", rate], "is not a rate") for rate in ("fast", "100", "-1mbit", "100mbps", "1mbit 2")),
        *((["--rate", rate], "(8kbit to 400gbit)") for rate in ("0mbit", "1kbit", "500gbit")),
        *((["--delay", delay], "is not a delay") for delay in ("20", "-1ms", "20m", "11s", "long")),
        *((["--loss", loss], "is not a loss") for loss in ("1", "101%", "-1%", "0.01", "nan%")),
        (["--name", "../mine"], "is not a name"),
    ],
    ids=str,
)
def test_values_out_of_range(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"{option}={value}" for option, value in zip(arguments[::2], arguments[1::2], strict=True)]
    for action in (["up", *arguments], ["run", "--hosts=2", *arguments, "--", "true"]):
        assert lab(*action) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("commopt: ")
        assert said in printed.err
        assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "action",
    [["up"], ["run", "--", "true"], ["rate", "1mbit"], ["delay", "1ms"], ["loss", "1%"], ["status"], ["down"]],
    ids=str,
)
def test_without_the_rights(
    action: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr(sys, "platform", "linux")
    assert lab(*action) == 2
    assert capsys.readouterr().err == "commopt: network namespaces need root\n"
