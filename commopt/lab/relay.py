"""Delays what hosts send, where the kernel has no netem: a process that carries the packets of all links itself.

    python relay.py RECORD HOSTS

It makes two interfaces for every host, ``far0``, ``far1``, ... for the hosts and ``port0``, ``port1``, ... for the
switch, goes into the background, and carries Ethernet frames between ``farI`` and ``portI`` until it is ended; the
interfaces end with it. A frame that comes from a host leaves after the delay, one that goes to a host leaves at once.
Frames keep their order. The delay stands in RECORD, as ``{"delay": seconds}``, which is read again when it changes.

The interfaces are TAP devices of Linux. They take whole segments of up to 64 kB (``IFF_VNET_HDR``: a header, which is
passed on as it is, tells the kernel what is left to do), so that few of them come through here. It starts at once
because it imports nothing of this package.
"""

import fcntl
import json
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

# From linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4

FRAME = 1 << 17  # more than a segment with its headers
TURN = 32  # frames taken from one interface before the others have their turn
LOOK_SECONDS = 0.5  # how soon a new delay is seen


class Delay:
    """The delay in seconds, as it stands in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked = time.monotonic()
        self._changed = path.stat().st_mtime_ns
        self.seconds = self._read()

    def look(self) -> None:
        """Read it again if it has changed; ``FileNotFoundError`` if the lab is gone."""
        if (now := time.monotonic()) > self._looked + LOOK_SECONDS:
            self._looked = now
            if (changed := self._path.stat().st_mtime_ns) != self._changed:
                self._changed, self.seconds = changed, self._read()

    def _read(self) -> float:
        return float(json.loads(self._path.read_text())["delay"])


def tap(name: str) -> int:
    """A new TAP device in the network namespace of this process; its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return device


def carry(far: list[int], ports: list[int], delay: Delay) -> None:
    """Carries frames until the lab is gone."""
    to_host, to_switch = dict(zip(ports, far, strict=True)), dict(zip(far, ports, strict=True))
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        delay.look()
        now = time.monotonic()
        while held and held[0][0] <= now:
            send(*held.popleft()[1:])
        wait = held[0][0] - now if held else LOOK_SECONDS
        for device in select.select([*far, *ports], [], [], wait)[0]:
            for frame in taken(device):
                if device in to_host:
                    send(to_host[device], frame)
                else:
                    held.append((time.monotonic() + delay.seconds, to_switch[device], frame))


def taken(device: int) -> list[bytes]:
    """Frames that wait at an interface."""
    frames: list[bytes] = []
    with suppress(BlockingIOError):
        while len(frames) < TURN:
            frames.append(os.read(device, FRAME))
    return frames


def send(device: int, frame: bytes) -> None:
    """On an interface that is down or full the frame is lost, as on any network."""
    with suppress(OSError):
        os.write(device, frame)


def into_background() -> None:
    """The caller's wait ends here, and nothing of it stays open. A network does not wait for cores that train."""
    if os.fork():
        os._exit(0)
    with suppress(PermissionError):
        os.nice(-10)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)


def main() -> None:
    """Ends in the caller's eyes when the interfaces are there."""
    delay, hosts = Delay(Path(sys.argv[1])), range(int(sys.argv[2]))
    try:
        far, ports = ([tap(f"{end}{host}") for host in hosts] for end in ("far", "port"))
    except OSError as error:
        sys.exit(f"no TAP device: {error}")
    into_background()
    with suppress(FileNotFoundError):
        carry(far, ports, delay)


if __name__ == "__main__":
    main()
