"""Makes the network of a lab: hosts, links, racks, and what slows them.

Every host has an interface ``eth0`` (10.77.0.1, 10.77.0.2, ...), joined to a port of the switch of its rack. Token
buckets on both ends of a link limit what the host sends and what it receives. The switches of racks are joined to a
core switch by links of their own. All switches live in one namespace of the lab, so that nothing is added to the
machine's own network.
"""

import shutil
import sys
from pathlib import Path

from commopt.errors import LabError
from commopt.lab.record import Record
from commopt.lab.system import has_netem, sh

RELAY = Path(__file__).with_name("relay.py")
TUN = Path("/dev/net/tun")

# What a link may send at once after a silence (6.5 ms worth at 100 Mbit/s). It holds one whole 64 kB segment of the
# network stack: with less, the kernel cuts segments into packets in software, on the cores that train, which no network
# card asks of its host. More would let a small gradient through unshaped.
BURST = "80kb"

PARTS = 1_000_000  # of which a lost packet is one of so many

# Lost on arrival: a packet that cannot be sent is an error to TCP and no loss.
LOSE = """\
table inet lab {{}}
delete table inet lab
table inet lab {{
    chain arrive {{
        type filter hook prerouting priority 0
        iifname "eth0" numgen random mod {parts} < {lost} drop
    }}
}}
"""


def build(record: Record) -> None:
    """Makes everything that the record plans; it was written before."""
    for namespace in (record.switch, *record.hosts):
        sh("ip", "netns", "add", namespace)
        sh("ip", "-n", namespace, "link", "set", "lo", "up")
    record.netem = has_netem(record.switch)
    record.relay = bool(record.delay) and not record.netem
    record.save()
    _join_racks(record)
    if record.relay:
        _start_relay(record)
    for rank, host in enumerate(record.hosts):
        if record.relay:
            sh("ip", "-n", record.switch, "link", "set", f"far{rank}", "netns", host, "name", "eth0")
        else:
            veth = ["type", "veth", "peer", "name", "eth0", "netns", host]
            sh("ip", "-n", record.switch, "link", "add", f"port{rank}", *veth)
        sh("ip", "-n", record.switch, "link", "set", f"port{rank}", "master", f"rack{record.rack(rank)}", "up")
        sh("ip", "-n", host, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        sh("ip", "-n", host, "link", "set", "eth0", "up")
        limit(record, rank)
    if record.loss:
        lose(record)
    if record.delay:
        delay(record)


def address(rank: int) -> str:
    """Of a host, in the lab."""
    return f"10.77.0.{rank + 1}"


def limit(record: Record, rank: int) -> None:
    """Both ends of a host's link take the rate that is recorded for it."""
    if (rate := record.rates[rank]) is not None:
        _limit(record.hosts[rank], "eth0", rate)
        _limit(record.switch, f"port{rank}", rate)


def delay(record: Record) -> None:
    """All hosts take the recorded delay."""
    if record.netem:
        _netem(record)
    elif not record.relay:  # which reads the record by itself
        raise LabError("this kernel has no netem, and the lab was made without a delay: make one with --delay")


def lose(record: Record) -> None:
    """All hosts take the recorded loss.

    Segments travel as single packets, or a whole one were lost at a time; connections that are open keep theirs.
    """
    for host in record.hosts:
        sh("ip", "-n", host, "link", "set", "eth0", "gso_max_segs", "1")
    if record.netem:
        _netem(record)
        return
    if not shutil.which("nft"):
        raise LabError("loss needs netem, which this kernel does not have, or nft (apt-get install nftables)")
    rules = LOSE.format(parts=PARTS, lost=round(record.loss * PARTS))
    for host in record.hosts:
        sh("ip", "netns", "exec", host, "nft", "-f", "-", stdin=rules)


def _join_racks(record: Record) -> None:
    switches = [f"rack{rack}" for rack in range(record.racks)]
    for switch in switches if record.racks == 1 else [*switches, "core"]:
        sh("ip", "-n", record.switch, "link", "add", switch, "type", "bridge")
        sh("ip", "-n", record.switch, "link", "set", switch, "up")
    for rack in range(record.racks) if record.racks > 1 else ():
        up, down = f"up{rack}", f"down{rack}"
        sh("ip", "-n", record.switch, "link", "add", up, "type", "veth", "peer", "name", down)
        for device, switch in ((up, f"rack{rack}"), (down, "core")):
            sh("ip", "-n", record.switch, "link", "set", device, "master", switch, "up")
            if record.between_racks is not None:
                _limit(record.switch, device, record.between_racks)


def _start_relay(record: Record) -> None:
    """Returns when its interfaces are there."""
    if not TUN.exists():
        raise LabError(f"delay needs netem, which this kernel does not have, or {TUN} (modprobe tun)")
    python = [sys.executable, "-I", "-S", str(RELAY)]
    sh("ip", "netns", "exec", record.switch, *python, str(record.path), str(len(record.hosts)))


def _limit(namespace: str, device: str, rate: str) -> None:
    bucket = ["tbf", "rate", rate, "burst", BURST, "latency", "100ms"]
    sh("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "handle", "1:", *bucket)


def _netem(record: Record) -> None:
    """Within the token bucket, where there is one: a change of its rate leaves netem as it is."""
    disturbed = ["delay", f"{record.delay * 1e6:.0f}us", "loss", f"{record.loss:%}", "limit", "10000"]
    for host, rate in zip(record.hosts, record.rates, strict=True):
        place = ["root"] if rate is None else ["parent", "1:1"]
        sh("tc", "-n", host, "qdisc", "replace", "dev", "eth0", *place, "handle", "2:", "netem", *disturbed)
