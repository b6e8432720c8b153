"""Jobs run one after the other, beside the caller."""

import threading

import torch

from commopt.engine.executors import ThreadExecutor, make_executor


def test_jobs_run_in_order_on_one_thread_without_gradients() -> None:
    executor = make_executor(torch.device("cpu"))
    assert isinstance(executor, ThreadExecutor)
    seen: list[tuple[int, int, bool]] = []
    gate = threading.Event()

    def job(number: int) -> None:
        gate.wait(10)
        seen.append((number, threading.get_ident(), torch.is_grad_enabled()))

    tensors = [torch.full((2,), float(number)) for number in range(5)]
    futures = [executor.submit(lambda n=number: job(n), tensor) for number, tensor in enumerate(tensors)]  # type: ignore[misc]
    assert not any(future.done() for future in futures)  # the caller went on
    gate.set()
    assert all(torch.equal(future.wait(), tensor) for future, tensor in zip(futures, tensors, strict=True))
    assert [number for number, _, _ in seen] == list(range(5))
    assert len({thread for _, thread, _ in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert not any(grad for _, _, grad in seen)
    executor.close()


def test_close_waits_for_what_is_under_way() -> None:
    executor = ThreadExecutor()
    done = []
    executor.submit(lambda: done.append(True), torch.ones(1))
    executor.close()
    assert done == [True]
