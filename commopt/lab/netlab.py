"""A network of a few hosts on one machine: each host is a Linux network namespace behind a link of a chosen rate.

    commopt lab run --hosts 2 --rate 100mbit -- python train.py

Needs Linux, root and iproute2. docs/lab.md shows what is made.
"""

import itertools
import os
import secrets
from types import TracebackType

from commopt.errors import ConfigError, LabError
from commopt.lab import links, record, units
from commopt.lab.loopback import Loopback, uninterrupted
from commopt.lab.record import Record
from commopt.lab.system import namespaces, require, sh

_serial = itertools.count()


class Lab(Loopback):
    """A lab that is up: runs jobs in it and changes its links. Leaving it ends the jobs, and the lab stays."""

    interface = "eth0"
    master = links.address(0)

    def __init__(self, record: Record) -> None:
        super().__init__(len(record.rates))
        self.record = record
        # The namespace is the lab's alone, and below the ports that the kernel gives out only jobs begun by others
        # would be in the way: a random start keeps clear of them.
        self._ports = itertools.count(20_000 + secrets.randbelow(10_000))

    @classmethod
    def find(cls, name: str | None = None) -> "Lab":
        """The lab of this name; without a name, the one that is up. Raises ``LabError`` if there is none."""
        require()
        found = record.find(name)
        if not {found.switch, *found.hosts} <= namespaces():
            raise LabError(f"the lab {found.name!r} is not whole (after a restart?): commopt lab down")
        return cls(found)

    def set_rate(self, rate: str, host: int | None = None) -> None:
        """Change the rate of one host's link or of all, both ways; may be called while a job runs."""
        if (checked := units.rate(rate)) is None or None in self.record.rates:
            raise ConfigError("links are shaped when a lab is made, or stay unshaped: make one with --rate")
        if host is not None and not 0 <= host < self.hosts:
            raise ConfigError(f"host {host} is not one of 0 to {self.hosts - 1}")
        for rank in range(self.hosts) if host is None else (host,):
            before, self.record.rates[rank] = self.record.rates[rank], checked
            try:
                links.limit(self.record, rank)
            except LabError:
                self.record.rates[rank] = before
                raise
            self.record.save()

    def set_delay(self, delay: str) -> None:
        """Change the delay of all links; may be called while a job runs, and is seen within a second."""
        self.record.delay = units.delay(delay)
        links.delay(self.record)
        self.record.save()

    def set_loss(self, loss: str) -> None:
        """Change the loss of all links; may be called while a job runs."""
        self.record.loss = units.loss(loss)
        links.lose(self.record)
        self.record.save()

    def sent_bytes(self, host: int) -> int:
        """Bytes that the kernel sent on ``eth0`` of this host since the lab was made, headers included."""
        counter = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(sh(*self._prefix(host), "cat", counter))

    def _prefix(self, rank: int) -> list[str]:
        return ["ip", "netns", "exec", self.record.hosts[rank]]

    def _free_port(self) -> int:
        return next(self._ports)


class NetLab(Lab):
    """``hosts`` namespaces, each limited to ``rate`` ("100mbit", "1gbit"; None: unshaped) both ways; what a host sends
    arrives ``delay`` later ("20ms"), but for the share ``loss`` ("1%"). In ``racks``, the links between racks have a
    rate of their own.

    A context manager. Leaving it, also by an exception or Ctrl-C, ends what runs in the lab and removes the namespaces
    that this lab made, no others; after a crash ``commopt lab down`` does. Labs can exist side by side. Raises
    ``ConfigError`` for values out of range, and on entering ``LabError`` where the network cannot be made.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None,
        *,
        delay: str | None = None,
        loss: str | None = None,
        racks: int = 1,
        between_racks: str | None = None,
        name: str | None = None,
    ) -> None:
        name = name or f"run-{os.getpid()}-{next(_serial)}"
        super().__init__(Record.planned(name, hosts, rate, delay, loss, racks, between_racks))

    def __enter__(self) -> "NetLab":
        require()
        self.record.create()
        try:
            links.build(self.record)
        except BaseException:
            self.record.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            super().__exit__(kind, error, trace)
            self.record.remove()

    def up(self) -> None:
        """Make it, and leave it up: it stays when this process ends, until ``down``."""
        self.__enter__()
        self.record.owner = None
        self.record.save()


def available() -> str | None:
    """Why a shaped network cannot be made on this machine, or None when it can."""
    try:
        with NetLab(hosts=1, rate="100mbit"):
            return None
    except LabError as error:  # among them: a container without the capabilities, a kernel without veth, bridge or tbf
        return str(error)


def open_lab(hosts: int, rate: str) -> Loopback:
    """The lab that a command line asks for: "loopback", "none" (namespaces, unshaped), or a rate."""
    if rate == "loopback":
        return Loopback(hosts)
    if reason := available():
        raise LabError(f"{reason}. Without a shaped network, use --rate loopback")
    return NetLab(hosts, rate)
