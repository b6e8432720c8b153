"""What hosts of a lab send each other in tests. Run on every host; the last word goes into FILE.

python traffic.py FILE transfer RANK BYTES     RANK sends to host 0: bits per second
python traffic.py FILE round_trip COUNT        between hosts 0 and 1: the least seconds
python traffic.py FILE datagrams COUNT         host 1 sends to host 0: how many arrive
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANK = int(os.environ["RANK"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def transfer(file: Path, sender: str, size: str) -> None:
    if RANK == 0:
        with socket.create_server(ADDRESS) as server, server.accept()[0] as peer:
            begun, left = time.monotonic(), int(size)
            while left:
                left -= len(peer.recv(min(left, 1 << 20)))
            file.write_text(str(int(size) * 8 / (time.monotonic() - begun)))
            peer.sendall(b"!")
    elif int(sender) == RANK:
        with connected() as peer:
            peer.sendall(bytes(int(size)))
            assert peer.recv(1) == b"!"


def round_trip(file: Path, count: str) -> None:
    if RANK == 0:
        with socket.create_server(ADDRESS) as server, server.accept()[0] as peer:
            while peer.recv(1):
                peer.sendall(b"!")
    elif RANK == 1:
        seconds = []
        with connected() as peer:
            for _ in range(int(count)):
                begun = time.monotonic()
                peer.sendall(b"?")
                peer.recv(1)
                seconds.append(time.monotonic() - begun)
        file.write_text(str(min(seconds)))


def datagrams(file: Path, count: str) -> None:
    ready = file.with_suffix(".ready")
    with socket.socket(type=socket.SOCK_DGRAM) as here:
        if RANK == 0:
            here.setsockopt(socket.SOL_SOCKET, 33, 1 << 25)  # SO_RCVBUFFORCE: none is lost by being slow
            here.bind(ADDRESS)
            ready.touch()
            arrived = 0
            try:
                while True:
                    here.recv(2000)
                    here.settimeout(1.0)  # of silence after the first
                    arrived += 1
            except TimeoutError:
                file.write_text(str(arrived))
        elif RANK == 1:
            while not ready.exists():
                pass
            for _ in range(int(count)):
                here.sendto(bytes(1000), ADDRESS)
            ready.unlink()


def connected() -> socket.socket:
    while True:
        try:
            peer = socket.create_connection(ADDRESS)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer
        except ConnectionRefusedError:
            pass


if __name__ == "__main__":
    does: dict[str, Callable[..., None]] = {"transfer": transfer, "round_trip": round_trip, "datagrams": datagrams}
    file, what, *arguments = sys.argv[1:]
    does[what](Path(file), *arguments)
