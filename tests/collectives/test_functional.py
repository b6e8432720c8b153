"""``all_reduce``, ``reduce_scatter`` and ``all_gather``: right within the guarantee, the same bits everywhere."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from commopt.collectives import functional
from commopt.collectives.wire import Wire
from commopt.compressors import Compressor, Contraction, RowCompressor, create
from commopt.errors import CommOptWarning, ConfigError, ExchangeError, UnsupportedError
from tests.compressors.cases import every_case
from tests.workers import Workers

Op = Literal["mean", "sum"]
worlds = pytest.mark.parametrize("world", [2, 3, 4])


def tensor_of(rank: int, shape: tuple[int, ...]) -> Tensor:
    common = torch.randn(shape, generator=torch.Generator().manual_seed(99))
    return common + torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def allowed(compressor: Compressor, parts: list[Tensor]) -> float:
    """How far the sum of parts may be off, in 2-norm, where each part and then the sum is compressed."""
    sizes, total = sum(float(part.norm()) for part in parts), float(torch.stack(parts).sum(0).norm())
    rounding = 1e-6 * sizes
    if isinstance(compressor, RowCompressor) and compressor.summable:
        rounding += len(parts) * torch.finfo(compressor.payload_dtype).eps * sizes
    if isinstance(compressor.guarantee, Contraction):
        lost = math.sqrt(1 - compressor.guarantee.delta)
        return lost * sizes + lost * (total + lost * sizes) + rounding
    return 2 * math.sqrt(compressor.guarantee.variance) * (sizes + total) + rounding


def same_on_all_ranks(tensor: Tensor, world: int) -> bool:
    every = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(every, tensor.contiguous())
    return all(torch.equal(every[0], other) for other in every)


@contextmanager
def counted() -> Iterator[list[Wire]]:
    """The wires that are made inside."""
    wires: list[Wire] = []

    def make(group: dist.ProcessGroup | None) -> Wire:
        wires.append(Wire(group))
        return wires[-1]

    with mock.patch.object(functional, "Wire", make):
        yield wires


def check_all_reduce(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    compressor = create(name, **options)
    ops: tuple[Op, ...] = ("mean", "sum")
    for shape in [(50, 101), (4099,), (2, 3, 5, 7), (1,)]:
        for op in ops:
            parts = [tensor_of(r, shape) / (world if op == "mean" else 1) for r in range(world)]
            tensor = tensor_of(rank, shape)
            commopt.all_reduce(tensor, name, op=op, **options)
            error = float((tensor - torch.stack(parts).sum(0)).norm())
            assert error <= allowed(compressor, parts), (shape, op, error)
            assert same_on_all_ranks(tensor, world)


@every_case
@worlds
def test_all_reduce(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    workers.run(check_all_reduce, world, name=name, options=options)


def check_reduce_scatter(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    compressor = create(name, **options)
    ops: tuple[Op, ...] = ("mean", "sum")
    for shape in [(50, 101), (4099,), (1,)]:
        for op in ops:
            inputs = [tensor_of(r, (world, *shape)) / (world if op == "mean" else 1) for r in range(world)]
            output = torch.full(shape, math.nan)
            commopt.reduce_scatter(output, tensor_of(rank, (world, *shape)), name, op=op, **options)
            error = float((output - torch.stack(inputs).sum(0)[rank]).norm())
            assert error <= allowed(compressor, [part[rank] for part in inputs]), (shape, op, error)


@every_case
@worlds
def test_reduce_scatter(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    workers.run(check_reduce_scatter, world, name=name, options=options)


def check_all_gather(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    compressor = create(name, **options)
    for shape in [(50, 101), (4099,), (1,)]:
        output = torch.full((world, *shape), math.nan)
        commopt.all_gather(output, tensor_of(rank, shape), name, **options)
        for other in range(world):
            part = tensor_of(other, shape)
            assert float((output[other] - part).norm()) <= allowed(compressor, [part]), (shape, other)
        assert same_on_all_ranks(output, world)


@every_case
@worlds
def test_all_gather(workers: Workers, name: str, options: dict[str, Any], world: int) -> None:
    workers.run(check_all_gather, world, name=name, options=options)


def check_bytes(rank: int, world: int) -> None:
    row = 4 + 256
    for name, whole, part in [("int8", 20 * row, 20 * row), ("none", 20_000, 20_000), ("bf16", 10_000, 10_000)]:
        with counted() as wires:
            commopt.all_reduce(torch.ones(50, 100), name)
            commopt.reduce_scatter(torch.empty(50, 100), torch.ones(world, 50, 100), name)
            commopt.all_gather(torch.empty(world, 50, 100), torch.ones(50, 100), name)
        reduced, scattered, gathered = (wire.bytes_sent for wire in wires)
        if name == "int8" and world > 2:
            whole = -(-20 // world) * world * row
        assert reduced == pytest.approx(2 * (world - 1) / world * whole)
        assert scattered == gathered == (world - 1) * part


@worlds
def test_bytes_are_counted(workers: Workers, world: int) -> None:
    workers.run(check_bytes, world)


VIEWS: list[Callable[[Tensor], Tensor]] = [lambda t: t.T, lambda t: t[:, ::2], lambda t: t[3]]


def check_layouts(rank: int, world: int) -> None:
    for name in ("none", "int8", "bf16", "powersgd"):
        for make in VIEWS:
            whole = tensor_of(rank, (40, 30))
            untouched = whole.clone()
            view = make(whole)
            expected = make(torch.stack([tensor_of(r, (40, 30)) for r in range(world)]).mean(0))
            commopt.all_reduce(view, name)
            tolerance = {"none": 1e-6, "bf16": 0.05, "int8": 0.1, "powersgd": math.inf}[name]
            assert float((view - expected).abs().max()) <= tolerance
            make(untouched).copy_(view)
            assert torch.equal(whole, untouched)  # nothing beside the view has changed

        part = tensor_of(rank, (30, 40)).T
        output = torch.empty(world, 40, 30)
        commopt.all_gather(output, part, name)
        if name != "powersgd":
            torch.testing.assert_close(output[rank], part, rtol=0.02, atol=0.05)
        commopt.reduce_scatter(torch.empty(30, 40).T, torch.ones(world, 40, 30), name)


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_that_are_not_contiguous(workers: Workers, world: int) -> None:
    workers.run(check_layouts, world)


def check_dtypes(rank: int, world: int) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for name in ("none", "int8"):
            tensor = torch.full((300,), rank + 1.0, dtype=dtype)
            commopt.all_reduce(tensor, name)
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor, torch.full((300,), (world + 1) / 2, dtype=dtype), rtol=1e-2, atol=0)
    exact = torch.tensor([1 + 2.0**-40, 2.0**-300], dtype=torch.float64)
    output, chunk = torch.empty(world, 2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    commopt.all_gather(output, exact, "none")
    commopt.reduce_scatter(chunk, exact.expand(world, 2).contiguous(), "none", op="sum")
    commopt.all_reduce(mean := exact.clone(), "none")
    assert torch.equal(output, exact.expand(world, 2))
    torch.testing.assert_close(chunk, world * exact, rtol=1e-15, atol=0)
    torch.testing.assert_close(mean, exact, rtol=1e-15, atol=0)

    with counted() as wires:
        half = torch.ones(50, dtype=torch.bfloat16)
        commopt.all_gather(torch.empty(world, 50, dtype=torch.bfloat16), half, "none")
        commopt.reduce_scatter(torch.empty(50, dtype=torch.bfloat16), half.repeat(world), "none")
    assert [wire.bytes_sent for wire in wires] == [(world - 1) * 100] * 2  # two bytes an element, as they are

    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    for name in ("none", "int8"):
        commopt.all_reduce(parameter, name)
    torch.testing.assert_close(parameter.data, torch.full((3,), (world - 1) / 2), rtol=1e-2, atol=0)


@pytest.mark.parametrize("world", [2, 3])
def test_dtypes_are_kept(workers: Workers, world: int) -> None:
    workers.run(check_dtypes, world)


def check_uncompressible(rank: int, world: int) -> None:
    functional._said.clear()
    total = world * (world + 1) // 2
    with pytest.warns(CommOptWarning, match=r"torch.int64 tensors travel uncompressed"):
        commopt.all_reduce(integers := torch.full((3, 2), rank + 1), op="sum")
    assert integers.tolist() == [[total] * 2] * 3
    commopt.all_reduce(integers.T, op="sum")  # said already
    with pytest.raises(UnsupportedError, match=r"the mean of torch.int64 is not defined; use op='sum'"):
        commopt.all_reduce(integers)

    output, chunk = torch.empty(world, 2, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    commopt.all_gather(output, torch.tensor([rank, 7]))
    assert output.tolist() == [[other, 7] for other in range(world)]
    commopt.reduce_scatter(chunk, output * (rank + 1), op="sum")
    assert chunk.tolist() == [rank * total, 7 * total]

    with pytest.warns(CommOptWarning, match="complex64"):
        commopt.all_reduce(numbers := torch.full((3,), complex(rank, 2)))
    torch.testing.assert_close(numbers, torch.full((3,), complex((world - 1) / 2, 2)))

    with pytest.warns(CommOptWarning, match="empty"):
        commopt.all_reduce(torch.empty(0, 3))
    commopt.all_gather(torch.empty(world, 0), torch.empty(0))
    commopt.reduce_scatter(torch.empty(0), torch.empty(world, 0))

    torch.sparse.check_sparse_tensor_invariants.enable()  # else torch warns that it does not
    rows = torch.sparse_coo_tensor(torch.tensor([[rank, rank + 1]]), torch.ones(2, 4), (world + 1, 4))
    with pytest.warns(CommOptWarning, match="sparse"):
        commopt.all_reduce(rows)
    expected = torch.full((world + 1, 4), 2.0)
    expected[0] = expected[-1] = 1.0
    torch.testing.assert_close(rows.to_dense(), expected / world)
    for call in (commopt.all_gather, commopt.reduce_scatter):
        with pytest.raises(UnsupportedError, match="must be dense"):
            call(rows, rows)


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_be_compressed_travels_as_it_is(workers: Workers, world: int) -> None:
    workers.run(check_uncompressible, world)


def check_mistakes(rank: int, world: int) -> None:
    tensor = torch.ones(6)
    with pytest.raises(ConfigError, match="op must be 'mean' or 'sum', got 'max'"):
        commopt.all_reduce(tensor, op="max")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        commopt.all_reduce(tensor, "int7")
    with pytest.raises(UnsupportedError, match=f"input must be contiguous, .* {world} times as large"):
        commopt.reduce_scatter(tensor, tensor)
    with pytest.raises(UnsupportedError, match="output must be"):
        commopt.all_gather(torch.empty(world * 6, dtype=torch.float64), tensor)
    with pytest.raises(UnsupportedError, match="contiguous"):
        commopt.all_gather(torch.empty(6, world).T, tensor)
    assert tensor.tolist() == [1.0] * 6


def test_mistakes_are_found_before_anything_is_sent(workers: Workers) -> None:
    workers.run(check_mistakes)


def check_subgroup(rank: int, world: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    tensor = torch.full((1000,), float(rank))
    for _ in range(3):
        commopt.all_reduce(tensor, "randomk", group=group, density=1.0)
    assert tensor.tolist() == pytest.approx([1.0] * 1000)
    output = torch.empty(2, 1000)
    commopt.all_gather(output, torch.full((1000,), float(rank)), group=group)
    assert output[:, 0].tolist() == pytest.approx([0.0, 2.0])


def test_a_subgroup(workers: Workers) -> None:
    workers.run(check_subgroup, 3)


def check_alone(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    tensor = tensor_of(0, (30, 70))
    with counted() as wires:
        commopt.all_reduce(reduced := tensor.clone(), name, **options)
        commopt.reduce_scatter(scattered := torch.empty(30, 70), tensor, name, **options)
        commopt.all_gather(gathered := torch.empty(1, 30, 70), tensor, name, **options)
    assert torch.equal(reduced, tensor)
    assert torch.equal(scattered, tensor)
    assert torch.equal(gathered[0], tensor)
    assert [wire.bytes_sent for wire in wires] == [0, 0, 0]


@every_case
def test_a_world_of_one_changes_nothing(workers: Workers, name: str, options: dict[str, Any]) -> None:
    workers.run(check_alone, 1, name=name, options=options)


def check_noise(rank: int, world: int) -> None:
    total = torch.zeros(2000)
    for _ in range(100):
        tensor = torch.full((2000,), 0.3)
        tensor[::50] = 1.0
        commopt.all_reduce(tensor, "int4", stochastic=True)
        total += tensor / 100
    assert float(total.mean()) == pytest.approx(0.3 + 0.7 / 50, rel=0.005)  # another draw at each call


def test_each_call_draws_anew(workers: Workers) -> None:
    workers.run(check_noise)


def lose_a_peer(rank: int, world: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(ExchangeError, match="peer"):
        commopt.all_reduce(torch.ones(3))


def test_a_lost_peer_is_an_exchange_error(workers: Workers) -> None:
    workers.run(lose_a_peer)
