"""Training on living ranks: what a user of Lightning does, and the right value for each."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import commopt
import lightning_commopt
import lightning_commopt.pytorch_lightning
from lightning_commopt import CommOptDDPStrategy
from tests.lightning.fits import (
    Batch,
    Batches,
    Fit,
    Regression,
    assert_ranks_equal,
    assert_same_bits,
    fit,
    fit_and_listen,
    flat,
    handle_of,
    make_trainer,
    rank_of_the_group,
)
from tests.workers import Workers

Arguments = dict[str, Any]
PLAIN: Arguments = {"ddp": True}
NONE: Arguments = {"compressor": "none"}
INT8: Arguments = {"compressor": "int8"}
POWERSGD: Arguments = {"compressor": "powersgd", "rank": 2}
TOPK: Arguments = {"compressor": "topk", "density": 0.05}
UNUSED: Arguments = {"find_unused_parameters": True}
STATIC: Arguments = {"static_graph": True}

compressing = pytest.mark.parametrize("strategy", [INT8, POWERSGD, TOPK], ids=lambda strategy: strategy["compressor"])

# ------------------------------------------------------------------------------------------------ names and numbers


@pytest.mark.parametrize("name", commopt.compressors.available())
def test_every_registered_name_trains(workers: Workers, name: str) -> None:
    fits = workers.run(fit, strategy=f"commopt_ddp_{name}")
    assert_ranks_equal(fits)
    stats = fits[0].stats[-1]
    assert (stats.steps, stats.skipped_steps) == (4, 0)
    assert stats.bytes_uncompressed == 4 * 4 * len(fits[0].parameters[0])  # two ranks, four steps, fp32
    if name == "none":
        assert stats.bytes_sent == pytest.approx(stats.bytes_uncompressed, rel=0.01)
    else:
        assert stats.bytes_sent < 0.8 * stats.bytes_uncompressed


@compressing
def test_three_ranks_hold_the_same_bits(workers: Workers, strategy: Arguments) -> None:
    assert_ranks_equal(workers.run(fit, world=3, strategy=strategy))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": 0.002}, {"gradient_as_bucket_view": True}], ids=str)
def test_none_is_lightnings_ddp_bit_for_bit(workers: Workers, world: int, ddp: Arguments) -> None:
    ours, theirs = workers.run(fit, world, strategy=NONE | ddp), workers.run(fit, world, strategy=PLAIN | ddp)
    assert_same_bits(ours, theirs)


@compressing
def test_compression_learns(workers: Workers, strategy: Arguments) -> None:
    losses = workers.run(fit, strategy=strategy, count=30)[0].losses
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])


@compressing
def test_one_rank_sends_nothing_and_loses_nothing(workers: Workers, strategy: Arguments) -> None:
    ours, plain = workers.run(fit, 1, strategy=strategy), workers.run(fit, 1, strategy=PLAIN)
    assert_same_bits(ours, plain)
    assert (ours[0].stats[-1].steps, ours[0].stats[-1].bytes_sent) == (4, 0)


# ------------------------------------------------------------------------------------ accumulation and static graphs


@compressing
@pytest.mark.parametrize("ddp", [{}, UNUSED], ids=str)
def test_accumulation_exchanges_once_an_optimizer_step(workers: Workers, strategy: Arguments, ddp: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy | ddp, count=7, accumulate_grad_batches=3)  # one batch for the last step
    assert_ranks_equal(fits)
    assert [stats.steps for stats in fits[0].stats] == [0, 0, 1, 1, 1, 2, 3]
    assert fits[0].steps == 3


def test_accumulated_none_is_lightnings_ddp_bit_for_bit(workers: Workers) -> None:
    ours, plain = (workers.run(fit, strategy=how, count=6, accumulate_grad_batches=2) for how in (NONE, PLAIN))
    assert_same_bits(ours, plain)


@compressing
def test_a_static_graph_is_in_step_from_the_first(workers: Workers, strategy: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy | STATIC)
    assert_ranks_equal(fits)
    assert [stats.steps for stats in fits[0].stats] == [1, 2, 3, 4]


def test_a_static_graph_accumulates(workers: Workers) -> None:
    """torch's DDP has to exchange its first backward; without the extra exchange it fails here."""
    fits = workers.run(fit, strategy=NONE | STATIC, count=6, accumulate_grad_batches=3)
    assert_ranks_equal(fits)
    assert [stats.steps for stats in fits[0].stats] == [1, 1, 2, 2, 2, 3]
    plain = workers.run(fit, strategy=PLAIN, count=6, accumulate_grad_batches=3)
    torch.testing.assert_close(fits[0].parameters, plain[0].parameters)


# ---------------------------------------------------------------------------------------------------------- models


class Branches(Regression):
    """One branch that no rank uses in every other batch, and one that rank 0 alone uses in the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.rare = nn.Linear(16, 4), nn.Linear(16, 4)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.net(batch[0])
        if batch_idx % 2:
            output = output + self.odd(batch[0])
        if batch_idx == 1 and self.global_rank == 0:
            output = output + self.rare(batch[0])
        return mse_loss(output, batch[1])


class Frozen(Regression):
    """The first layer is frozen, the last two share their weight, and one group of the optimizer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.square, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.square.weight
        self.never = nn.Linear(3, 3).requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return mse_loss(self.again(self.square(self.net(batch[0]))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained}, {"params": self.never.parameters()}]
        return torch.optim.SGD(groups, 0.01, momentum=0.9)


@pytest.mark.parametrize("model", [Branches, Frozen])
def test_none_is_bit_equal_with_branches_and_frozen_layers(workers: Workers, model: type[Regression]) -> None:
    ours, plain = (workers.run(fit, strategy=how | UNUSED, model=model) for how in (NONE, PLAIN))
    assert_same_bits(ours, plain)


@compressing
def test_what_no_rank_uses_does_not_move(workers: Workers, strategy: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy | UNUSED, model=Branches)
    assert_ranks_equal(fits)
    branch = 16 * 4 + 4
    odd = [parameters[-2 * branch : -branch] for parameters in fits[0].parameters]
    rare = [parameters[-branch:] for parameters in fits[0].parameters]
    assert [torch.equal(odd[step], odd[step + 1]) for step in range(3)] == [False, True, False]
    assert [torch.equal(rare[step], rare[step + 1]) for step in range(3)] == [False, True, True]


@compressing
def test_frozen_layers_and_shared_weights(workers: Workers, strategy: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy, model=Frozen)
    assert_ranks_equal(fits)
    frozen = 16 * 256 + 256
    assert torch.equal(fits[0].parameters[0][:frozen], fits[0].parameters[-1][:frozen])
    trained = (256 * 4 + 4) + (4 * 4 + 4) + 4
    assert fits[0].stats[-1].bytes_uncompressed == 4 * 4 * trained


class Diverging(Regression):
    """The third batch of rank 0 is not a number."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * float("nan") if batch_idx == 2 and self.global_rank == 0 else loss


@compressing
def test_all_ranks_skip_a_step_that_is_not_finite(workers: Workers, strategy: Arguments) -> None:
    results = workers.run(fit_and_listen, strategy=strategy, model=Diverging)
    fits = [result for result, _ in results]
    assert_ranks_equal(fits)
    assert all(len(warned) == 1 and "in step 2, first in bucket" in warned[0] for _, warned in results)
    weights = fits[0].parameters
    assert [torch.equal(weights[step], weights[step + 1]) for step in range(3)] == [False, True, False]
    assert (fits[0].stats[-1].steps, fits[0].stats[-1].skipped_steps) == (3, 1)


# ------------------------------------------------------------------------------------------------------- precision


@compressing
@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-mixed", 4), ("bf16-true", 2)])
def test_bf16(workers: Workers, strategy: Arguments, precision: str, itemsize: int) -> None:
    fits = workers.run(fit, strategy=strategy, precision=precision)
    assert_ranks_equal(fits)
    assert fits[0].stats[-1].bytes_uncompressed == 4 * itemsize * len(fits[0].parameters[0])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_none_is_lightnings_ddp_bit_for_bit(workers: Workers, precision: str) -> None:
    ours, plain = (workers.run(fit, strategy=how, precision=precision) for how in (NONE, PLAIN))
    assert_same_bits(ours, plain)


def fit_with_a_scaler(
    rank: int, world: int, scale: float, growth_interval: int, **kwargs: Any
) -> tuple[Fit, list[str], float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return *fit_and_listen(rank, world, plugins=[plugin], strategy=TOPK, **kwargs), scaler.get_scale()


def test_a_loss_scale_that_grows_changes_nothing(workers: Workers) -> None:
    """Powers of two are exact, so what the residuals deliver has to be the same as under a scale that stays."""
    still = workers.run(fit_with_a_scaler, scale=2.0**6, growth_interval=1000, count=8)
    grown = workers.run(fit_with_a_scaler, scale=2.0**6, growth_interval=2, count=8)
    assert [result[1:] for result in still + grown] == [([], 2.0**6)] * 2 + [([], 2.0**10)] * 2
    assert_ranks_equal([result[0] for result in grown])
    torch.testing.assert_close(grown[0][0].parameters, still[0][0].parameters, rtol=1e-3, atol=1e-5)


def test_the_scaler_skips_what_overflows(workers: Workers) -> None:
    results = workers.run(fit_with_a_scaler, scale=2.0**20, growth_interval=1000, count=10)
    fits = [result[0] for result in results]
    assert_ranks_equal(fits)
    stats = fits[0].stats[-1]
    assert 0 < stats.skipped_steps == 10 - stats.steps
    for _, warned, scale in results:
        assert scale == 2.0 ** (20 - stats.skipped_steps)
        assert len(warned) == 1
        assert "not finite" in warned[0]


# ------------------------------------------------------------------------------------------------- the life of a fit


class Evaluated(Regression):
    """A regression that can also be validated and tested."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


def use_again(rank: int, world: int, order: list[str]) -> tuple[list[int], list[float], Tensor]:
    """Calls these methods of one Trainer. Steps of the exchange in each fit, losses of the others, and the weights."""
    with rank_of_the_group(rank):
        model, trainer = Evaluated(), make_trainer(world, CommOptDDPStrategy(**TOPK), max_epochs=0)
        steps, losses = [], []
        for name in order:
            if name == "fit":
                trainer.fit_loop.max_epochs += 1
                trainer.fit(model, Batches(rank, 3), Batches(rank, 2))
                steps.append(handle_of(trainer).stats().steps)
            else:
                losses.append(getattr(trainer, name)(model, Batches(rank, 2), verbose=False)[0]["loss"])
        assert (trainer.strategy.handle is None) == ("fit" not in order)
        return steps, losses, flat(model)


@pytest.mark.parametrize("order", ["validate", "test", "fit fit", "test fit test", "validate fit validate fit"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_trainer_is_used_again(workers: Workers, world: int, order: str) -> None:
    results = workers.run(use_again, world, order=order.split())
    steps, losses, weights = results[0]
    assert steps == [3] * order.count("fit")
    assert losses == sorted(losses, reverse=True)
    assert all(other[1] == losses and torch.equal(other[2], weights) for other in results)


class Switch(pl.Callback):
    """Rank 0 switches compression off after the second step, and the last rank on again after the fifth."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(trainer.strategy, CommOptDDPStrategy)
        if (trainer.global_step, trainer.global_rank) == (2, 0):
            trainer.strategy.disable_compression()
        if (trainer.global_step, trainer.global_rank) == (5, trainer.world_size - 1):
            trainer.strategy.enable_compression()


@compressing
def test_all_ranks_switch_compression_in_the_same_step(workers: Workers, strategy: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy, count=8, callbacks=[Switch()])
    assert_ranks_equal(fits)
    totals = [0.0] + [stats.bytes_sent for stats in fits[0].stats]
    sent = [after - before for before, after in pairwise(totals)]
    whole = fits[0].stats[-1].bytes_uncompressed / 8
    assert [count < 0.8 * whole for count in sent] == [True] * 3 + [False] * 3 + [True] * 2
    assert sent[4] == pytest.approx(whole, rel=0.01)


def fit_switched(rank: int, world: int) -> list[float]:
    """The compression ratios of three fits: rank 0 switches off before the first one and on before the last one."""
    with rank_of_the_group(rank):
        strategy, ratios = CommOptDDPStrategy(**TOPK), []
        trainer = make_trainer(world, strategy, max_epochs=0)
        for switch in (strategy.disable_compression, None, strategy.enable_compression):
            if switch is not None and rank == 0:
                switch()
            trainer.fit_loop.max_epochs += 1
            trainer.fit(Regression(), Batches(rank, 6))
            ratios.append(handle_of(trainer).stats().compression_ratio)
        return ratios


def test_the_switch_stays_as_it_is_from_fit_to_fit(workers: Workers) -> None:
    (off, still_off, on), same = workers.run(fit_switched)
    assert [off, still_off, on] == same
    assert off == still_off < 1.2  # the first step still compressed
    assert on > 4


def group_timeouts(rank: int, world: int) -> list[timedelta]:
    """The timeout of the exchange's own group, where the user gave one and where not."""
    with rank_of_the_group(rank):
        timeouts = []
        given: list[Arguments] = [{"timeout": timedelta(seconds=7), "process_group_backend": "gloo"}, {}]
        for arguments in given:
            trainer = make_trainer(world, CommOptDDPStrategy("int8", **arguments))
            trainer.fit(Regression(), Batches(rank, 1))
            group = handle_of(trainer).engine.wire.group
            assert isinstance(group, dist.ProcessGroup)
            timeouts.append(group._get_backend(torch.device("cpu")).options._timeout)
        return timeouts


def test_the_exchange_waits_as_long_as_lightning_was_told_to(workers: Workers) -> None:
    assert workers.run(group_timeouts) == [[timedelta(seconds=7), timedelta(minutes=30)]] * 2


# -------------------------------------------------------------------------------------------------- the other package


class Line(pytorch_lightning.LightningModule):
    """A model of ``pytorch_lightning``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def fit_in_pytorch_lightning(rank: int, world: int) -> list[tuple[Tensor, commopt.Stats]]:
    results = []
    with rank_of_the_group(rank):
        for strategy in ("commopt_ddp_topk", lightning_commopt.pytorch_lightning.CommOptDDPStrategy("powersgd")):
            model, trainer = Line(), make_trainer(world, strategy, pytorch_lightning)
            trainer.fit(model, Batches(rank, 4))
            results.append((flat(model), trainer.strategy.handle.stats()))
    return results


def test_pytorch_lightning_trains_too(workers: Workers) -> None:
    for (mine, stats), (theirs, _) in zip(*workers.run(fit_in_pytorch_lightning), strict=True):
        assert torch.equal(mine, theirs)
        assert stats.steps == 4
