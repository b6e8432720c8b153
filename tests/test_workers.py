"""The workers that all distributed tests stand on."""

import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

from commopt.errors import ConfigError
from tests.workers import WorkerError, Workers


def add_up(rank: int, world: int, scale: float) -> tuple[torch.Tensor, int]:
    tensor = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(tensor)
    return tensor, os.getpid()


def raise_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        raise ConfigError("of rank 1")
    dist.barrier()


def raise_what_cannot_be_carried(rank: int, world: int) -> None:
    class Local(Exception):
        pass

    raise Local("only here")


def warn(rank: int, world: int) -> None:
    warnings.warn("mind the gap", stacklevel=1)


def die(rank: int, world: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(rank: int, world: int) -> None:
    signal.pause()


def refuse_the_next_group(rank: int, world: int) -> None:
    join = dist.init_process_group

    def refuse(*_: object, **__: object) -> None:
        dist.init_process_group = join
        raise RuntimeError("connection closed by peer")

    dist.init_process_group = refuse


def test_the_same_processes_serve_every_call(workers: Workers) -> None:
    first = workers.run(add_up, world=2, scale=1.0)
    second = workers.run(add_up, world=3, scale=2.0)
    assert [tensor.tolist() for tensor, _ in first] == [[3.0] * 3] * 2
    assert [tensor.tolist() for tensor, _ in second] == [[12.0] * 3] * 3
    assert [pid for _, pid in first] == [pid for _, pid in second][:2]


def test_an_error_keeps_its_type_and_its_traceback(workers: Workers) -> None:
    with pytest.raises(ConfigError, match="of rank 1") as caught:
        workers.run(raise_on_rank_1)
    assert "in raise_on_rank_1" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match="Local: only here"):
        workers.run(raise_what_cannot_be_carried, world=1)


def test_a_warning_is_an_error_unless_the_test_says_otherwise(workers: Workers) -> None:
    with pytest.raises(UserWarning, match="mind the gap"):
        workers.run(warn, world=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workers.run(warn, world=1)


def test_a_worker_that_dies_or_hangs_is_replaced(workers: Workers) -> None:
    with pytest.raises(WorkerError, match="rank 0 died or hung in die"):
        workers.run(die)
    with pytest.raises(WorkerError, match="rank 0 died or hung in hang") as caught:
        workers.run(hang, world=1, timeout=0.1)
    assert "in hang\n" in str(caught.value)
    assert len(workers.run(add_up, world=2, scale=1.0)) == 2


def test_no_process_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = Workers(tmp_path_factory.mktemp("own"))
    try:
        pids = [pid for _, pid in own.run(add_up, world=2, scale=1.0)]
        for pid in pids:
            os.kill(pid, 0)  # is there
    finally:
        own.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_group_that_does_not_come_about_is_tried_again_by_another_worker(workers: Workers) -> None:
    ((_, before),) = workers.run(add_up, world=1, scale=1.0)
    workers.run(refuse_the_next_group, world=1)
    ((_, after),) = workers.run(add_up, world=1, scale=1.0)
    assert after != before
