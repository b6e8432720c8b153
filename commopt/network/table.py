"""What was measured of a network, as a value that is the same on all ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from commopt.errors import ConfigError
from commopt.network.curve import Curve, number

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


@dataclass(frozen=True)
class Link:
    """Between two hosts, both ways at once.

    Args:
        latency: seconds that the smallest message takes one way, software included.
        curve: bytes each way -> seconds, in messages that follow each other without a pause.
    """

    latency: float
    curve: Curve

    @property
    def bandwidth(self) -> float:
        """Bytes/s each way at the largest size that was measured."""
        return self.curve.rate


@dataclass(frozen=True)
class Network:
    """The network of one process group.

    Args:
        hosts: the host of each rank, numbered from 0 in order of appearance.
        links: by hosts (i, j) with i < j, between the lowest ranks of both; where hosts are many, between some of them.
            (0, 0), loopback, where several ranks share one host.
        collectives: for each of `COLLECTIVES`, bytes that one rank hands over (``Transfer.numel * itemsize``) ->
            seconds of the slowest rank, in collectives that follow each other without a pause. Empty for a single rank.
        cpu_share: CPU seconds of the slowest rank in a second of large collectives: on loopback, cores are the wire.
        piece: bytes that messages from peer to peer were cut into.
    """

    hosts: tuple[int, ...]
    links: Mapping[tuple[int, int], Link]
    collectives: Mapping[str, Curve]
    cpu_share: float
    piece: int

    @property
    def slowest(self) -> Link | None:
        """The link of least bandwidth; None for a single rank."""
        return min(self.links.values(), key=lambda link: link.bandwidth, default=None)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        links = [
            {"hosts": list(pair), "latency": link.latency, "curve": link.curve.to_plain()}
            for pair, link in self.links.items()
        ]
        return {
            "hosts": list(self.hosts),
            "links": links,
            "collectives": {name: curve.to_plain() for name, curve in self.collectives.items()},
            "cpu_share": self.cpu_share,
            "piece": self.piece,
        }

    @classmethod
    def from_plain(cls, plain: Any) -> "Network":
        """The inverse of `to_plain`; raises ``ConfigError`` for anything else."""
        try:
            hosts = tuple(_host(host) for host in plain["hosts"])
            links = {
                (_host(entry["hosts"][0]), _host(entry["hosts"][1])): Link(
                    number(entry["latency"]), Curve.from_plain(entry["curve"])
                )
                for entry in plain["links"]
            }
            collectives = {str(name): Curve.from_plain(curve) for name, curve in plain["collectives"].items()}
            cpu_share = number(plain["cpu_share"])
            piece = number(plain["piece"])
        except (TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"these plain values are no network: {type(error).__name__}: {error}.") from error
        known = {host for pair in links for host in pair} <= set(hosts)
        expected = set(COLLECTIVES) if len(hosts) > 1 else set()
        numbers = [cpu_share, *(link.latency for link in links.values())]
        if not known or set(collectives) != expected or bool(links) != bool(expected):
            raise ConfigError("these plain values are no network: hosts, links and collectives do not belong together.")
        if not all(0 <= value < math.inf for value in numbers):
            raise ConfigError("these plain values are no network: a latency or a share of CPU is out of range.")
        if not 1 <= piece < math.inf:
            raise ConfigError("these plain values are no network: pieces have at least one byte, and an end.")
        return cls(hosts, links, collectives, cpu_share, int(piece))

    def scaled(self, factor: float) -> "Network":
        """Where collectives take ``factor`` times as long."""
        return replace(self, collectives={op: curve.scaled(factor) for op, curve in self.collectives.items()})


def _host(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"expected the number of a host, got {value!r}.")
    return value
