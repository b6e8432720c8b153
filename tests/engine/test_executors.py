"""Jobs run beside the caller: each lane in order, the wire in order over all lanes."""

import threading
from functools import partial

import pytest
import torch

from commopt.collectives.wire import WireError
from commopt.engine.executors import ThreadExecutor, Turn, make_executor
from commopt.messages import LANES

JOBS = 6


def test_each_lane_runs_its_jobs_in_order_without_gradients() -> None:
    executor = make_executor(torch.device("cpu"))
    assert isinstance(executor, ThreadExecutor)
    seen: list[tuple[int, int, bool]] = []
    gate = threading.Event()

    def job(number: int, turn: Turn) -> None:
        gate.wait(10)
        seen.append((number, threading.get_ident(), torch.is_grad_enabled()))

    for number in range(JOBS):
        executor.submit(partial(job, number))
    assert not seen  # the caller went on
    gate.set()
    executor.close()
    for lane in range(LANES):
        mine = [(number, thread) for number, thread, _ in seen if number % LANES == lane]
        assert [number for number, _ in mine] == list(range(lane, JOBS, LANES))
        assert len({thread for _, thread in mine}) == 1
    threads = {thread for _, thread, _ in seen}
    assert len(threads) == LANES
    assert threading.get_ident() not in threads
    assert not any(grad for *_, grad in seen)


def test_the_wire_is_used_in_order_while_the_next_job_already_runs() -> None:
    executor = ThreadExecutor()
    both = threading.Barrier(2)
    wire: list[int] = []

    def job(number: int, turn: Turn) -> None:
        if number == 0:
            turn.take()
            both.wait(10)  # the next one runs while this one has the wire
            wire.append(0)
            turn.give()
            return
        if number == 1:
            both.wait(10)
        turn.take()  # passed on when the job ends
        wire.append(number)

    for number in range(JOBS):
        executor.submit(partial(job, number))
    executor.close()
    assert wire == list(range(JOBS))


def test_a_job_can_wait_for_all_before_it() -> None:
    executor = ThreadExecutor()
    gate, ended, joined = threading.Event(), [], []

    def earlier(number: int) -> None:
        gate.wait(10)
        ended.append(number)

    def last(turn: Turn) -> None:
        gate.set()
        turn.join()
        joined.extend(ended)

    executor.submit(lambda _: earlier(0))
    executor.submit(last)
    executor.close()
    assert joined == [0]


def test_after_a_failure_nobody_uses_the_wire() -> None:
    executor = ThreadExecutor()
    on_wire, used, refused = threading.Event(), [], []

    def first(turn: Turn) -> None:
        turn.take()
        on_wire.wait(10)
        executor.abandon()

    def second(turn: Turn) -> None:
        on_wire.set()
        try:
            turn.take()
            used.append(1)
        except WireError as error:
            refused.append(str(error))

    executor.submit(first)
    executor.submit(second)
    executor.close()
    assert not used
    assert refused == ["the exchange was given up"]


def test_close_waits_for_what_is_under_way() -> None:
    executor = ThreadExecutor()
    done = []
    executor.submit(lambda _: done.append(True))
    executor.close()
    assert done == [True]


@pytest.mark.parametrize("jobs", [1, LANES, 7])
def test_joining_works_wherever_the_last_job_runs(jobs: int) -> None:
    executor = ThreadExecutor()
    ended: list[int] = []
    counts: list[int] = []
    for _number in range(jobs):
        executor.submit(lambda _: ended.append(0))

    def last(turn: Turn) -> None:
        turn.join()
        counts.append(len(ended))

    executor.submit(last)
    executor.close()
    assert counts == [jobs]
