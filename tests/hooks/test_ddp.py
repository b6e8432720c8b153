"""Training with torch's DDP: plain DDP's bits without compression, the same bits on all ranks with it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commopt.compressors import available
from tests.engine.steps import same_on_all_ranks
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, loss_of, parameters, train
from tests.workers import Workers

worlds = pytest.mark.parametrize("world", [2, 3, 4])


def plain_bits(rank: int, world: int, dtype: torch.dtype) -> int:
    plain, ours = (DDP(MLP().to(dtype), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, ours)]
    with attached(ours, "none") as handle:
        for step in range(24):
            train(plain, optimizers[0], rank, range(step, step + 1), dtype)
            train(ours, optimizers[1], rank, range(step, step + 1), dtype)
            assert equal(parameters(ours), parameters(plain)), step
        talk = (world - 1) * 32 + 24 * 2 * (world - 1) / world * (10 + world) * 8  # a hash, and 24 votes
        assert handle.stats().bytes_sent == pytest.approx(handle.stats().bytes_uncompressed + talk)
        return len(handle.engine._path._layouts)


@worlds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_compression_it_is_plain_ddp_bit_for_bit(workers: Workers, world: int, dtype: torch.dtype) -> None:
    layouts = workers.run(plain_bits, world, dtype=dtype)
    assert min(layouts) >= 1 + 2  # one bucket at first, then several


def ranks_stay_equal(
    rank: int, world: int, name: str, options: dict[str, Any], dtype: torch.dtype, ddp: dict[str, Any]
) -> None:
    model = DDP(MLP().to(dtype), bucket_cap_mb=SMALL_BUCKETS, **ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    with attached(model, name, **options):
        first = loss_of(model.module, rank, 0, dtype).item()
        for step in range(20):
            train(model, optimizer, rank, range(step, step + 1), dtype)
            assert same_on_all_ranks(model.parameters()), step
        assert loss_of(model.module, rank, 0, dtype).item() < first


@pytest.mark.parametrize("name", available())
@worlds
def test_ranks_hold_the_same_bits_after_every_step(workers: Workers, name: str, world: int) -> None:
    workers.run(ranks_stay_equal, world, name=name, options={}, dtype=torch.float32, ddp={})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4", "powersgd", "fp16"])
def test_ranks_stay_equal_in_other_dtypes(workers: Workers, name: str, dtype: torch.dtype) -> None:
    workers.run(ranks_stay_equal, 2, name=name, options={}, dtype=dtype, ddp={})


@pytest.mark.parametrize(
    "ddp", [{"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]
)
@pytest.mark.parametrize(
    ("name", "options"), [("powersgd", {"rank": 2}), ("int8", {"stochastic": True}), ("topk", {"density": 0.1})]
)
def test_ranks_stay_equal_however_ddp_works(
    workers: Workers, name: str, options: dict[str, Any], ddp: dict[str, Any]
) -> None:
    workers.run(ranks_stay_equal, 3, name=name, options=options, dtype=torch.bfloat16, ddp=ddp)


def two_ways(rank: int, world: int, name: str, one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of parameters after some steps with other arguments of DDP."""
    results = []
    for arguments in (one, other):
        model = DDP(MLP(), **arguments)
        with attached(model, name):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, range(30))
        results.append(parameters(model))
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", sorted({*available()} - {"randomk"}))  # which draws anew for each bucket
def test_the_size_of_buckets_does_not_matter(workers: Workers, name: str) -> None:
    buckets = [{"bucket_cap_mb": SMALL_BUCKETS}, {"bucket_cap_mb": 25}]
    # Rows never straddle tensors. What is summed on the way is summed in another order.
    assert max(workers.run(two_ways, 2, name=name, one=buckets[0], other=buckets[1])) <= 1e-6


def test_views_of_the_bucket_do_not_matter(workers: Workers) -> None:
    for name in ("none", "int4"):
        views: list[dict[str, Any]] = [
            {"bucket_cap_mb": SMALL_BUCKETS, "gradient_as_bucket_view": view} for view in (False, True)
        ]
        assert workers.run(two_ways, 2, name=name, one=views[0], other=views[1]) == [0.0, 0.0]


def bytes_of_training(rank: int, world: int, name: str) -> tuple[float, float, float]:
    model = DDP(nn.Sequential(nn.Linear(13, 500), nn.Linear(500, 301), nn.Linear(301, 7)), bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, name) as handle:
        train(model, optimizer, rank, range(4))
        stats = handle.stats()
    assert stats.steps == 4
    return stats.bytes_sent / 4, stats.bytes_uncompressed / 4, stats.compression_ratio


SIZES = [13 * 500, 500, 500 * 301, 301, 301 * 7, 7]


def rows(block: int) -> int:
    return sum(-(-size // block) for size in SIZES)


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("none", 4 * sum(SIZES)),
        ("bf16", 2 * sum(SIZES)),
        ("int8", 260 * rows(256)),
        ("int4", 68 * rows(128)),
        ("onebit", 36 * rows(256)),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_those_of_the_formula(workers: Workers, name: str, payload: int, world: int) -> None:
    for sent, uncompressed, ratio in workers.run(bytes_of_training, world, name=name):
        assert sent == pytest.approx(2 * (world - 1) / world * payload, rel=0.01)
        assert uncompressed == pytest.approx(2 * (world - 1) / world * 4 * sum(SIZES))
        assert ratio == pytest.approx(4 * sum(SIZES) / payload, rel=0.01)


# Why error feedback is there


class Point(nn.Module):
    """A position; its gradient is the way to a target."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(size))

    def forward(self, target: Tensor) -> Tensor:
        return 0.5 * (self.position - target).square().sum()


def distance_left(rank: int, world: int, feedback: bool) -> float:
    """Ranks pull hard in opposite directions along a few coordinates, and together along all others."""
    torch.manual_seed(0)
    goal = torch.randn(2000)
    conflict = torch.zeros(2000)
    conflict[:100] = 10.0 if rank == 0 else -10.0
    model = DDP(Point(2000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.008)
    with attached(model, "topk", density=0.01, error_feedback=feedback):
        for _ in range(500):
            optimizer.zero_grad()
            model(goal + conflict).backward()
            optimizer.step()
    others = slice(100, None)
    left = model.module.position.detach()[others] - goal[others]
    return float(left.norm() / goal[others].norm())


def test_topk_converges_with_error_feedback_and_not_without(workers: Workers) -> None:
    with_feedback, without = (workers.run(distance_left, 2, feedback=feedback)[0] for feedback in (True, False))
    assert with_feedback < 0.1
    assert without > 0.9


def alone(rank: int, world: int, name: str) -> None:
    plain, ours = MLP(), DDP(MLP())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    with attached(ours, name) as handle:
        for step in range(5):
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                train(model, optimizer, rank, range(step, step + 1))
        assert equal(parameters(ours), parameters(plain))
        assert handle.stats().bytes_sent == handle.stats().bytes_uncompressed == 0
        assert handle.stats().steps == 5


@pytest.mark.parametrize("name", available())
def test_a_world_of_one_is_plain_training(workers: Workers, name: str) -> None:
    workers.run(alone, 1, name=name)
