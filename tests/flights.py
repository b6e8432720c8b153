"""Flights of the pilot: training of a tiny model with tables that are made up instead of measured."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
import commopt.pilot
from commopt.collectives.wire import Wire
from commopt.network.table import Network
from commopt.pilot import Pilot
from commopt.records import StepRecord
from tests.hooks.training import loss_of
from tests.policy.tables import machine, network


@dataclass
class Flight:
    """What was seen of a training."""

    plans: list[str] = field(default_factory=list)  # of each step
    names: list[str] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)  # after each step
    factors: list[float] = field(default_factory=list)  # after each step
    probes: int = 0


class Log(logging.Handler):
    """Lines of the logger."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def made_up(
    bandwidth: float,
    limit: float = 0.0,
    wire: Callable[[int], float] | None = None,
    steps: float = 0.01,
    looking: float = math.inf,
) -> Iterator[Flight]:
    """Tables instead of measurements, and steps that take what they are told to.

    Args:
        bandwidth: of the network, in bytes/s.
        limit: seconds, from which on the network is probed before the first step.
        wire: seconds on the wire of a step, by its number.
        steps: seconds of each step.
        looking: share of the time that decisions may take.
    """
    flight = Flight()
    remember = Pilot._remember

    def probe(wire: Wire, device: torch.device) -> Network:
        flight.probes += 1
        return network(bandwidth, world=wire.world)

    def seen(pilot: Pilot, record: StepRecord) -> None:
        took = wire(record.step) if wire else 0.002
        remember(pilot, replace(record, wire_seconds=took, step_seconds=steps, exposed_seconds=steps / 2))

    logger = logging.getLogger("commopt")
    handler, level = Log(flight.logged), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commopt.pilot, "network_of", probe)
        patch.setattr(commopt.pilot, "measure_codecs", lambda compressors, *_: machine(1e9, compressors=compressors))
        patch.setattr(commopt.pilot, "LIMIT", limit)
        patch.setattr(commopt.pilot, "MATTERS", 0.0)
        patch.setattr(commopt.pilot, "LOOKING", looking)
        patch.setattr(Pilot, "_remember", seen)
        try:
            yield flight
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


def train(handle: commopt.Handle, model: DDP, rank: int, steps: int, flight: Flight, rate: float = 1e-4) -> None:
    """Steps of one batch, so that the gradient hardly changes."""
    pilot = handle.pilot
    assert pilot is not None
    pilot.tell = lambda step, reason: flight.told.append((step, reason))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert handle.engine.record is not None
        flight.plans.append(repr(handle.engine.plan))
        flight.names.append(handle.engine.record.plan)
        flight.explained.append(handle.explain())
        flight.factors.append(pilot.factor)
