"""How long a step takes under a plan: what hides behind backward, what does not, and what codecs take from it.

Pure: from tables to seconds. The step is played through once: gradients become ready as backward goes on, each message
passes through its stages, one message at a time has the wire, and whatever computes at the same time shares the cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.futures import Future

from commopt.compressors import RoundsCompressor
from commopt.layout import Layout
from commopt.messages import LANES, Arrival, Bucket, Cutter, Message
from commopt.network.machine import Machine
from commopt.network.table import Network
from commopt.plan import Plan, TensorClass
from commopt.transfers import Transfer, make_layout, transfers

A_MESSAGE, A_TENSOR = 2e-4, 1e-5  # seconds that Python takes for each, beside the codec
FIRST_ROUND = 0.6  # of what a compressor of two rounds computes before the last one
VOTE = 16 + 1  # numbers of eight bytes and one a rank, at the end of each step


@dataclass(frozen=True)
class Ready:
    """Gradients that become ready together, ``seconds`` after the step began."""

    seconds: float
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Workload:
    """A step of training, as it would be if nothing were exchanged.

    Args:
        ready: when gradients are ready, in order.
        tail: seconds from the end of the exchange to the end of the step.
        classes: the class of each parameter, by name.
    """

    ready: tuple[Ready, ...]
    tail: float
    classes: Mapping[str, TensorClass]

    @property
    def compute(self) -> float:
        """Seconds of a step without any exchange."""
        return self.ready[-1].seconds + self.tail

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(shape.numel() * part.dtype.itemsize for part in self.ready for shape in part.shapes)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Shapes alone, on no device."""
        buckets = []
        for index, part in enumerate(self.ready):
            gradients = [torch.empty(shape, dtype=part.dtype, device="meta") for shape in part.shapes]
            buffer = torch.empty(sum(shape.numel() for shape in part.shapes), dtype=part.dtype, device="meta")
            last = index == len(self.ready) - 1
            buckets.append(Bucket(index, list(part.names), buffer, gradients, frozenset(), last))
        return buckets


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to cost, in seconds a step, and bytes that a rank sends."""

    plan: Plan
    step: float
    exposed: float
    wire: float
    codec: float
    nbytes: float


@dataclass(frozen=True)
class Stage:
    """A part of what happens to a message: on the wire, or in a codec."""

    on_wire: bool
    seconds: float


@dataclass(frozen=True)
class Journey:
    """A message: when it can start, in seconds of undisturbed backward, and its stages."""

    ready: float
    stages: tuple[Stage, ...]
    sent: float


def predict(plan: Plan, workload: Workload, network: Network, machine: Machine) -> Prediction:
    """The step of ``workload`` under ``plan``."""
    journeys = _journeys(plan, workload, network, machine)
    world = len(network.hosts)
    vote = _wire(Transfer("all_reduce", VOTE + world, torch.int64), network) if world > 1 else 0.0
    end, computed = play(journeys, workload.ready[-1].seconds, machine.steal, network.cpu_share)
    stages = [stage for journey in journeys for stage in journey.stages]
    return Prediction(
        plan=plan,
        step=end + vote + workload.tail,
        exposed=end + vote - computed,
        wire=sum(stage.seconds for stage in stages if stage.on_wire) + vote,
        codec=sum(stage.seconds for stage in stages if not stage.on_wire),
        nbytes=sum(journey.sent for journey in journeys),
    )


def play(journeys: Sequence[Journey], compute: float, steal: float, cpu_share: float) -> tuple[float, float]:
    """When the last message has arrived, and when the computation was done; both in seconds from the step's begin."""
    time, done, on_wire = 0.0, 0.0, 0
    lanes = [list(range(lane, len(journeys), LANES)) for lane in range(LANES)]
    stage = [0] * len(journeys)
    left = [journey.stages[0].seconds if journey.stages else 0.0 for journey in journeys]
    last_wire = [max((i for i, s in enumerate(j.stages) if s.on_wire), default=-1) for j in journeys]
    computed = 0.0
    while any(lanes) or done < compute:
        heads = [lane[0] for lane in lanes if lane and journeys[lane[0]].ready <= done + 1e-12]
        codecs = [m for m in heads if not journeys[m].stages[stage[m]].on_wire]
        wires = [m for m in heads if journeys[m].stages[stage[m]].on_wire and m == on_wire]
        computing = done < compute - 1e-12
        load = len(codecs) + cpu_share * len(wires)
        shared = 1.0 / (1.0 + steal * (load if computing else max(load - 1.0, 0.0)))
        speed = dict.fromkeys(codecs, shared)
        speed.update(dict.fromkeys(wires, 1.0 / (1.0 + steal * cpu_share * (len(codecs) + computing))))
        waits = [left[m] / speed[m] for m in speed]
        if computing:
            coming = [journeys[lane[0]].ready for lane in lanes if lane and journeys[lane[0]].ready > done + 1e-12]
            waits.append((min([*coming, compute]) - done) / shared)
        step = min(waits)
        time += step
        if computing:
            done += step * shared
            if done >= compute - 1e-12:
                done, computed = compute, time
        for m in speed:
            left[m] -= step * speed[m]
            if left[m] > 1e-12:
                continue
            if stage[m] == last_wire[m]:
                on_wire = m + 1
            stage[m] += 1
            if stage[m] < len(journeys[m].stages):
                left[m] = journeys[m].stages[stage[m]].seconds
            else:
                lanes[m % LANES].pop(0)
    return time, computed


def _journeys(plan: Plan, workload: Workload, network: Network, machine: Machine) -> list[Journey]:
    cutter, journeys = Cutter(plan, workload.classes), []
    for part, bucket in zip(workload.ready, workload.buckets, strict=True):
        for message in cutter.cut(Arrival(bucket, Future())):
            journeys.append(_journey(message, part.seconds, network, machine))
    return journeys


def _journey(message: Message, ready: float, network: Network, machine: Machine) -> Journey:
    assert message.plan is not None
    world = len(network.hosts)
    shapes = [gradient.shape for gradient in message.gradients]
    layout = make_layout(message.plan, world, message.names, shapes)
    whole = len(message.carries) == 1 and len(message.names) == len(message.carries[0].bucket.names)
    schedule = transfers(message.plan, layout, world, message.dtype)
    wires = [_wire(transfer, network) for transfer in schedule]
    codecs = _codecs(message.plan, layout, machine, world, whole)
    codecs[0] += A_MESSAGE + A_TENSOR * len(message.names)
    stages = [Stage(False, codecs[0])]
    for wire, codec in zip(wires, codecs[1:], strict=True):
        stages += [Stage(True, wire), Stage(False, codec)]
    return Journey(ready, tuple(stages), sum(transfer.sent(world) for transfer in schedule))


def _wire(transfer: Transfer, network: Network) -> float:
    return network.collectives[transfer.op].seconds(max(transfer.nbytes, 1))


def _codecs(plan: Plan, layout: Layout, machine: Machine, world: int, whole: bool) -> list[float]:
    """Seconds before, between and after the collectives of a message. ``a_pass`` is one over all elements: sharing,
    adding a residual, clearing, the norm."""
    numel = max(layout.rows * layout.block, 1)
    a_pass = machine.codecs[NONE].encode.seconds(numel)
    copies = 0.0 if whole and not layout.padded and not plan.feedback else a_pass
    if plan.lossless:
        return [a_pass + copies, a_pass + copies]
    codec = machine.codecs[repr(plan.compressor)]
    encode, decode = codec.encode.seconds(numel), codec.decode.seconds(numel)
    kept = decode if plan.feedback else 0.0
    before, after = a_pass + copies, 2 * a_pass + copies
    if isinstance(plan.compressor, RoundsCompressor):
        return [before + FIRST_ROUND * encode, (1 - FIRST_ROUND) * encode, after + decode]
    route = plan.route(world)
    if route == "all_reduce":
        return [before + encode + kept, after + decode]
    if route == "gather":
        return [before + encode, after + world * decode + (a_pass if world == 2 else kept)]
    others = (world - 1) / world
    middle = others * (decode + kept) + encode / world
    return [before + encode, middle, after + decode + kept / world]


NONE = repr(Plan.uncompressed().compressor)
