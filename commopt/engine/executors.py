"""Who runs the exchange of a message. Nothing else in the project knows the difference.

Messages run on `LANES` lanes by turns: while one is on the wire, the next one is compressed and the last one
decompressed. Each has its turn on the wire in the order of submission, which is the same on all ranks.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from commopt.collectives import wire
from commopt.messages import LANES


class Turn(wire.Turn, Protocol):
    """Given to a job: where it runs, and when it may use the wire."""

    lane: int

    def join(self) -> None:
        """Waits until all earlier jobs have ended."""

    def see_others(self) -> None:
        """What comes now sees what jobs that have ended wrote."""


Job = Callable[[Any], None]  # called with its turn; does not raise


class Executor(Protocol):
    """Runs jobs while backward goes on; each lane one after the other."""

    def submit(self, job: Job) -> None:
        """Runs ``job`` on the next lane."""

    def future(self) -> "Future[Tensor]":
        """A future for a job to fulfil."""

    def mark(self) -> Any:
        """This moment, as the device sees it."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another, when all that was before them is done."""

    def wait(self) -> None:
        """Waits for all jobs."""

    def abandon(self) -> None:
        """No job may use the wire any more."""

    def close(self) -> None:
        """Waits for all jobs and ends."""


class ThreadTurn:
    """The turn of job ``number``; all share ``state``."""

    def __init__(self, number: int, state: "_Progress") -> None:
        self.lane = number % LANES
        self._number = number
        self._state = state

    def take(self) -> None:
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.on_wire >= self._number)
        if self._state.abandoned:
            raise wire.WireError("the exchange was given up")

    def give(self) -> None:
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.on_wire >= self._number)
            self._state.on_wire = max(self._state.on_wire, self._number + 1)
            self._state.changed.notify_all()

    def join(self) -> None:
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.ended_before(self._number))

    def see_others(self) -> None:
        pass

    def end(self) -> None:
        """The job has ended."""
        self.give()
        with self._state.changed:
            self._state.ended[self.lane] = self._number
            self._state.changed.notify_all()


class _Progress:
    """How far the jobs are."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.on_wire = 0  # the job that has the wire, or will have it
        self.abandoned = False
        self.ended = [lane - LANES for lane in range(LANES)]  # last job of each lane that has ended

    def ended_before(self, number: int) -> bool:
        """Whether all jobs before this one have."""
        return all(self.ended[earlier % LANES] >= earlier for earlier in range(number - LANES + 1, number))


class ThreadExecutor:
    """A worker thread a lane (CPU, gloo). Collectives block it and not backward; they never run in a future's
    callback."""

    def __init__(self) -> None:
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix=f"commopt-{lane}") for lane in range(LANES)]
        self._progress = _Progress()
        self._submitted = 0

    def submit(self, job: Job) -> None:
        turn = ThreadTurn(self._submitted, self._progress)
        self._submitted += 1

        def run() -> None:
            try:
                with torch.no_grad():
                    job(turn)
            finally:
                turn.end()

        self._pools[turn.lane].submit(run)

    def future(self) -> "Future[Tensor]":
        return Future()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        ThreadTurn(self._submitted, self._progress).join()

    def abandon(self) -> None:
        self._progress.abandoned = True

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True)


class StreamTurn:
    """Jobs are enqueued one after the other, so that the wire is always free; a stream waits for the others."""

    def __init__(self, lane: int, streams: list[torch.cuda.Stream]) -> None:
        self.lane = lane
        self._streams = streams

    def take(self) -> None:
        pass

    def give(self) -> None:
        pass

    def join(self) -> None:
        self.see_others()

    def see_others(self) -> None:
        for stream in self._streams:
            self._streams[self.lane].wait_stream(stream)


class StreamExecutor:
    """A side stream a lane (CUDA, NCCL): jobs are enqueued behind the gradients they need, beside the rest of
    backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(LANES)]
        self._submitted = 0

    def submit(self, job: Job) -> None:
        turn = StreamTurn(self._submitted % LANES, self._streams)
        self._submitted += 1
        stream = self._streams[turn.lane]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad():
            job(turn)

    def future(self) -> "Future[Tensor]":
        return Future(devices=[self._device])

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # the vote, which read its result, has waited for all but this event
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        self.wait()


def make_executor(device: torch.device) -> Executor:
    """The executor for gradients on ``device``."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()
