"""The one path and its commit, without a trainer: skips, failures, switches, memory."""

import math
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commopt.compressors import Compressor, available, create
from commopt.compressors.blocks import Int8
from commopt.compressors.lowrank import PowerSGD
from commopt.engine import Engine
from commopt.engine.step import Stats
from commopt.errors import CommOptWarning, ExchangeError
from commopt.messages import Bucket
from commopt.plan import Plan
from commopt.transfers import Transfer
from tests.engine.steps import Tensors, exchange, gradients, make_engine, same_on_all_ranks, summed
from tests.workers import Workers

SHAPES = {"a": (64, 50), "b": (300,), "c": (7, 11, 13)}


@contextmanager
def running(plan: Plan, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Iterator[Engine]:
    engine = make_engine(plan, shapes)
    yield engine
    engine.close()


def residuals(engine: Engine) -> Tensors:
    """Copies of what is committed."""
    engine.settle()
    return {name: residual.clone() for name, residual in engine.residuals.final().items()}


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Steps that are not finite


def skip_not_finite(rank: int, world: int, name: str, bad: float) -> None:
    plan = Plan(create(name), feedback=True)
    with running(plan) as engine, running(plan) as reference:
        for step in range(3):
            for each in (engine, reference):
                exchange(each, gradients(rank, step, SHAPES))
        before = residuals(engine)
        poisoned = gradients(rank, 3, SHAPES)
        if rank == world - 1:
            poisoned["b"][123] = bad
        with pytest.warns(CommOptWarning, match=rf"not finite after '{name}' in step 3, first in bucket 1 \(b\)"):
            _, usable = exchange(engine, poisoned)
        assert not usable
        assert equal(residuals(engine), before)
        _, usable = exchange(engine, poisoned)  # said once
        assert not usable

        mean, usable = exchange(engine, gradients(rank, 4, SHAPES))
        expected, _ = exchange(reference, gradients(rank, 4, SHAPES))
        assert usable
        assert name == "randomk" or equal(mean, expected)  # random-k draws by the step's number
        assert all(torch.isfinite(residual).all() for residual in residuals(engine).values())
        assert (engine.stats().steps, engine.stats().skipped_steps) == (4, 2)


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_that_is_not_finite_never_was(workers: Workers, name: str, world: int) -> None:
    workers.run(skip_not_finite, world, name=name, bad=math.nan if world == 2 else math.inf)


def overflow(rank: int, world: int) -> None:
    with running(Plan(create("fp16"), feedback=False)) as engine:
        huge = {name: gradient * 1e7 for name, gradient in gradients(rank, 0, SHAPES).items()}
        with pytest.warns(CommOptWarning, match="'bf16' or 'int8' where 'fp16' overflows"):
            _, usable = exchange(engine, huge)
        assert not usable
        # 60000 + 60000 overflows, their mean does not.
        mean, usable = exchange(engine, {"b": torch.full((300,), 60_000.0)})
        assert usable
        assert mean["b"].tolist() == [60_000.0] * 300


def test_fp16_overflows_are_seen_and_means_do_not_overflow(workers: Workers) -> None:
    workers.run(overflow)


def low_precision(rank: int, world: int) -> None:
    with running(Plan(create("powersgd", rank=4), feedback=True), {"w": (64, 96)}) as engine:
        rank_one = torch.outer(torch.arange(64.0), torch.arange(96.0)).bfloat16()
        for step in range(10):
            mean, usable = exchange(engine, {"w": torch.zeros(64, 96) if step == 0 else rank_one.clone()})
            assert usable
        assert mean["w"].dtype == torch.bfloat16
        torch.testing.assert_close(mean["w"], rank_one, rtol=0.02, atol=1.0)


def test_powersgd_of_a_bf16_gradient_of_rank_one(workers: Workers) -> None:
    workers.run(low_precision)


def veto(rank: int, world: int) -> None:
    plan = Plan(create("topk"), feedback=True)
    with running(plan) as engine:
        exchange(engine, gradients(rank, 0, SHAPES))
        before = residuals(engine)
        exchange(engine, gradients(rank, 1, SHAPES))
        engine.skip()
        assert equal(residuals(engine), before)
        exchange(engine, gradients(rank, 1, SHAPES))
        assert not equal(residuals(engine), before)


def test_a_vetoed_step_leaves_the_residuals(workers: Workers) -> None:
    workers.run(veto)


# Failures


@dataclass(frozen=True)
class FragileInt8(Int8):
    """Raises where it is told to: at the n-th call of a method, on this rank."""

    calls_left: ClassVar[dict[str, int]] = {}

    def _tick(self, method: str) -> None:
        left = self.calls_left.get(method)
        if left is not None:
            self.calls_left[method] = left - 1
            if left == 0:
                raise ValueError(f"broken in {method}")

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        self._tick("compress")
        return super().compress(rows, seed)

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        self._tick("decompress")
        return super().decompress(payload, seed)


@dataclass(frozen=True)
class FragilePowerSGD(PowerSGD):
    """Raises between its two rounds."""

    calls_left: ClassVar[dict[str, int]] = {}

    def reduce(self, x: Tensor, out: Tensor, layout: Any, warm: Any, seed: int, all_reduce: Any) -> None:
        left = self.calls_left.get("reduce")

        def fragile(vector: Tensor) -> Tensor:
            summed: Tensor = all_reduce(vector)
            if left == 0:
                raise ValueError("broken in reduce")
            return summed

        if left is not None:
            self.calls_left["reduce"] = left - 1
        super().reduce(x, out, layout, warm, seed, fragile)


def fail(rank: int, world: int, compressor: Compressor, method: str, call: int) -> None:
    calls_left = type(compressor).calls_left  # type: ignore[attr-defined]
    calls_left.clear()
    with running(Plan(compressor, feedback=True)) as engine:
        exchange(engine, gradients(rank, 0, SHAPES))
        before = residuals(engine)
        if rank == 1:
            calls_left[method] = call
        start = time.monotonic()
        with pytest.raises(ExchangeError) as caught:
            exchange(engine, gradients(rank, 1, SHAPES))
        assert time.monotonic() - start < 10  # the group waits for 20 seconds
        calls_left.clear()
        # Messages are compressed by turns: which of them meets the fault is open.
        message = rf"rank 1 failed in message [012] \([abc]\): ValueError: broken in {method} \| The step was not taken"
        assert re.match(message, str(caught.value))
        assert isinstance(caught.value.__cause__, ValueError) == (rank == 1)
        assert equal(residuals(engine), before)

        mean, usable = exchange(engine, gradients(rank, 2, SHAPES))
        assert usable
        assert same_on_all_ranks(mean.values())


@pytest.mark.parametrize(
    ("world", "compressor", "method", "call"),
    [
        (2, FragileInt8(), "compress", 1),  # one call a bucket
        (2, FragileInt8(), "decompress", 3),  # two a bucket: its own and its peer's
        (3, FragileInt8(), "compress", 2),  # two a bucket: the contribution, then the sum
        (3, FragileInt8(), "decompress", 7),  # six a bucket: this is one after the all-to-all
        (3, FragileInt8(), "compress", 3),
        (4, FragileInt8(), "compress", 2),
        (2, FragilePowerSGD(), "reduce", 1),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all(
    workers: Workers, world: int, compressor: Compressor, method: str, call: int
) -> None:
    workers.run(fail, world, compressor=compressor, method=method, call=call)


def lose_a_peer(rank: int, world: int) -> None:
    engine = make_engine(Plan(create("int8"), feedback=False), SHAPES)
    exchange(engine, gradients(rank, 0, SHAPES))
    if rank == 1:
        dist.destroy_process_group()
        return
    for _ in range(2):  # no later step hangs either
        with pytest.raises(ExchangeError, match=rf"rank {rank} lost its peers in message 0 \(a\)"):
            exchange(engine, gradients(rank, 1, SHAPES))
    engine.close()


@pytest.mark.parametrize("world", [2, 3])
def test_a_lost_peer_is_said_and_nothing_hangs(workers: Workers, world: int) -> None:
    workers.run(lose_a_peer, world)


# Switches


def switch(rank: int, world: int) -> None:
    with running(Plan(create("topk"), feedback=True)) as engine:
        total, delivered = torch.zeros(64, 50), torch.zeros(64, 50)

        def step(number: int) -> str:
            local = gradients(rank, number, SHAPES)
            total.add_(local["a"])
            mean, usable = exchange(engine, local)
            assert usable
            assert same_on_all_ranks(mean.values())
            delivered.add_(mean["a"])
            return engine.plan.compressor.name

        assert [step(0), step(1)] == ["topk", "topk"]
        if rank == world - 1:
            engine.request(compress=False)
        assert [step(2), step(3)] == ["topk", "none"]
        # The first step without compression has delivered all that was kept.
        assert all(not residual.any() for residual in residuals(engine).values())
        torch.testing.assert_close(delivered.double(), summed(total) / world, rtol=1e-4, atol=1e-4)

        mean, _ = exchange(engine, gradients(rank, 4, SHAPES))
        for name, expected in gradients(rank, 4, SHAPES).items():
            dist.all_reduce(expected.mul_(1 / world))
            assert torch.equal(mean[name], expected)  # plain DDP, bit for bit

        if rank == 0:
            engine.request(compress=True)
        assert [step(5), step(6), step(7)] == ["none", "topk", "topk"]
        assert any(residual.any() for residual in residuals(engine).values())


@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_switches_all_in_the_same_step(workers: Workers, world: int) -> None:
    workers.run(switch, world)


def switch_and_back(rank: int, world: int) -> None:
    with running(Plan(create("topk"), feedback=True)) as engine:
        names = []
        for step in range(6):
            if step == 1:
                engine.request(compress=False)
            if step == 2:  # before the first step without compression
                engine.request(compress=True)
            exchange(engine, gradients(rank, step, SHAPES))
            names.append(engine.plan.compressor.name)
        assert names == ["topk", "topk", "none", "topk", "topk", "topk"]


def test_enabling_at_once_is_not_forgotten(workers: Workers) -> None:
    workers.run(switch_and_back)


def disagree(rank: int, world: int) -> None:
    with running(Plan(create("topk"), feedback=True)) as engine:
        engine.request(compress=rank == 0)
        for step in range(2):
            exchange(engine, gradients(rank, step, SHAPES))
        assert engine.plan.compressor.name == "none"


def test_uncompressed_wins_where_ranks_disagree(workers: Workers) -> None:
    workers.run(disagree)


def switch_in_a_bad_step(rank: int, world: int, veto: bool) -> None:
    with running(Plan(create("topk"), feedback=True)) as engine:
        engine.request(compress=False)
        exchange(engine, gradients(rank, 0, SHAPES))
        kept = residuals(engine)
        assert any(residual.any() for residual in kept.values())
        local = gradients(rank, 1, SHAPES)
        if veto:
            exchange(engine, local)
            engine.skip()
        else:
            local["a"][0] = math.nan
            with pytest.warns(CommOptWarning, match="not finite"):
                exchange(engine, local)
        assert equal(residuals(engine), kept)  # they were not delivered in a step that was not taken
        mean, _ = exchange(engine, gradients(rank, 2, SHAPES))
        assert all(not residual.any() for residual in residuals(engine).values())
        expected = summed(gradients(rank, 2, SHAPES)["a"] / world + kept["a"])
        torch.testing.assert_close(mean["a"].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("veto", [False, True])
def test_residuals_wait_for_a_step_that_is_taken(workers: Workers, veto: bool) -> None:
    workers.run(switch_in_a_bad_step, veto=veto)


# Idle parameters


def idle(rank: int, world: int, name: str, options: dict[str, Any]) -> None:
    """The identity, where a parameter takes part on some ranks only, or on none."""
    with running(Plan(create(name, **options), feedback=True)) as engine:
        exchange(engine, gradients(rank, 0, SHAPES))
        for step in range(1, 7):
            before = residuals(engine)
            local = gradients(rank, step, SHAPES)
            idle_here = {"b"} if step % 2 else {"c"} if (step + rank) % 2 else set()  # b on all ranks, c by turns
            for idle_name in idle_here:
                local[idle_name].zero_()
            mean, usable = exchange(
                engine, {key: value.clone() for key, value in local.items()}, idle=frozenset(idle_here)
            )
            assert usable
            after = residuals(engine)
            if step % 2:
                assert torch.equal(after["b"], before["b"])
                assert not mean["b"].any()
            for key in SHAPES:
                expected = summed(local[key] / world + before[key] - after[key])
                torch.testing.assert_close(mean[key].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "name", "options"),
    [
        (2, "int4", {}),
        (2, "topk", {}),
        (3, "int4", {}),
        (3, "topk", {"density": 0.1}),
        (3, "topk", {}),
        (3, "powersgd", {}),
    ],
)
def test_idle_parameters_keep_their_residuals(workers: Workers, world: int, name: str, options: dict[str, Any]) -> None:
    workers.run(idle, world, name=name, options=options)


def idle_at_the_switch(rank: int, world: int) -> None:
    """The residual of a parameter that is idle on one rank when compression ends is delivered when it takes part."""
    with running(Plan(create("topk"), feedback=True)) as engine:
        exchange(engine, gradients(rank, 0, SHAPES))
        engine.restrain(None, at_once=True)
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        idle_here = frozenset({"b"}) if rank == 1 else frozenset()
        exchange(engine, {name: value.clone() for name, value in zeros.items()}, idle=idle_here)
        owed = summed(residuals(engine)["b"])
        assert owed.any()
        mean, _ = exchange(engine, {name: value.clone() for name, value in zeros.items()})
        torch.testing.assert_close(mean["b"].double(), owed, rtol=1e-5, atol=1e-6)
        exchange(engine, {name: value.clone() for name, value in zeros.items()})
        assert not engine.plan.feedback


def test_a_residual_that_was_idle_at_the_switch_is_delivered_later(workers: Workers) -> None:
    workers.run(idle_at_the_switch, world=2)


def stale(rank: int, world: int) -> None:
    with running(Plan(create("topk"), feedback=True)) as engine:
        exchange(engine, gradients(rank, 0, SHAPES))
        before = residuals(engine)
        exchange(
            engine, gradients(rank, 1, SHAPES), idle=frozenset({"b"})
        )  # DDP sends what an idle network has left over
        assert torch.equal(residuals(engine)["b"], before["b"])
        assert not torch.equal(residuals(engine)["a"], before["a"])


def test_stale_gradients_leave_no_trace(workers: Workers) -> None:
    workers.run(stale, 2)


# What a bucket can hold


def odd_buckets(rank: int, world: int) -> None:
    shapes = {"empty": (0, 3), "half": (300,), "sparse": (4, 2), "complex": (5,), "last": (0,)}
    with running(
        Plan(create("int8"), feedback=True), {key: shapes[key] for key in ("empty", "half", "last")}
    ) as engine:
        torch.sparse.check_sparse_tensor_invariants.enable()  # else torch warns that it does not
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1, 2), (4, 2))
        tensors = {
            "empty": torch.empty(0, 3),
            "half": torch.full((300,), rank + 1.0, dtype=torch.bfloat16),
            "sparse": sparse,
            "complex": torch.full((5,), complex(rank, 1)),
            "last": torch.empty(0),
        }
        buckets = [
            Bucket(index, [name], tensor, [tensor], frozenset(), name == "last")
            for index, (name, tensor) in enumerate(tensors.items())
        ]
        for future in [engine.submit(bucket) for bucket in buckets]:
            future.wait()
        with pytest.warns(CommOptWarning) as said:
            assert engine.finish_step()
        assert len(said) == 2
        assert "sparse gradients travel uncompressed, first in bucket 2 (sparse)" in str(said[0].message)
        assert "complex64 gradients travel uncompressed, first in bucket 3 (complex)" in str(said[1].message)
        torch.testing.assert_close(tensors["half"].float(), torch.full((300,), (world + 1) / 2), rtol=0.01, atol=0)
        assert torch.equal(tensors["complex"], torch.full((5,), complex((world - 1) / 2, 1)))
        expected = torch.zeros(4, 2)
        expected[:world] = 1 / world
        assert torch.equal(sparse.to_dense(), expected)


def test_odd_buckets(workers: Workers) -> None:
    workers.run(odd_buckets, 2)


def strict_warnings(rank: int, world: int) -> None:
    """A warning that is an error is raised where the caller sees it, and hangs nobody."""
    with running(Plan(create("int8"), feedback=False)) as engine:
        numbers = {"a": torch.ones(4, dtype=torch.complex64)}
        with pytest.raises(CommOptWarning, match="complex64"):
            exchange(engine, numbers)
        _, usable = exchange(engine, numbers)
        assert usable


def test_a_warning_that_is_an_error_hangs_nobody(workers: Workers) -> None:
    workers.run(strict_warnings, timeout=30)


# Bounds


def memory(rank: int, world: int, name: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"p{i}": (1024, 64) for i in range(8)}
    parameters = 8 * 1024 * 64
    bucket = 4 * parameters // 4
    for feedback in (False, True):
        with running(Plan(create(name), feedback), shapes) as engine:
            for step in range(3):
                pairs = [[f"p{i}", f"p{i + 1}"] for i in range(0, 8, 2)]
                exchange(engine, gradients(rank, step, shapes), pairs if step else [[n] for n in shapes])
            assert all(lane.scratch.nbytes <= 3 * bucket for lane in engine._path.lanes)
            engine.settle()
            slots = [buffer for slot in engine.residuals._slots.values() for buffer in (slot.front, slot.back)]
            held = [*slots, *engine.residuals.final().values()]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
            assert sum(storages.values()) <= (1.05 * 8 * parameters if feedback else 0)


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("world", [2, 3])
def test_memory_is_bounded_by_the_largest_bucket(workers: Workers, name: str, world: int) -> None:
    workers.run(memory, world, name=name)


def count(rank: int, world: int) -> Stats:
    with running(Plan(create("onebit"), feedback=True)) as engine:
        assert engine.stats() == Stats()
        assert Stats().compression_ratio == 1.0
        for step in range(5):
            exchange(engine, gradients(rank, step, SHAPES))
        return engine.stats()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_stats_add_up(workers: Workers, world: int) -> None:
    rows = [-(-numel // 256) for numel in (3200, 300, 1001)]
    sent = sum(rows) * 36 if world == 2 else 4 / 3 * sum(-(-r // 3) * 3 * 36 for r in rows) if world == 3 else 0.0
    vote = Transfer("all_reduce", 10 + world, torch.int64).sent(world)
    for stats in workers.run(count, world):
        assert (stats.steps, stats.skipped_steps) == (5, 0)
        assert stats.bytes_sent == pytest.approx(5 * (sent + vote))
        assert stats.bytes_uncompressed == pytest.approx(5 * 2 * (world - 1) / world * 4 * (3200 + 300 + 1001))
        assert stats.codec_seconds > 0
        assert (stats.wire_seconds > 0) == (world > 1)
        if world > 1:
            assert stats.compression_ratio == stats.bytes_uncompressed / stats.bytes_sent > 15


def say(rank: int, world: int) -> int:
    with running(Plan(create("int8"), feedback=False)) as engine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            engine.say_once(f"the same kind of message, of forty letters at least, then {number}")
        engine.say_once("another")
    assert str(said[0].message).startswith(f"rank {rank}: ")
    return len(said)


def test_things_are_said_once(workers: Workers) -> None:
    assert workers.run(say) == [2, 2]
