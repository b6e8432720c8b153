"""The contract of ``commopt/compressors/contract.py``, over everything that is registered and over its options."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commopt.collectives.exchange import Scratch, exchange
from commopt.collectives.wire import Wire
from commopt.compressors import (
    Compressor,
    Contraction,
    RoundsCompressor,
    RowCompressor,
    available,
    create,
)
from commopt.layout import Layout
from commopt.plan import Plan
from commopt.transfers import make_layout
from tests.compressors.cases import cases, every_case
from tests.workers import Workers

SHAPES = [(1,), (0,), (7,), (), (333,), (40, 33), (2, 3, 4, 5), (4099,), (96, 1000)]  # few are a multiple of any block


def in_rows(name: str, options: dict[str, Any]) -> RowCompressor:
    compressor = create(name, **options)
    assert isinstance(compressor, RowCompressor)
    return compressor


every_row_case = cases(lambda compressor: isinstance(compressor, RowCompressor))


def delivered(compressor: Compressor, tensor: Tensor, seed: int = 0) -> Tensor:
    """``C(x)`` of one rank, of the same shape."""
    layout = Layout(["x"], [tensor.shape], compressor.block if isinstance(compressor, RowCompressor) else 1)
    x = torch.zeros(layout.rows, layout.block)
    layout.views(x)[0].copy_(tensor)
    out = torch.zeros_like(x)
    if isinstance(compressor, RoundsCompressor):
        compressor.reduce(x, out, layout, {}, seed, lambda vector: vector)
    else:
        assert isinstance(compressor, RowCompressor)
        payload = torch.empty(layout.rows, compressor.width, dtype=compressor.payload_dtype)
        compressor.encode(x, payload, seed)
        compressor.add_decoded(payload, out, seed)
    return layout.views(out)[0]


def energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def gaussian(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def heavy_tailed(numel: int) -> Tensor:
    return gaussian(numel).pow(3)


def spike(numel: int) -> Tensor:
    x = torch.zeros(numel)
    x[numel // 3] = -5.0
    return x


def constant(numel: int) -> Tensor:
    return torch.full((numel,), 0.7)


inputs = pytest.mark.parametrize("make", [gaussian, heavy_tailed, spike, constant])
ROUNDING = 1e-6  # relative, of float32 sums


@every_case
@inputs
@pytest.mark.parametrize("shape", [(120, 131), (15_721,)], ids=str)
def test_the_declared_guarantee_holds(
    name: str, options: dict[str, Any], make: Callable[[int], Tensor], shape: tuple[int, ...]
) -> None:
    compressor = create(name, **options)
    x = make(math.prod(shape)).view(shape)
    if isinstance(compressor.guarantee, Contraction):
        assert energy(delivered(compressor, x) - x) <= (1 - compressor.guarantee.delta + ROUNDING) * energy(x)
        return
    draws = 40
    variance = compressor.guarantee.variance
    total, error = torch.zeros_like(x), 0.0
    for seed in range(draws):
        y = delivered(compressor, x, seed)
        total += y
        error += energy(y - x) / draws
    if make is spike and name == "randomk":
        return  # a draw that hits is rare: see the test below
    assert error <= (1.2 * variance + ROUNDING) * energy(x)
    assert energy(total / draws - x) <= (1.5 * variance / draws + ROUNDING) * energy(x)


def test_random_k_of_a_spike_is_right_on_average() -> None:
    compressor = create("randomk", density=0.25)
    draws = torch.stack([delivered(compressor, spike(16), seed) for seed in range(4000)])
    assert draws.mean(0)[16 // 3] == pytest.approx(-5.0, rel=0.1)  # three standard deviations are 0.08
    assert set(draws[:, 16 // 3].tolist()) == {0.0, -20.0}


@cases(lambda compressor: compressor.name != "fp16")  # whose range ends at 6e-5 and 65504
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_guarantee_does_not_depend_on_the_scale(name: str, options: dict[str, Any], scale: float) -> None:
    compressor = create(name, **options)
    x = gaussian(20_000).view(200, 100)
    lost = energy(delivered(compressor, x) - x) / energy(x)
    lost_there = energy(delivered(compressor, x * scale) / scale - x) / energy(x)
    assert lost_there == pytest.approx(lost, rel=1e-3, abs=ROUNDING)


@every_case
def test_zero_stays_zero(name: str, options: dict[str, Any]) -> None:
    compressor = create(name, **options)
    for shape in SHAPES:
        assert not delivered(compressor, torch.zeros(shape)).any()


@every_case
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(name: str, options: dict[str, Any], bad: float) -> None:
    compressor = create(name, **options)
    for numel in (1, 100, 5001):
        for position in {0, numel // 2, numel - 1}:
            x = gaussian(numel)
            x[position] = bad
            assert not torch.isfinite(delivered(compressor, x)).all(), (numel, position)
    for position in (0, 4000, 19_999):
        matrix = gaussian(20_000)
        matrix[position] = bad
        assert not torch.isfinite(delivered(compressor, matrix.view(200, 100))).all(), position
    assert not torch.isfinite(delivered(compressor, torch.full((200, 100), bad))).all()


@every_row_case
def test_payload_size_follows_from_the_shape_alone(name: str, options: dict[str, Any]) -> None:
    compressor = in_rows(name, options)
    for rows in (1, 3, 50):
        numel = rows * compressor.block
        for x in (gaussian(numel), torch.zeros(numel), constant(numel), spike(numel), torch.full((numel,), math.nan)):
            payload = compressor.compress(x.view(rows, compressor.block), seed=rows)
            assert payload.shape == (rows, compressor.width)
            assert payload.dtype == compressor.payload_dtype
            assert payload.nbytes == rows * compressor.row_bytes
    assert compressor.compress(torch.empty(0, compressor.block), seed=0).shape == (0, compressor.width)


@every_case
def test_the_same_seed_gives_the_same_bits(name: str, options: dict[str, Any]) -> None:
    compressor = create(name, **options)
    x = gaussian(40_000).view(200, 200)
    assert torch.equal(delivered(compressor, x, seed=3), delivered(compressor, x.clone(), seed=3))


@every_row_case
def test_neither_way_changes_its_input(name: str, options: dict[str, Any]) -> None:
    compressor = in_rows(name, options)
    rows = gaussian(3 * compressor.block).view(3, -1)
    before = rows.clone()
    payload = compressor.compress(rows, seed=5)
    assert torch.equal(rows, before)
    sent = payload.clone()
    compressor.decompress(payload, seed=5)
    compressor.accumulate(payload, torch.zeros_like(rows), 5, 1.0)
    assert torch.equal(payload, sent)


@cases(lambda compressor: isinstance(compressor.guarantee, Contraction) and isinstance(compressor, RowCompressor))
def test_rows_do_not_depend_on_their_neighbours(name: str, options: dict[str, Any]) -> None:
    compressor = in_rows(name, options)
    rows = gaussian(4 * compressor.block).view(4, -1)
    others = torch.cat([-3.0 * rows[:2].flip(1), rows[2:]])
    assert torch.equal(compressor.compress(rows, 0)[2:], compressor.compress(others, 0)[2:])


@every_row_case
def test_accumulate_is_scaled_addition(name: str, options: dict[str, Any]) -> None:
    compressor = in_rows(name, options)
    rows = gaussian(3 * compressor.block).view(3, -1)
    payload = compressor.compress(rows, seed=1)
    out = torch.ones_like(rows)
    compressor.accumulate(payload, out, 1, -0.5)
    torch.testing.assert_close(out, 1 - 0.5 * compressor.decompress(payload, seed=1))


@every_case
@settings(max_examples=15, deadline=None)
@given(shape=st.lists(st.integers(0, 40), max_size=4), scale=st.floats(-20, 20), seed=st.integers(0, 2**40))
def test_any_shape_and_scale(name: str, options: dict[str, Any], shape: list[int], scale: float, seed: int) -> None:
    compressor = create(name, **options)
    x = torch.randn([min(size, 40 if axis == 0 else 6) for axis, size in enumerate(shape)])
    x *= 10.0 ** (0 if name == "fp16" else scale)
    y = delivered(compressor, x, seed)
    assert y.shape == x.shape
    assert torch.isfinite(y).all()
    if isinstance(compressor.guarantee, Contraction):
        assert energy(y - x) <= (1 - compressor.guarantee.delta + ROUNDING) * energy(x)


def test_feedback_is_on_where_much_is_lost() -> None:
    on = {name: create(name).wants_feedback for name in available()}
    assert on == {
        "bf16": False,
        "fp16": False,
        "fp8": False,
        "int2": True,
        "int3": True,
        "int4": True,
        "int8": False,
        "none": False,
        "onebit": True,
        "powersgd": True,
        "randomk": True,
        "threshold": True,
        "topk": True,
    }
    assert create("randomk", density=0.01).shrinkage == pytest.approx(0.01)
    assert create("topk").shrinkage == 1.0


# Over the exchange


def contribution(rank: int, layout: Layout) -> Tensor:
    numbers = torch.Generator().manual_seed(100 + rank)
    x = torch.zeros(layout.rows, layout.block)
    for view in layout.views(x):
        view.copy_(torch.randn(view.shape, generator=numbers))
    return x


def check_identity(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    plan = Plan(create(name, **options), feedback=True)
    wire, scratch = Wire(None), Scratch(torch.device("cpu"))
    shapes = [torch.Size(shape) for shape in SHAPES]
    layout = make_layout(plan, world, [str(shape) for shape in shapes], shapes)
    warm: dict[str, Tensor] = {}
    rounding = 0.0
    if isinstance(plan.compressor, RowCompressor) and plan.compressor.summable:
        # What is added while compressed is rounded once more, in the payload's dtype.
        rounding = world * torch.finfo(plan.compressor.payload_dtype).eps
    for seed in range(3):
        x = contribution(rank, layout)
        before = x.double()
        out = torch.full_like(x, math.nan)
        exchange(plan, x, out, layout, wire, scratch, seed, warm)
        total, kept = before.clone(), x.double()
        dist.all_reduce(total)
        dist.all_reduce(kept)
        atol = (1e-6 + rounding) * float(total.abs().max())
        torch.testing.assert_close(out.double() + kept, total, rtol=0, atol=atol)
        same = [torch.empty_like(out) for _ in range(world)]
        dist.all_gather(same, out)
        assert all(torch.equal(other, out) for other in same)


@every_case
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_contribution_is_delivered_or_kept(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    workers.run(check_identity, world, name=name, options=options)


def check_without_feedback(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    wire, scratch = Wire(None), Scratch(torch.device("cpu"))
    sums = []
    for feedback in (False, True):
        plan = Plan(create(name, **options), feedback)
        layout = make_layout(plan, world, ["a", "b"], [torch.Size([300, 257]), torch.Size([4099])])
        x = contribution(rank, layout)
        out = torch.empty_like(x) if feedback else x
        exchange(plan, x, out, layout, wire, scratch, 1, {})
        sums.append(out)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-5)


@cases(lambda compressor: isinstance(compressor.guarantee, Contraction))  # the sum of others shrinks under feedback
@pytest.mark.parametrize("world", [2, 3])
def test_in_place_without_a_residual(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    workers.run(check_without_feedback, world, name=name, options=options)


def check_non_finite(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    wire, scratch = Wire(None), Scratch(torch.device("cpu"))
    for feedback in (False, True):
        plan = Plan(create(name, **options), feedback)
        layout = make_layout(plan, world, ["a", "b"], [torch.Size([90, 80]), torch.Size([300])])
        for bad in (math.nan, math.inf, -math.inf):
            for position in (0, 7199, layout.starts[1] + 299):
                x = contribution(rank, layout)
                if rank == world - 1:
                    x.view(-1)[position] = bad
                out = torch.empty_like(x) if feedback else x
                exchange(plan, x, out, layout, wire, scratch, 1, {})
                low, high = torch.aminmax(out)
                assert not (torch.isfinite(low) & torch.isfinite(high)), (feedback, bad, position)


@every_case
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_see_what_is_not_finite(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    workers.run(check_non_finite, world, name=name, options=options)
