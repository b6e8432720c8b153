"""What an exchange puts on the wire: the schedule, the counters and formulas written out by hand agree."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from commopt.collectives.exchange import Scratch, exchange
from commopt.collectives.wire import Wire
from commopt.compressors import Contraction, RoundsCompressor, available, create
from commopt.compressors.contract import Sum
from commopt.errors import UnsupportedError
from commopt.layout import Layout
from commopt.plan import Plan
from commopt.transfers import Transfer, make_layout, transfers
from tests.compressors.cases import every_case
from tests.workers import Workers

CPU = torch.device("cpu")
SHAPE = torch.Size([50, 100])


def ring(world: int, payload: float) -> float:
    return 2 * (world - 1) / world * payload


def gather(world: int, payload: float) -> float:
    return (world - 1) * payload


def two_shot(world: int, rows: int, row_bytes: int) -> float:
    rows = -(-rows // world) * world
    return 2 * (world - 1) / world * rows * row_bytes


def quantized(world: int, rows: int, row_bytes: int) -> float:
    return gather(world, rows * row_bytes) if world == 2 else two_shot(world, rows, row_bytes)


def by_hand(name: str, world: int) -> float:
    """Bytes that a rank sends for one tensor of 50 x 100 float32, with default options."""
    return {
        "none": ring(world, 4 * 5000),
        "fp16": ring(world, 2 * 5000),
        "bf16": ring(world, 2 * 5000),
        "fp8": quantized(world, 20, 4 + 256),
        "int8": quantized(world, 20, 4 + 256),
        "int4": quantized(world, 40, 4 + 64),
        "int3": quantized(world, 40, 2 + 48),
        "int2": quantized(world, 40, 2 + 32),
        "onebit": quantized(world, 20, 4 + 32),
        "randomk": ring(world, 4 * 50),
        "powersgd": ring(world, 4 * 4 * (50 + 100)),
        "topk": gather(world, 2 * (4 * 41 + 4 * 21)),
        "threshold": gather(world, 4 * 655 + 4 * 328),
    }[name]


def count(rank: int, world: int, name: str, options: dict[str, Any], feedback: bool) -> tuple[float, int]:
    plan = Plan(create(name, **options), feedback)
    wire = Wire(None)
    layout = make_layout(plan, world, ["x"], [SHAPE])
    x = torch.ones(layout.rows, layout.block)
    exchange(plan, x, torch.empty_like(x) if feedback else x, layout, wire, Scratch(CPU), 0)
    schedule = transfers(plan, layout, world, torch.float32)
    assert wire.bytes_sent == pytest.approx(sum(transfer.sent(world) for transfer in schedule))
    return wire.bytes_sent, wire.finished


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_are_those_of_the_formula(workers: Workers, name: str, world: int) -> None:
    for sent, collectives in workers.run(count, world, name=name, options={}, feedback=True):
        assert sent == pytest.approx(by_hand(name, world))
        assert collectives <= 2


@every_case
@pytest.mark.parametrize("world", [2, 3])
def test_the_schedule_is_what_takes_place(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    plan = Plan(create(name, **options), feedback=False)
    layout = make_layout(plan, world, ["x"], [SHAPE])
    expected = len(transfers(plan, layout, world, torch.float32))
    assert [n for _, n in workers.run(count, world, name=name, options=options, feedback=False)] == [expected] * world


def test_dense_sparsification_takes_two_shots() -> None:
    sparse, dense = Plan(create("topk", density=0.01), True), Plan(create("topk", density=0.05), True)
    assert [sparse.route(world) for world in (2, 4, 10, 11)] == ["gather", "gather", "gather", "two_shot"]
    assert [dense.route(world) for world in (2, 3)] == ["gather", "two_shot"]
    # At two ranks a gather costs the bytes of two shots, and loses less.
    layout = make_layout(dense, 2, ["x"], [SHAPE])
    assert sum(t.sent(2) for t in transfers(dense, layout, 2, torch.float32)) == 2 * dense.compressor.row_bytes  # type: ignore[attr-defined]


def test_a_lossless_plan_keeps_the_dtype() -> None:
    plan = Plan(create("none"), False)
    layout = make_layout(plan, 2, ["x"], [SHAPE])
    assert transfers(plan, layout, 2, torch.bfloat16) == (Transfer("all_reduce", 5000, torch.bfloat16),)


def alone(rank: int, world: int, name: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    plan, wire = Plan(create(name, **options), True), Wire(None)
    layout = make_layout(plan, world, ["x"], [SHAPE])
    x = torch.randn(layout.rows, layout.block)
    before, out = x.clone(), torch.empty_like(x)
    exchange(plan, x, out, layout, wire, Scratch(CPU), 0)
    assert not x.any()
    assert transfers(plan, layout, world, torch.float32) == ()
    return before, out, wire.bytes_sent


@every_case
def test_a_world_of_one_sends_nothing(workers: Workers, name: str, options: dict[str, Any]) -> None:
    ((before, out, sent),) = workers.run(alone, 1, name=name, options=options)
    assert torch.equal(before, out)
    assert sent == 0


def test_scratch_is_used_again() -> None:
    scratch = Scratch(CPU)
    large = scratch.take("x", (100, 10), torch.float32)
    small = scratch.take("x", (7, 10), torch.float32)
    assert small.shape == (7, 10)
    assert small.data_ptr() == large.data_ptr()
    assert scratch.nbytes == 4000
    scratch.take("x", (3,), torch.uint8)
    scratch.take("y", (3,), torch.float32)
    assert scratch.nbytes == 4000 + 3 + 12


@dataclass(frozen=True)
class Careless(RoundsCompressor):
    """Says that it sends ``says`` vectors of the message's size, and sends ``sends`` elements each."""

    says: ClassVar[int]
    sends: ClassVar[tuple[int, ...]]

    @property
    def guarantee(self) -> Contraction:
        return Contraction(0.0)

    def payload_sizes(self, layout: Layout) -> tuple[int, ...]:
        return (layout.numel,) * self.says

    def reduce(self, x: Tensor, out: Tensor, layout: Layout, warm: Any, seed: int, all_reduce: Sum) -> None:
        for numel in self.sends:
            all_reduce(torch.zeros(numel))


def careless(rank: int, world: int, says: int, sends: tuple[int, ...], message: str) -> float:
    Careless.says, Careless.sends = says, sends
    plan, wire = Plan(Careless(), feedback=False), Wire(None)
    layout = make_layout(plan, world, ["a"], [torch.Size([6])])
    x = torch.zeros(layout.rows, layout.block)
    with pytest.raises(UnsupportedError, match=message):
        exchange(plan, x, torch.empty_like(x), layout, wire, Scratch(CPU), seed=0)
    return wire.bytes_sent


@pytest.mark.parametrize(
    ("says", "sends", "message", "sent"),
    [
        (1, (5,), "sends 5 elements of torch.float32, where payload_sizes has 6", 0),
        (1, (6, 6), "sends 6 elements of torch.float32, where payload_sizes has 0", 6 * 4),
        (2, (6,), "ended 1 rounds before", 6 * 4),
    ],
)
def test_rounds_keep_to_their_sizes(
    workers: Workers, says: int, sends: tuple[int, ...], message: str, sent: float
) -> None:
    assert workers.run(careless, 2, says=says, sends=sends, message=message) == [sent] * 2
