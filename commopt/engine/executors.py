"""Who runs the exchange of a bucket. Nothing else in the project knows the difference."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future


class Executor(Protocol):
    """Runs jobs one after the other, in the order of submission, while backward goes on."""

    def submit(self, job: Callable[[], None], tensor: Tensor) -> "Future[Tensor]":
        """Runs ``job``, which fills ``tensor`` and does not raise; the future then holds ``tensor``."""

    def mark(self) -> Any:
        """This moment, as the device sees it."""

    def seconds_since(self, mark: Any) -> float:
        """Called in a job: what went by since a mark that the submitter took."""

    def close(self) -> None:
        """Waits for all jobs and ends."""


class ThreadExecutor:
    """One worker thread (CPU, gloo). Collectives block it and not backward; they never run in a future's callback."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commopt")

    def submit(self, job: Callable[[], None], tensor: Tensor) -> "Future[Tensor]":
        future: Future[Tensor] = Future()

        def run() -> None:
            try:
                with torch.no_grad():
                    job()
                future.set_result(tensor)
            except Exception as error:  # or backward would wait for ever
                future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it wrongly

        self._pool.submit(run)
        return future

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_since(self, mark: float) -> float:
        return time.perf_counter() - mark

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class StreamExecutor:
    """A side stream (CUDA, NCCL): jobs are enqueued behind the gradients they need, beside the rest of backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Callable[[], None], tensor: Tensor) -> "Future[Tensor]":
        future: Future[Tensor] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream), torch.no_grad():
            job()
            future.set_result(tensor)
        return future

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_since(self, mark: torch.cuda.Event) -> float:
        now = self.mark()
        now.synchronize()  # the vote, which read its result, has waited for all but this event
        return float(mark.elapsed_time(now)) / 1e3

    def close(self) -> None:
        self._stream.synchronize()


def make_executor(device: torch.device) -> Executor:
    """The executor for gradients on ``device``."""
    return StreamExecutor(device) if device.type == "cuda" else ThreadExecutor()
