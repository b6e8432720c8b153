"""Measures, decides and follows: which plan the exchange uses while training goes on.

    probe, codecs -> cost model --choose--> plan --engine--> measured steps -> how fast the link is now -> choose ...

Rank 0 decides and tells the others, in the same step on all ranks: its arithmetic need not be repeated bit for bit.
"""

import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commopt.collectives.agreement import from_rank_zero
from commopt.collectives.wire import Wire
from commopt.compressors import Compressor
from commopt.config import Quality
from commopt.engine import Engine
from commopt.messages import Bucket
from commopt.network.cache import network_of
from commopt.network.machine import Machine, measure_codecs
from commopt.network.probe import glance
from commopt.network.table import Network
from commopt.plan import Plan, TensorClass
from commopt.policy.choice import Choice, allowed, choose, cold_start, describe
from commopt.policy.cost import Ready, Workload, predict
from commopt.policy.steadiness import Steadiness
from commopt.records import StepRecord

FIRST = 4  # steps until the first decision: DDP has found its buckets after two
EVERY = 10  # steps between two looks, or more:
LOOKING = 0.01  # of the time of training, at most, that rank 0 takes to decide
WARM_UP = 20  # steps, in which only gentle plans are used
MATTERS = 0.05  # of a step: where less of it is exposed communication, there is nothing to gain
LIMIT = 0.02  # seconds, in which all gradients travel: nothing is measured before training shows that it matters
MOVED = 1.5  # a factor, by which the link has to be faster or slower than it was thought to be, at two looks in a row
logger = logging.getLogger("commopt")


@dataclass(frozen=True)
class Seen:
    """One step, as this rank saw it: seconds from its begin until each bucket was ready, and after the exchange."""

    ready: tuple[float, ...]
    tail: float
    exchange: float
    wire: float
    codec: float
    step: float

    @property
    def exposed(self) -> float:
        """Share of the step that waited for communication."""
        return max(1 - (self.ready[-1] + self.tail) / self.step, 0.0)


class Pilot:
    """Chooses the plan of an engine. Call everything on all ranks.

    Args:
        engine: whose plan it chooses.
        device: where gradients are.
        quality: what the plan may cost in accuracy.
        shapes: of each parameter, by name, in the order of registration.
        dtypes: of their gradients.
        classes: the class of each parameter, by name.
        examine: the one step at whose end it says what it would do, having measured; the plan stays as it is. None: it
            flies.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        quality: Quality,
        shapes: Mapping[str, torch.Size],
        dtypes: Mapping[str, torch.dtype],
        classes: Mapping[str, TensorClass],
        examine: int | None = None,
    ) -> None:
        self.network: Network | None = None  # as probed
        self.machine: Machine | None = None
        self.choice: Choice | None = None  # the last one; on rank 0
        self.measured: tuple[Seen, Workload] | None = None  # that the last choice is made from; on rank 0
        self.explanation = "no decision yet: the first steps are measured."
        self.tell: Callable[[int, str], None] = lambda step, reason: None
        self.factor = 1.0  # that the network takes longer now than when it was probed
        self._engine = engine
        self._device = device
        self._quality: Quality = quality
        self._classes = dict(classes)
        self._examine = examine
        self._steadiness = Steadiness()
        self._steps = 0
        self._next = FIRST  # the step of the next look
        self._wire = Wire(engine.wire.group)  # what is measured is no part of the exchange
        self._flown = engine.plan
        self._seen: deque[Seen] = deque(maxlen=EVERY)
        self._buckets: list[Bucket] = []
        self._beside: dict[Plan, float] = {}  # of rank 0: by what collectives take longer beside backward
        self._again = False  # of rank 0: whether to probe once more
        self._moved = False  # of rank 0: whether the link seemed to be another one at the last look
        self._experience: dict[Compressor, float] = {}  # of rank 0: seconds of a step over those predicted
        self._begin(shapes, dtypes)

    def end_step(self, record: StepRecord, rate: float | None) -> None:
        """After each step, on each rank by itself; ``rate`` is the learning rate, None where nobody knows it."""
        self._steadiness.add(record.gradient_norm, rate)
        self._remember(record)

    def workload(self) -> Workload | None:
        """What training does between exchanges, by the steps since the last look; None before any was seen."""
        return self._workload(self._shared()) if self._seen else None

    def close(self) -> None:
        """The plan stays as it is."""
        self._engine.after_vote = None

    def _begin(self, shapes: Mapping[str, torch.Size], dtypes: Mapping[str, torch.dtype]) -> None:
        """The plan of the first steps."""
        engine = self._engine
        if engine.wire.world == 1 or not shapes:
            alone = "one process exchanges nothing" if shapes else "all gradients are sparse, and travel as they are"
            self.explanation = f"do nothing: {alone}"
            return
        engine.after_vote = self._look
        nbytes = sum(shape.numel() * dtypes[name].itemsize for name, shape in shapes.items())
        if self._examine is None and nbytes / glance(self._wire, self._device) < LIMIT:
            return
        network, machine = self._measure()
        if self._examine is not None:
            return
        kinds = dict.fromkeys(dtypes.values())
        parts = [tuple(name for name in shapes if dtypes[name] is kind) for kind in kinds]
        ready = tuple(
            Ready(0.0, names, tuple(shapes[name] for name in names), kind)
            for names, kind in zip(parts, kinds, strict=True)
        )
        workload = Workload(ready, 0.0, self._classes)
        compressors = allowed(self._quality, gentle=True)
        told = self._told(lambda: cold_start(compressors, workload, network, machine).to_plain())
        if told is not None:
            plan = Plan.from_plain(told)
            self._change(plan, f"first steps, of what the network alone lets expect: {describe(plan)}", None)

    def _measure(self) -> tuple[Network, Machine]:
        if self.network is None or self.machine is None:
            self.network = network_of(self._wire, self._device)
            self._beside.clear()
            self._experience.clear()
            self._engine.set_pieces(self.network.piece)
            compressors = (Plan.uncompressed().compressor, *allowed(self._quality))
            self.machine = measure_codecs(compressors, self._device, self._wire)
        return self.network, self.machine

    def _remember(self, record: StepRecord) -> None:
        ready = self._engine.ready
        buckets = [bucket for bucket, _ in ready]
        if [bucket.names for bucket in buckets] != [bucket.names for bucket in self._buckets]:
            self._seen.clear()
        if self._engine.plan != self._flown:  # figures of several plans would be those of none
            self._seen.clear()
        self._flown = self._engine.plan
        self._buckets = buckets
        tail = record.step_seconds - ready[-1][1] - record.exposed_seconds
        times = tuple(seconds for _, seconds in ready)
        seconds = record.exchange_seconds, record.wire_seconds, record.codec_seconds, record.step_seconds
        self._seen.append(Seen(times, max(tail, 0.0), *seconds))

    def _shared(self) -> Seen:
        """Medians over the steps since the last look, of the slowest rank; the wire's of the one that waited least."""
        columns = zip(*(seen.ready for seen in self._seen), strict=True)
        ready = [statistics.median(column) for column in columns]
        keys = ("tail", "exchange", "codec", "step")
        rest = [statistics.median(getattr(seen, key) for seen in self._seen) for key in keys]
        least = -statistics.median(seen.wire for seen in self._seen)
        mine = torch.tensor([*ready, *rest, least], dtype=torch.float64, device=self._device)
        *ready, tail, exchange, codec, step, least = self._wire.all_reduce(mine, dist.ReduceOp.MAX).tolist()
        return Seen(tuple(ready), tail, exchange, -least, codec, step)

    def _workload(self, seen: Seen) -> Workload:
        """What was seen, without what the exchange took from it."""
        ready = seen.ready
        steal = self.machine.steal if self.machine else 0.0
        cpu_share = self.network.cpu_share if self.network else 0.0
        first, span = ready[0], ready[-1] - ready[0]
        busy = (seen.codec + cpu_share * seen.wire) * min(1.0, span / seen.exchange if seen.exchange else 1.0)
        undisturbed = max(span - busy * steal / (1 + steal), span / 2)
        stretch = undisturbed / span if span else 1.0
        parts = tuple(
            Ready(
                first + (seconds - first) * stretch,
                tuple(bucket.names),
                tuple(gradient.shape for gradient in bucket.gradients),
                bucket.buffer.dtype,
            )
            for bucket, seconds in zip(self._buckets, ready, strict=True)
            if bucket.compressible
        )
        return Workload(parts, seen.tail, self._classes)

    def _due(self) -> bool:
        if self._examine is not None:
            return self._steps == self._examine
        return self._steps >= self._next

    def _look(self) -> None:
        """At the end of a step's exchange, beside the caller: ranks that do nothing but exchange take part, too."""
        self._steps += 1
        if not self._due():
            return
        self._next = self._steps + EVERY
        # Ranks have seen the same buckets; those that joined early (DDP's join) may have seen fewer steps.
        knows = torch.tensor([bool(self._seen) and any(bucket.compressible for bucket in self._buckets)])
        if not self._wire.all_reduce(knows.to(self._device, torch.int32), dist.ReduceOp.MIN):
            return
        seen, engine = self._shared(), self._engine
        if self.network is None and engine.configured.lossless and seen.exposed < MATTERS:
            self.explanation = f"do nothing: {seen.exposed:.0%} of a step is exposed communication"
            return
        network, machine = self._measure()
        told = self._told(lambda: self._decide(seen, network, machine))
        if told is None:
            return
        self.factor = told["factor"]
        self._next = self._steps + told["wait"]
        if told["again"]:
            self.network, self._again = None, False
        self._change(Plan.from_plain(told["plan"]), told["reason"], told["expected"])
        self._seen.clear()

    def _told(self, decide: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What rank 0 decides, on every rank. None where it could not: training is worth more than a better plan."""
        text = ""
        if self._wire.rank == 0:
            try:
                text = json.dumps(decide())
            except Exception as error:  # the others wait for a word
                text = json.dumps({"failed": f"{type(error).__name__}: {error}"})
        told: dict[str, Any] = json.loads(from_rank_zero(self._wire, text, self._device))
        if "failed" not in told:
            return told
        self.explanation = f"the plan stays as it is, for the policy failed on rank 0: {told['failed']}"
        logger.error(self.explanation)
        self.close()
        return None

    def _decide(self, seen: Seen, network: Network, machine: Machine) -> dict[str, Any]:
        """On rank 0: what all are told."""
        start, engine, workload = time.perf_counter(), self._engine, self._workload(seen)
        current, reason = engine.configured, ""
        if engine.plan == current and seen.wire > 0:
            expected = predict(current, workload, network, machine)
            if self._follow(current, seen.wire / max(expected.wire, 1e-9)):
                reason = f" (the link takes {self.factor:.2f} times what it took at first)"
            expected = predict(current, workload, network.scaled(self.factor), machine)
            self._experience[current.compressor] = seen.step / expected.step
        flies = self._examine is None
        gentle = flies and (self._steps < WARM_UP or self._steadiness.changing)
        if gentle and self._quality != "lossless":
            why = "warm-up" if self._steps < WARM_UP else "the gradient changes fast"
            reason += f" (gentle plans only: {why})"
        network = network.scaled(self.factor)
        compressors = allowed(self._quality, gentle)
        self.choice = choose(current, compressors, workload, network, machine, self._experience)
        self.measured = seen, workload
        plan = self.choice.best.plan
        return {
            "plan": plan.to_plain(),
            "reason": self.choice.reason + reason,
            "expected": self.choice.best.step,
            "factor": self.factor,
            "again": self._again,
            "wait": max(EVERY, math.ceil((time.perf_counter() - start) / (LOOKING * seen.step))),
        }

    def _follow(self, plan: Plan, ratio: float) -> bool:
        """Takes in seconds on the wire over those that the probe lets expect. Whether the link has become slower, or is
        again what it was.

        Beside backward a collective takes longer than in the probe, by a factor that each plan has of its own.
        """
        beside = self._beside.setdefault(plan, ratio / self.factor)
        drift = ratio / (self.factor * beside)
        moved, self._moved = self._moved, not 1 / MOVED < drift < MOVED
        if not (moved and self._moved):
            return False
        self._moved = False
        if drift < 1.0 and self.factor <= 1.0:  # the machine was busy before, or the link is faster than ever: look
            self._again = True
            return False
        self.factor = max(ratio / beside, 1.0)
        return True

    def _change(self, plan: Plan, reason: str, expected: float | None) -> None:
        engine = self._engine
        self.explanation = reason
        if self._examine is not None:
            return
        engine.expected = None if expected is None else (plan, expected)
        if plan != engine.configured:
            engine.configure(plan)
            logger.info("step %d: %s", engine.step, reason)
            self.tell(engine.step, reason)
