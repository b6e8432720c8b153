"""One process a rank on this machine, talking over ``lo``: what a lab is before it has a network."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

GRACE_SECONDS = 5.0  # after the first failure of a rank, the time that the others have to report theirs
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hosts without a name server: torch warns at each connection


class Loopback:
    """The same interface without a network: every rank runs on this machine and talks over ``lo``."""

    interface = "lo"
    master = "127.0.0.1"

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            _kill(self._processes)

    def popen(
        self,
        cmd: Sequence[str],
        env: Mapping[str, str] | None = None,
        per_rank_env: Sequence[Mapping[str, str]] | None = None,
        **popen_kwargs: Any,
    ) -> list[subprocess.Popen[Any]]:
        """Start one copy of ``cmd`` a host, with the environment that ``torch.distributed`` and its launchers expect.

        Each copy leads a process group of its own: Ctrl-C reaches the caller alone, which ends them on leaving the lab.
        """
        port = str(self._free_port())
        started: list[subprocess.Popen[Any]] = []
        for rank in range(self.hosts):
            ranks = {name: str(rank) for name in ("RANK", "NODE_RANK", "GROUP_RANK")}
            world = {"WORLD_SIZE": str(self.hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": self.master, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": self.interface}
            own = per_rank_env[rank] if per_rank_env else {}
            full = {**_QUIET, **os.environ, **ranks, **world, **meeting, "OMP_NUM_THREADS": "1", **(env or {}), **own}
            command = [*self._prefix(rank), *cmd]
            process = subprocess.Popen(command, env=full, start_new_session=True, **popen_kwargs)
            self._processes.append(process)
            started.append(process)
        return started

    def run(self, cmd: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None) -> int:
        """Run one copy of ``cmd`` a host to the end; 0, or the exit status of a copy that failed, as a shell tells it
        (128 and the number of a signal).

        When one fails, the others are ended after a short grace. Raises ``subprocess.TimeoutExpired`` after ``timeout``
        seconds.
        """
        processes = self.popen(cmd, env)
        deadline = None if timeout is None else time.monotonic() + timeout
        failed_at: float | None = None
        try:
            while None in (states := [process.poll() for process in processes]):
                now = time.monotonic()
                if deadline is not None and now > deadline:
                    raise subprocess.TimeoutExpired(list(cmd), timeout or 0.0)
                if failed_at is None and any(states):
                    failed_at = now
                if failed_at is not None and now > failed_at + GRACE_SECONDS:
                    break
                time.sleep(0.02)
            status = next((process.returncode for process in processes if process.returncode), 0)
            return status if status >= 0 else 128 - status
        finally:
            _kill(processes)

    def _prefix(self, rank: int) -> list[str]:
        return []

    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self.master, 0))
            return int(probe.getsockname()[1])


def on_each_rank(module: str, ranks: int) -> int:
    """`on_each_host` of a loopback."""
    return on_each_host(module, Loopback(ranks))


def on_each_host(module: str, lab: Loopback) -> int:
    """Runs ``python -m module`` with the arguments of this process, once a host; the exit status. Whoever ends this
    process ends them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with lab:
        return lab.run([sys.executable, "-m", module, *sys.argv[1:]])


def _kill(processes: list[subprocess.Popen[Any]]) -> None:
    """End what still runs, with its children, also those of a process that has ended: asked first, then killed."""
    for signum, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        deadline = time.monotonic() + patience
        running = [process for process in processes if _signal(process, signum)]
        while any(_signal(process, 0) for process in running) and time.monotonic() < deadline:
            time.sleep(0.02)


def _signal(process: subprocess.Popen[Any], signum: int) -> bool:
    """To the process and its children; whether any of them is left."""
    process.poll()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
        return True
    return False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and termination until the block is done: half a clean-up leaves namespaces behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
