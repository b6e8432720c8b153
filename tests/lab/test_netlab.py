"""Links of a lab: what real traffic finds, before and after a change."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commopt.errors import ConfigError, LabError
from commopt.lab import Lab, NetLab, available, links, open_lab, system

TRAFFIC = str(Path(__file__).with_name("traffic.py"))


def measured(lab: Lab, folder: Path, *what: object) -> float:
    assert lab.run(traffic(folder, *what), timeout=60) == 0
    return float((folder / "answer").read_text())


def traffic(folder: Path, *what: object) -> list[str]:
    return [sys.executable, "-S", TRAFFIC, str(folder / "answer"), *map(str, what)]


@pytest.mark.usefixtures("machine")
class TestLinks:
    def test_the_rate_holds_and_the_kernel_counts(self, tmp_path: Path) -> None:
        with NetLab(2, "40mbit") as lab:
            assert 20e6 < measured(lab, tmp_path, "transfer", 1, 2_000_000) < 45e6
            assert 2_000_000 < lab.sent_bytes(1) < 2_400_000  # with headers and what a busy machine sends again
            assert lab.sent_bytes(0) < 200_000

    def test_the_rate_changes_while_a_job_runs(self, tmp_path: Path) -> None:
        with NetLab(2, "8mbit") as lab:  # where it would take 8 seconds
            begun = time.monotonic()
            job = lab.popen(traffic(tmp_path, "transfer", 1, 8_000_000))
            while lab.sent_bytes(1) < 200_000:
                assert job[0].poll() is None
            lab.set_rate("400mbit")
            assert [process.wait(timeout=60) for process in job] == [0, 0]
            assert time.monotonic() - begun < 4

    def test_one_host_is_slower(self, tmp_path: Path) -> None:
        with NetLab(3, "400mbit") as lab:
            lab.set_rate("8mbit", host=1)
            assert measured(lab, tmp_path, "transfer", 1, 500_000) < 10.5e6
            assert measured(lab, tmp_path, "transfer", 2, 500_000) > 20e6

    def test_the_way_between_racks_is_slower(self, tmp_path: Path) -> None:
        with NetLab(3, "400mbit", racks=2, between_racks="8mbit") as lab:
            assert [lab.record.rack(host) for host in range(3)] == [0, 0, 1]
            assert measured(lab, tmp_path, "transfer", 1, 500_000) > 20e6
            assert measured(lab, tmp_path, "transfer", 2, 500_000) < 12.5e6  # two token buckets are full at first

    def test_delay(self, means: str, tmp_path: Path) -> None:
        with NetLab(2, "100mbit", delay="20ms") as lab:
            assert lab.record.relay == (means == "relay")
            assert 0.040 <= measured(lab, tmp_path, "round_trip", 10) < 0.075
            assert 30e6 < measured(lab, tmp_path, "transfer", 1, 10_000_000) < 105e6
            lab.set_delay("5ms")
            deadline = time.monotonic() + 10
            while measured(lab, tmp_path, "round_trip", 10) >= 0.025:
                assert time.monotonic() < deadline
            assert measured(lab, tmp_path, "round_trip", 10) >= 0.010

    @pytest.mark.parametrize("delay", [None, "1ms"])
    def test_loss(self, means: str, delay: str | None, tmp_path: Path) -> None:
        if means == "relay" and not shutil.which("nft"):
            pytest.skip("this kernel has no netem, and nft is not there (apt-get install nftables)")
        with NetLab(2, "40mbit", loss="20%", delay=delay) as lab:
            measured(lab, tmp_path, "datagrams", 10)  # few, while the hosts do not know each other's Ethernet address
            assert 1500 < measured(lab, tmp_path, "datagrams", 2000) < 1700
            lab.set_loss("0%")
            assert measured(lab, tmp_path, "datagrams", 2000) == 2000

    def test_two_labs_do_not_know_each_other(self, tmp_path: Path) -> None:
        with NetLab(2, "1gbit") as one:
            with NetLab(2, "1gbit") as other:
                measured(other, tmp_path, "transfer", 1, 500_000)
            assert one.sent_bytes(1) < 50_000
            measured(one, tmp_path, "transfer", 1, 500_000)  # leaving the other one took nothing of ours

    def test_netem_goes_into_the_token_bucket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels without netem take its place for a queue, and notice how it is put there."""
        log, tc = tmp_path / "log", tmp_path / "tc"
        tc.write_text(f"""#!/bin/sh
            case "$*" in *netem*) echo "$*" >>{log}; set -- $(echo "$*" | sed "s/netem.*/pfifo/") ;; esac
            exec {shutil.which("tc")} "$@"
            """)
        tc.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with NetLab(2, "100mbit", delay="20ms", loss="1%") as lab:
            assert lab.record.netem
            assert not lab.record.relay
            for host in lab.record.hosts:
                (last,) = [line for line in log.read_text().splitlines() if host in line][-1:]
                assert last.endswith("parent 1:1 handle 2: netem delay 20000us loss 1.000000% limit 10000")
            lab.set_rate("50mbit")
            for host in lab.record.hosts:
                shown = system.sh("tc", "-n", host, "qdisc", "show", "dev", "eth0")
                assert "tbf 1: root" in shown
                assert "rate 50Mbit" in shown
                assert "pfifo 2: parent 1:1" in shown

    def test_a_link_that_is_not_shaped_stays_so(self) -> None:
        with NetLab(1, None) as lab, pytest.raises(ConfigError, match="--rate"):
            lab.set_rate("1mbit")

    def test_a_delay_that_nothing_brings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(links, "has_netem", lambda namespace: False)
        with NetLab(1, "1gbit") as lab:
            with pytest.raises(LabError, match="make one with --delay"):
                lab.set_delay("1ms")
            with pytest.raises(ConfigError, match="host 1"):
                lab.set_rate("1mbit", host=1)

    @pytest.mark.parametrize(("wanted", "missing"), [({"delay": "1ms"}, "/no/tun"), ({"loss": "1%"}, "nft")])
    def test_what_a_kernel_without_netem_lacks(
        self,
        wanted: dict[str, Any],
        missing: str,
        name: str,
        made: Callable[[str], set[str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        which = shutil.which
        monkeypatch.setattr(links, "has_netem", lambda namespace: False)
        monkeypatch.setattr(links, "TUN", Path("/no/tun"))
        monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nft" else which(tool))
        with pytest.raises(LabError, match=missing), NetLab(1, None, name=name, **wanted):
            raise AssertionError("unreachable")
        assert not made(name)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert available() == "ip and tc not found: install iproute2 (apt-get install iproute2)"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert available() == "network namespaces need Linux"
    with pytest.raises(LabError, match=r"need Linux\. .*--rate loopback"):
        open_lab(2, "100mbit")


def test_rights_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.CompletedProcess((), 1, "", "mount --make-shared /run/netns failed: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(LabError, match="needs CAP_SYS_ADMIN and CAP_NET_ADMIN"):
        system.sh("ip", "netns", "add", "lab")
