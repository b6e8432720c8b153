"""Living worker processes: torch is imported once a session, and each test gets a fresh process group.

    def check(rank: int, world: int, scale: float) -> float:      # at the top of a test module
        ...

    def test_something(workers: Workers) -> None:
        results = workers.run(check, world=3, scale=2.0)          # one result a rank

What a worker raises is raised in the test, with the worker's traceback; the filters for warnings are those of the test.
"""

import faulthandler
import math
import multiprocessing
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

MOST = 4
GROUP_TIMEOUT = timedelta(seconds=20)
GRACE = 30.0  # seconds beyond its timeout for a worker to end by itself

T = TypeVar("T")
Filter = tuple[Any, str, Any, str, int]


class WorkerError(Exception):
    """A worker that died or hung, or one whose exception cannot be carried over."""


class NotJoinedError(WorkerError):
    """A process group that did not come about."""


class Worker:
    """One process, started once. Its log holds the stacks of all its threads if it crashed or hung."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.pipe, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


class Workers:
    """Up to four living processes; a worker that dies or hangs is replaced at the next call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: dict[int, Worker] = {}
        self._calls = 0

    def run(self, fn: Callable[..., T], world: int = 2, timeout: float = 60.0, **kwargs: Any) -> list[T]:
        """Runs ``fn(rank, world, **kwargs)`` on ``world`` ranks of a fresh gloo group, and returns one result a rank.

        Args:
            fn: a function at the top of a module; it and its arguments and results are pickled.
            timeout: seconds after which a worker is ended with a dump of its stacks.

        Raises:
            Exception: the first one that was raised on any rank.
            WorkerError: a worker died or hung.
        """
        assert 1 <= world <= MOST
        try:
            return self._run(fn, world, timeout, kwargs)
        except NotJoinedError:  # nothing was tested yet
            return self._run(fn, world, timeout, kwargs)

    def _run(self, fn: Callable[..., T], world: int, timeout: float, kwargs: dict[str, Any]) -> list[T]:
        self._calls += 1
        store = self._folder / f"store{self._calls}"
        for rank in range(world):
            if rank not in self._workers or not self._workers[rank].process.is_alive():
                self._workers[rank] = Worker(self._folder / f"worker{rank}-{self._calls}.log")
        filters = _filters()
        for rank in range(world):
            self._workers[rank].pipe.send((fn, rank, world, str(store), timeout, filters, kwargs))

        results: dict[int, T] = {}
        errors: list[tuple[float, BaseException]] = []
        deadline = time.monotonic() + timeout + GRACE
        waiting = {self._workers[rank].pipe: rank for rank in range(world)}
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe, rank in list(waiting.items()):
                if ready and pipe not in ready:
                    continue
                del waiting[pipe]
                try:
                    if not ready:
                        raise EOFError
                    result, error, trace, when = pipe.recv()
                except (EOFError, ConnectionError):
                    errors.append(self._bury(rank, fn))
                    continue
                if isinstance(error, NotJoinedError):
                    self._workers.pop(rank).end()  # torch counts groups, and would look for the next one elsewhere
                if trace:
                    error.__cause__ = WorkerError(f"on rank {rank} of {world}:\n{trace}")
                    errors.append((when, error))
                results[rank] = result
        store.unlink(missing_ok=True)
        if errors:
            raise min(errors, key=lambda entry: (not isinstance(entry[1], NotJoinedError), entry[0]))[1]
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _bury(self, rank: int, fn: Callable[..., object]) -> tuple[float, WorkerError]:
        """A crash explains what other ranks raise, and what they raise explains a hang."""
        worker = self._workers.pop(rank)
        worker.end()
        code = worker.process.exitcode
        log = worker.log.read_text() if worker.log.exists() else ""
        error = WorkerError(f"rank {rank} died or hung in {fn.__qualname__} (exit code {code}).\n{log}")
        return (-math.inf if code and code < 0 else math.inf), error


def _filters() -> list[Filter]:
    """The filters for warnings of the running test, as arguments of ``warnings.filterwarnings``."""
    return [
        (action, _text(message), category, _text(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _text(pattern: re.Pattern[str] | str | None) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""


def _serve(pipe: "Connection[Any, Any]", log: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # else frameworks set another number, and with it other bits in a later test
    with open(log, "w") as stacks, suppress(EOFError, ConnectionError):
        faulthandler.enable(stacks)
        while True:
            fn, rank, world, store, timeout, filters, kwargs = pipe.recv()
            faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
            answer = _call(fn, rank, world, store, filters, kwargs)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)


def _join(rank: int, world: int, store: str) -> None:
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
    except Exception as error:
        raise NotJoinedError(f"{type(error).__name__}: {error}") from error


def _call(
    fn: Callable[..., Any], rank: int, world: int, store: str, filters: list[Filter], kwargs: dict[str, Any]
) -> tuple[Any, BaseException | None, str, float]:
    try:
        torch.manual_seed(0)
        _join(rank, world, store)
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for entry in reversed(filters):
                warnings.filterwarnings(*entry)
            return fn(rank, world, **kwargs), None, "", 0.0
    except BaseException as error:  # pytest's outcomes too
        trace, when = traceback.format_exc(), time.monotonic()
        try:
            ForkingPickler.loads(ForkingPickler.dumps(error))
        except Exception:
            error = WorkerError(f"{type(error).__name__}: {error}")
        return None, error, trace, when
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
