"""``CommunicationMetrics`` does what torchmetrics promises of a metric."""

import copy
import doctest
import math
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt.monitor import Monitor, Totals, metrics
from commopt.monitor.metrics import CommunicationMetrics
from commopt.records import StepRecord
from tests.monitor.runs import COMPRESSED, PLAIN, steps
from tests.workers import Workers

KEYS = (
    "ratio",
    "exposed_share",
    "compression_ratio",
    "throughput",
    "step_seconds",
    "exposed_seconds",
    "wire_seconds",
    "codec_seconds",
    "bytes_sent",
)


def history(rank: int) -> list[StepRecord]:
    """Of one rank: later ranks are slower and count more samples."""
    return [
        replace(record, step_seconds=record.step_seconds * (1 + rank), samples=16.0 + rank)
        for record in steps(COMPRESSED, range(6))
    ]


def filled(records: list[StepRecord], **options: Any) -> CommunicationMetrics:
    metric = CommunicationMetrics(**options)
    for record in records:
        metric.update(record)
    return metric


def plain(values: dict[str, Tensor]) -> dict[str, float]:
    assert all(value.shape == () and value.dtype == torch.float32 for value in values.values())
    return {name: value.item() for name, value in values.items()}


def test_it_agrees_with_a_window() -> None:
    records = steps(COMPRESSED, range(10))
    monitor = Monitor(every=10)
    window = [monitor.add(record) for record in records][-1]
    values = plain(filled(records).compute())
    assert tuple(values) == KEYS
    assert values == pytest.approx({key: getattr(window, key) for key in KEYS})


def reduced(rank: int, world: int) -> tuple[dict[str, float], dict[str, float], list[float]]:
    metric = filled(history(rank))
    first = plain(metric.compute())
    local = metric.sums.tolist()  # after a sync each rank has its own again
    metric.reset()
    for record in history(rank)[:2]:
        metric.update(record)
    return first, plain(metric.compute()), local


@pytest.mark.parametrize("world", [2, 3])
def test_it_reduces_over_ranks_and_resets(workers: Workers, world: int) -> None:
    answers = workers.run(reduced, world)
    for index, count in enumerate((6, 2)):
        total = Totals()
        for rank in range(world):
            for record in history(rank)[:count]:
                total.add(record, world)
        for answer in answers:
            got = answer[index]
            assert isinstance(got, dict)
            assert got["step_seconds"] == pytest.approx(total.step_seconds / total.steps)
            assert got["exposed_share"] == pytest.approx(total.exposed_share)
            # the samples of all ranks, over the mean of their clocks
            samples = sum(16.0 + rank for rank in range(world)) * count
            assert got["throughput"] == pytest.approx(samples / (total.step_seconds / world))
    for rank, (_, _, local) in enumerate(answers):
        assert local[0] == 6
        assert local[2] == pytest.approx(sum(record.step_seconds for record in history(rank)))


def test_a_sync_is_one_gather() -> None:
    gathered: list[Tensor] = []

    def gather(tensor: Tensor, group: object) -> list[Tensor]:
        gathered.append(tensor)
        return [tensor, tensor]

    metric = filled(history(0), dist_sync_fn=gather, distributed_available_fn=lambda: True)
    metric.compute()
    assert len(gathered) == 1


def test_forward_gives_the_step_and_adds_it_up() -> None:
    metric = CommunicationMetrics()
    for record in (COMPRESSED, PLAIN):
        now = metric(record)
        assert now["step_seconds"].item() == record.step_seconds
    assert metric.compute()["step_seconds"].item() == (COMPRESSED.step_seconds + PLAIN.step_seconds) / 2


def test_it_survives_copies_and_pickles() -> None:
    metric = filled(history(0))
    expected = metric.compute()
    for other in (copy.deepcopy(metric), ForkingPickler.loads(ForkingPickler.dumps(metric)), metric.clone()):
        assert other.compute() == expected
        other.update(PLAIN)
    assert metric.compute() == expected


def test_its_state_is_in_the_state_dict_where_that_is_asked_for() -> None:
    assert not filled(history(0)).state_dict()
    metric = filled(history(0))
    metric.persistent(True)
    state = metric.state_dict()
    assert set(state) == {"sums"}
    other = filled([PLAIN])
    other.persistent(True)
    other.load_state_dict(state)
    assert other.compute() == metric.compute()
    other.update(PLAIN)
    assert other.compute() != metric.compute()


def test_lower_precision_leaves_the_sums_alone() -> None:
    metric = filled(history(0)).half()
    assert metric.sums.dtype == torch.float64


def test_samples_that_nobody_counts_are_not_zero() -> None:
    metric = filled([replace(PLAIN, samples=None)])
    assert math.isnan(metric.compute()["throughput"])


def test_a_world_of_one_that_sends_nothing() -> None:
    values = plain(filled([replace(PLAIN, bytes_sent=0.0, bytes_uncompressed=0.0, wire_seconds=0.0)]).compute())
    assert (values["compression_ratio"], values["ratio"], values["bytes_sent"]) == (1.0, 0.0, 0.0)


def test_the_example_in_its_docstring() -> None:
    failed, tried = doctest.testmod(metrics)
    assert (failed, tried) == (0, 4)
