"""A network of a few hosts on one machine: each host is a Linux network namespace behind a link of a chosen rate.

    commopt lab run --hosts 2 --rate 100mbit -- python train.py

Every host has an interface ``eth0`` (10.77.0.1, 10.77.0.2, ...) joined by a veth pair to one switch. A token bucket on
both ends of the pair limits what the host sends and what it receives. The switch lives in a namespace of its own, so
nothing is added to the machine's own network. Needs Linux, root and iproute2.
"""

import itertools
import os
import shutil
import subprocess
import sys
from types import TracebackType

from commopt.errors import LabError
from commopt.lab.loopback import Loopback, uninterrupted

# What a link may send at once after a silence (6.5 ms worth at 100 Mbit/s). It holds one whole 64 kB segment of the
# network stack: with less, the kernel cuts segments into packets in software, on the cores that train, which no network
# card asks of its host. More would let a small gradient through unshaped.
BURST = "80kb"

_serial = itertools.count()


def available() -> str | None:
    """Why a shaped network cannot be made on this machine, or None when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with NetLab(hosts=1, rate="100mbit"):
            return None
    except LabError as error:  # a container without the capabilities, or a kernel without veth, bridge or tbf
        return str(error)


class NetLab(Loopback):
    """``hosts`` namespaces, each limited to ``rate`` (as tc writes it: "100mbit", "1gbit"; None: unshaped) both ways.

    A context manager. Leaving it, also by an exception or Ctrl-C, ends what was started in the lab and removes the
    namespaces that this lab made, no others. Labs have names of their own and can exist side by side.
    """

    interface = "eth0"
    master = "10.77.0.1"

    def __init__(self, hosts: int, rate: str | None) -> None:
        super().__init__(hosts)
        self.rate = rate
        self._made: list[str] = []
        self._ports = itertools.count(29500)  # the namespace is ours alone: a port not yet used here is free
        name = f"netlab-{os.getpid()}-{next(_serial)}"
        self._switch = f"{name}-switch"
        self._hosts = [f"{name}-h{rank}" for rank in range(hosts)]

    def __enter__(self) -> "NetLab":
        try:
            for namespace in [self._switch, *self._hosts]:
                _sh("ip", "netns", "add", namespace)
                self._made.append(namespace)
                _sh("ip", "-n", namespace, "link", "set", "lo", "up")
            _sh("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _sh("ip", "-n", self._switch, "link", "set", "switch", "up")
            for rank, host in enumerate(self._hosts):
                veth = ["link", "add", f"port{rank}", "type", "veth", "peer", "name", "eth0", "netns", host]
                _sh("ip", "-n", self._switch, *veth)
                _sh("ip", "-n", self._switch, "link", "set", f"port{rank}", "master", "switch", "up")
                _sh("ip", "-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
                _sh("ip", "-n", host, "link", "set", "eth0", "up")
            self.set_rate(self.rate)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        with uninterrupted():
            while self._made:  # the interfaces go with their namespaces
                subprocess.run(["ip", "netns", "del", self._made.pop()], check=False, start_new_session=True)

    def set_rate(self, rate: str | None) -> None:
        """Change the rate of every link, both ways; may be called while a job runs."""
        for rank, host in enumerate(self._hosts):
            for namespace, device in ((host, "eth0"), (self._switch, f"port{rank}")):
                if rate is not None:
                    bucket = ["tbf", "rate", rate, "burst", BURST, "latency", "100ms"]
                    _sh("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)
                elif self.rate is not None:
                    _sh("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        self.rate = rate

    def sent_bytes(self, host: int) -> int:
        """Bytes that the kernel sent on ``eth0`` of this host since the lab was made, headers included."""
        counter = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(_sh("ip", "netns", "exec", self._hosts[host], "cat", counter))

    def _prefix(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self._hosts[rank]]

    def _free_port(self) -> int:
        return next(self._ports)


def open_lab(hosts: int, rate: str) -> Loopback:
    """The lab that a command line asks for: "loopback", "none" (namespaces, unshaped), or a rate."""
    if rate == "loopback":
        return Loopback(hosts)
    if reason := available():
        raise LabError(f"{reason}. Without a shaped network, use --rate loopback")
    return NetLab(hosts, None if rate == "none" else rate)


def _sh(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
