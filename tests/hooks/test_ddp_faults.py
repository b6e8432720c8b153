"""What goes wrong: mistakes at attach, ranks that differ, ranks that fail, numbers that overflow."""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.compressors import register, registry
from commopt.compressors.blocks import Int8
from commopt.errors import AttachError, CommOptWarning, ConfigError, ExchangeError, MismatchError
from tests.engine.steps import same_on_all_ranks
from tests.hooks.training import MLP, SMALL_BUCKETS, attached, equal, loss_of, parameters, train
from tests.workers import Workers


def mistakes(rank: int, world: int) -> None:
    model = DDP(MLP())
    with pytest.raises(AttachError, match=r"needs a torch.nn.parallel.DistributedDataParallel, got MLP"):
        commopt.attach(MLP())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'powersgd'"):
        commopt.attach(model, "powersdg")
    with pytest.raises(ConfigError, match=r"unknown option .* 'rnak'; did you mean 'rank'"):
        commopt.attach(model, "powersgd", rnak=3)
    with pytest.raises(ConfigError, match="timeout must be a positive number of seconds, got 0"):
        commopt.attach(model, timeout=0)
    with attached(model):
        with pytest.raises(AttachError, match=r"has a communication hook already \(_hook\)"):
            commopt.attach(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    with pytest.raises(AttachError, match="handle of this model was closed"):
        loss_of(model, rank, 0).backward()

    mixed = DDP(MLP())
    mixed.mixed_precision = torch.bfloat16  # type: ignore[assignment]  # DDP makes this one on CUDA only
    with pytest.raises(AttachError, match="use autocast instead"):
        commopt.attach(mixed)

    frozen = DDP(MLP())
    frozen.requires_grad_(False)
    with pytest.raises(AttachError, match="no parameter of this DDP model needs a gradient"):
        commopt.attach(frozen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commopt.hooks.ddp.store_answers", lambda seconds: False)
        with pytest.raises(ExchangeError, match="the store on rank 0 of the job does not answer"):
            commopt.attach(DDP(MLP()))

    taken = DDP(MLP())
    taken.register_comm_hook(None, allreduce_hook)
    with pytest.raises(AttachError, match=r"already \(allreduce_hook\)"):
        commopt.attach(taken)


def test_mistakes_at_attach(workers: Workers) -> None:
    workers.run(mistakes)


def mismatch(rank: int, world: int, arguments: list[dict[str, Any]]) -> str:
    model = DDP(MLP())
    with pytest.raises(MismatchError) as caught:
        commopt.attach(model, timeout=20, **arguments[rank])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))  # the model is as it was: plain DDP
    assert same_on_all_ranks(model.parameters())
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            [{"compressor": "int8"}, {"compressor": "int4"}],
            "compressor: Int8(stochastic=False, block=256) on rank 0; Int4(",
        ),
        (
            [{"compressor": "topk", "density": d} for d in (0.01, 0.02)],
            "TopK(density=0.01, block=4096) on rank 0; TopK(",
        ),
        (
            [{"compressor": "int8", "error_feedback": f} for f in (True, False)],
            "error feedback: True on rank 0; False on rank 1",
        ),
        ([{"grad_scaler": torch.amp.GradScaler("cpu")}, {}], "gradient scaler: True on rank 0; False on rank 1"),
    ],
)
def test_ranks_that_differ_say_so_before_anything_is_sent(workers: Workers, arguments: Any, named: str) -> None:
    one, other = workers.run(mismatch, 2, arguments=arguments)
    assert one == other
    assert one.startswith("ranks disagree. ")
    assert named in one


def other_names(rank: int, world: int) -> str:
    """DDP compares shapes alone: two layers that change places go unnoticed."""
    layers = {"one": nn.Linear(5, 5), "two": nn.Linear(5, 5)}
    model = DDP(nn.ModuleDict(layers if rank != 1 else dict(reversed(layers.items()))))
    with pytest.raises(MismatchError) as caught:
        commopt.attach(model, timeout=20)
    return str(caught.value)


def test_parameters_in_another_order_are_named(workers: Workers) -> None:
    (text,) = set(workers.run(other_names, 3))
    assert (
        "parameter 0: one.weight [5, 5] torch.float32 on rank 0, 2; two.weight [5, 5] torch.float32 on rank 1" in text
    )


@dataclass(frozen=True)
class Fragile(Int8):
    """Raises once, where it is told to."""

    calls_left: ClassVar[int] = -1
    error: ClassVar[BaseException] = ValueError("broken codec")

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        Fragile.calls_left -= 1
        if Fragile.calls_left == 0:
            raise Fragile.error
        return super().compress(rows, seed)


def fail_in_backward(rank: int, world: int) -> list[str]:
    register("fragile")(Fragile)
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages = []
    try:
        with attached(model, "fragile", error_feedback=True) as handle:
            train(model, optimizer, rank, range(3))
            for step in (3, 4):  # a model can go on after it
                weights = parameters(model)
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                if rank == 1:
                    Fragile.calls_left = 2 if world == 2 else 3  # one compression a bucket at two ranks, else two
                start = time.monotonic()
                with pytest.raises(ExchangeError) as caught:
                    loss.backward()
                assert time.monotonic() - start < 10  # the group waits for 20 seconds
                messages.append(str(caught.value))
                train(model, optimizer, rank, range(step + 5, step + 8))
                assert same_on_all_ranks(model.parameters())
                assert not equal(parameters(model), weights)
            assert handle.stats().steps == 9
    finally:
        del registry._registry["fragile"]
    return messages


@pytest.mark.parametrize("world", [2, 3])
def test_a_failure_on_one_rank_is_raised_on_all(workers: Workers, world: int) -> None:
    ((one, two), *others) = workers.run(fail_in_backward, world)
    assert one.startswith("rank 1 failed in message ")
    assert all(
        each.endswith("): ValueError: broken codec | The step was not taken on any rank.") for each in (one, two)
    )
    assert all(messages == [one, two] for messages in others)


def go_on_regardless(rank: int, world: int, error: type[BaseException], message: str) -> None:
    """A loop that catches the error and lets the optimizer step."""
    register("fragile")(Fragile)
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        with attached(model, "fragile"):
            train(model, optimizer, rank, range(3))
            weights = parameters(model)
            Fragile.error, Fragile.calls_left = error(message), 2 if rank == 1 else -1
            optimizer.zero_grad()
            with pytest.raises(ExchangeError, match=f"rank 1 failed in message .*: {error.__name__}: "):
                loss_of(model, rank, 3).backward()
            optimizer.step()
            assert equal(parameters(model), weights)
    finally:
        Fragile.error = ValueError("broken codec")
        del registry._registry["fragile"]


@pytest.mark.parametrize(("error", "message"), [(ValueError, "no name \udcff"), (SystemExit, "3")])
def test_a_failed_step_is_not_taken_whatever_was_raised(
    workers: Workers, error: type[BaseException], message: str
) -> None:
    workers.run(go_on_regardless, error=error, message=message)


def lose_a_peer(rank: int, world: int) -> None:
    model = DDP(MLP())
    handle = commopt.attach(model, timeout=5)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))
    loss = loss_of(model, rank, 2)
    if rank == 1:
        handle.close()
        dist.destroy_process_group()
        return
    with pytest.raises(ExchangeError, match=r"rank 0 lost its peers in message 0 .* last checkpoint"):
        loss.backward()
    handle.close()


def test_a_lost_peer_ends_backward_with_an_error(workers: Workers) -> None:
    workers.run(lose_a_peer)


# Numbers


def overflow(rank: int, world: int) -> None:
    model = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with attached(model, "fp16") as handle:
        train(model, optimizer, rank, range(3))
        weights, moments = parameters(model), [state["exp_avg"].clone() for state in optimizer.state.values()]
        optimizer.zero_grad()
        (1e7 * loss_of(model, rank, 3)).backward() if rank == 0 else loss_of(model, rank, 3).backward()
        assert handle.stats().skipped_steps == 1
        optimizer.step()
        assert equal(parameters(model), weights)
        assert equal([state["exp_avg"] for state in optimizer.state.values()], moments)
        train(model, optimizer, rank, range(4, 6))
        assert same_on_all_ranks(model.parameters())
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:rank .. the mean gradient was not finite after 'fp16'")
def test_fp16_that_overflows_leaves_the_weights(workers: Workers) -> None:
    workers.run(overflow)


def one_nan(rank: int, world: int, name: str) -> None:
    models = [DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    with attached(models[0], name) as handle, attached(models[1], name):
        for step in range(8):
            if step == 4:
                weights = parameters(models[0])
                optimizers[0].zero_grad()
                loss = loss_of(models[0], rank, 99)
                with pytest.warns(CommOptWarning, match="not finite"):
                    (loss * float("nan") if rank == 1 else loss).backward()
                optimizers[0].step()
                assert equal(parameters(models[0]), weights)
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, rank, range(step, step + 1))
            assert equal(parameters(models[0]), parameters(models[1])), step
        assert (handle.stats().steps, handle.stats().skipped_steps) == (8, 1)


@pytest.mark.parametrize("name", ["none", "fp16", "int8", "int4", "onebit", "topk", "powersgd"])
@pytest.mark.parametrize("world", [2, 3])
def test_one_nan_on_one_rank_is_as_if_it_had_never_been(workers: Workers, name: str, world: int) -> None:
    workers.run(one_nan, world, name=name)


def scaled(rank: int, world: int, name: str) -> None:
    """A scale of a power of two changes no bit of the training, however it moves."""
    plain, ours = DDP(MLP()), DDP(MLP())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, ours)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    with attached(plain, name), attached(ours, name, grad_scaler=scaler) as handle:
        scales = set()
        for step in range(20):
            if step in (5, 6, 13):  # one rank overflows; all skip, and the scale halves
                weights, scale = parameters(ours), scaler.get_scale()
                optimizers[1].zero_grad()
                loss = scaler.scale(loss_of(ours, rank, 99))
                (loss * float("inf") if rank == 0 else loss).backward()
                scaler.step(optimizers[1])
                scaler.update()
                assert scaler.get_scale() == scale / 2
                assert equal(parameters(ours), weights)
            train(plain, optimizers[0], rank, range(step, step + 1))
            optimizers[1].zero_grad()
            scaler.scale(loss_of(ours, rank, step)).backward()
            scaler.step(optimizers[1])
            scaler.update()
            scales.add(scaler.get_scale())
            assert equal(parameters(ours), parameters(plain)), step
        assert len(scales) > 3
        assert (handle.stats().steps, handle.stats().skipped_steps) == (20, 3)


@pytest.mark.filterwarnings("ignore:rank .. the mean gradient was not finite")
@pytest.mark.parametrize("name", ["int4", "topk", "onebit"])
def test_residuals_follow_a_gradient_scaler(workers: Workers, name: str) -> None:
    workers.run(scaled, 2, name=name)


def a_scaler_that_does_nothing(rank: int, world: int) -> None:
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with attached(model, "int8", grad_scaler=scaler):
        train(model, optimizer, rank, range(2))
        weights = parameters(model)
        optimizer.zero_grad()
        with pytest.warns(CommOptWarning, match="not finite"):
            scaler.scale(loss_of(model, rank, 2) * (float("nan") if rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert equal(parameters(model), weights)


def test_a_disabled_gradient_scaler_is_as_none(workers: Workers) -> None:
    workers.run(a_scaler_that_does_nothing)


# The switch


def switch(rank: int, world: int) -> None:
    plain, ours = DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS), DDP(MLP(), bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    with attached(ours, "topk", density=0.05) as handle:
        train(ours, optimizers[1], rank, range(5))
        if rank == 1:
            handle.disable()
        train(ours, optimizers[1], rank, range(5, 7))  # one that still compresses, one that delivers what was kept
        handle.engine.settle()
        assert all(not residual.any() for residual in handle.engine.residuals.final().values())
        assert handle.engine.plan.compressor.name == "none"

        train(plain, optimizers[0], rank, range(1))  # DDP regathers its buckets after the first step
        plain.load_state_dict(ours.state_dict())
        sent = handle.stats()
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            train(model, optimizer, rank, range(7, 10))
        assert equal(parameters(plain), parameters(ours))
        uncompressed = handle.stats().bytes_uncompressed - sent.bytes_uncompressed
        assert handle.stats().bytes_sent - sent.bytes_sent == pytest.approx(uncompressed, rel=0.01)

        if rank == 0:
            handle.enable()
        train(ours, optimizers[1], rank, range(10, 12))
        assert handle.engine.plan.compressor.name == "topk"
        assert same_on_all_ranks(ours.parameters())


@pytest.mark.parametrize("world", [2, 3])
def test_one_call_switches_compression_off_and_on(workers: Workers, world: int) -> None:
    workers.run(switch, world)
