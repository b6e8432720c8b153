"""What is written down about a lab, before any of it is made: the one place that says what may be removed."""

import json
import os
import re
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from commopt.errors import ConfigError, LabError
from commopt.lab import units
from commopt.lab.loopback import uninterrupted
from commopt.lab.system import namespaces, sh

FOLDER = Path("/run/commopt-lab")
MOST_HOSTS = 250  # they share one network, 10.77.0.0/24


@dataclass
class Record:
    """A lab as it stands in ``FOLDER/NAME.json``. The names of its namespaces follow from it, and nobody else has
    them: they carry a random part."""

    name: str
    prefix: str
    owner: list[str] | None  # the process that it ends with, and when that began; None: it stays until "down"
    rates: list[str | None]  # of the link of each host
    delay: float  # seconds, added to what a host sends
    loss: float  # share of the packets that a host sends
    racks: int
    between_racks: str | None
    netem: bool = False  # the kernel delays and loses packets
    relay: bool = False  # a process of ours delays them

    @classmethod
    def planned(
        cls,
        name: str,
        hosts: int,
        rate: str | None,
        delay: str | None,
        loss: str | None,
        racks: int,
        between_racks: str | None,
    ) -> "Record":
        """Of a lab to be made by this process. Raises ``ConfigError`` for a value out of range."""
        if not re.fullmatch(r"[\w-]{1,40}", name):
            raise ConfigError(f"{name!r} is not a name for a lab: letters, digits, - and _, at most 40")
        if not 1 <= hosts <= MOST_HOSTS:
            raise ConfigError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
        if not 1 <= racks <= hosts:
            raise ConfigError(f"{hosts} hosts stand in 1 to {hosts} racks, not in {racks}")
        if racks == 1 and between_racks is not None:
            raise ConfigError("a rate between racks needs two or more racks")
        return cls(
            name,
            f"{name}-{secrets.token_hex(4)}",
            identity(os.getpid()),
            [units.rate(rate)] * hosts,
            units.delay(delay),
            units.loss(loss),
            racks,
            units.rate(between_racks),
        )

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @property
    def switch(self) -> str:
        return f"{self.prefix}-switch"

    @property
    def hosts(self) -> list[str]:
        return [f"{self.prefix}-h{rank}" for rank in range(len(self.rates))]

    def rack(self, rank: int) -> int:
        """The rack of a host: neighbours stand together."""
        return rank * self.racks // len(self.rates)

    def owned(self) -> bool:
        """Whether the process that the lab ends with still runs."""
        return self.owner is not None and identity(int(self.owner[0])) == self.owner

    def create(self) -> None:
        """Writes it for the first time; a ``LabError`` where there is a lab of this name."""
        FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._draft()
        try:
            os.link(draft, self.path)
        except FileExistsError:
            raise LabError(f"there is a lab {self.name!r} already: commopt lab down, or another --name") from None
        finally:
            draft.unlink()

    def save(self) -> None:
        """Writes what has changed, whole or not at all."""
        self._draft().replace(self.path)

    def _draft(self) -> Path:
        draft = FOLDER / f"{self.prefix}.{os.getpid()}.draft"
        draft.write_text(json.dumps(asdict(self)))
        return draft

    def remove(self) -> None:
        """Ends what runs in the namespaces of this lab, removes them, and then the record. Interfaces go with them."""
        with uninterrupted():
            present = sorted(namespaces() & {self.switch, *self.hosts})
            _end(present)
            for namespace in present:
                sh("ip", "netns", "del", namespace)
            self.path.unlink(missing_ok=True)


def everything() -> list[Record]:
    """All labs of this machine, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.json"))]


def find(name: str | None) -> Record:
    """The lab of this name; without a name, the one that is up. Raises ``LabError`` where there is none or a choice."""
    up = [record for record in everything() if (record.owner is None if name is None else record.name == name)]
    if not up:
        raise LabError(f"no lab {name!r} is up" if name else "no lab is up: commopt lab up --hosts 2 --rate 100mbit")
    if len(up) > 1:
        raise LabError(f"which lab? --name {' or '.join(record.name for record in up)}")
    return up[0]


def down(name: str | None) -> list[str]:
    """Removes the lab of this name; without a name, what processes that have ended left behind, and the lab that is up.

    Returns the names. Raises ``LabError`` for a lab whose process still runs, and where several are up.
    """
    if name is not None:
        named = find(name)
        if named.owner and named.owned():
            raise LabError(f"the lab {name!r} ends with process {named.owner[0]}, which still runs")
        condemned = [named]
    else:
        labs = everything()
        condemned = [lab for lab in labs if lab.owner is not None and not lab.owned()]
        if any(lab.owner is None for lab in labs):
            condemned.append(find(None))
    for lab in condemned:
        lab.remove()
    return [lab.name for lab in condemned]


def identity(pid: int) -> list[str] | None:
    """A process, told from a later one of the same number by when it began; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return None if state == "Z" else [str(pid), fields[18]]


def _read(path: Path) -> Record:
    try:
        return Record(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise LabError(f"{path} is not the record of a lab: {error}") from error


def _end(present: list[str]) -> None:
    """End all processes in these namespaces: asked first, then killed."""
    for signum, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience
        for pid in _processes(present):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        while _processes(present) and time.monotonic() < deadline:
            time.sleep(0.01)


def _processes(present: list[str]) -> list[int]:
    """All but this one, which may have been called from a shell of the lab."""
    pids = [int(pid) for namespace in present for pid in sh("ip", "netns", "pids", namespace).split()]
    return [pid for pid in pids if pid != os.getpid()]
