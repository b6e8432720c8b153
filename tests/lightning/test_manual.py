"""Manual optimization: two optimizers that alternate, and what is forgotten there."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.lightning.fits import Batch, Regression, assert_ranks_equal, assert_same_bits, fit, fit_and_listen, handle_of
from tests.workers import Workers

Arguments = dict[str, Any]
INT8: Arguments = {"compressor": "int8"}
POWERSGD: Arguments = {"compressor": "powersgd", "rank": 2}
TOPK: Arguments = {"compressor": "topk", "density": 0.05}
NONE: Arguments = {"compressor": "none"}
PLAIN: Arguments = {"ddp": True}
UNUSED: Arguments = {"find_unused_parameters": True}

compressing = pytest.mark.parametrize("strategy", [INT8, POWERSGD, TOPK], ids=lambda strategy: strategy["compressor"])


class Manual(Regression):
    """One optimizer, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Accumulating(Manual):
    """Two micro-batches a step, of which the first is not exchanged."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()


class Forgetful(Manual):
    """Calls ``loss.backward()`` where ``manual_backward`` is due."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class GAN(Manual):
    """Generator and discriminator in turn; each is idle in the other's step."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 1))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        generator, discriminator = optimizers
        self.toggle_optimizer(generator)
        score = self.judge(self.net(batch[0]))
        self.step(generator, binary_cross_entropy_with_logits(score, torch.ones_like(score)))
        self.untoggle_optimizer(generator)

        before = self.residuals("net")
        self.toggle_optimizer(discriminator)
        real, fake = self.judge(batch[1]), self.judge(self.net(batch[0]).detach())
        loss = binary_cross_entropy_with_logits(real, torch.ones_like(real))
        self.step(discriminator, loss + binary_cross_entropy_with_logits(fake, torch.zeros_like(fake)))
        self.untoggle_optimizer(discriminator)
        after = self.residuals("net")
        assert all(torch.equal(before[name], after[name]) for name in before), "the idle network's residuals moved"

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def residuals(self, network: str) -> dict[str, Tensor]:
        """The committed residuals of one of the networks, where our strategy keeps any."""
        if getattr(self.trainer.strategy, "handle", None) is None:
            return {}
        engine = handle_of(self.trainer).engine
        engine.settle()
        final = engine.residuals.final()
        return {name: residual.clone() for name, residual in final.items() if name.startswith(network)}

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(network.parameters(), 1e-3) for network in (self.net, self.judge)]


class Untoggled(GAN):
    """The generator's step leaves stale gradients in the discriminator."""

    def toggle_optimizer(self, optimizer: Any) -> None:
        pass

    def untoggle_optimizer(self, optimizer: Any) -> None:
        pass


STATIC = pytest.param(
    {"static_graph": True},
    marks=pytest.mark.skipif(
        "post_backward" not in vars(DDPStrategy),
        reason="this Lightning's DDP does not exchange the first step of a static graph by hand",
    ),
)


@compressing
@pytest.mark.parametrize("ddp", [{}, UNUSED, STATIC], ids=str)
def test_one_optimizer_by_hand(workers: Workers, strategy: Arguments, ddp: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy | ddp, model=Manual)
    assert_ranks_equal(fits)
    assert [stats.steps for stats in fits[0].stats] == [1, 2, 3, 4]


@compressing
def test_toggling_accumulates_without_an_exchange(workers: Workers, strategy: Arguments) -> None:
    fits = workers.run(fit, strategy=strategy, model=Accumulating, count=6)
    assert_ranks_equal(fits)
    assert [stats.steps for stats in fits[0].stats] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("model", [Manual, Accumulating, GAN, Untoggled])
def test_none_is_lightnings_ddp_bit_for_bit(workers: Workers, model: type[Manual]) -> None:
    ours, plain = (workers.run(fit, strategy=how | UNUSED, model=model) for how in (NONE, PLAIN))
    assert_same_bits(ours, plain)


@compressing
@pytest.mark.parametrize("model", [GAN, Untoggled])
def test_a_gan_alternates_and_the_idle_network_keeps_its_residuals(
    workers: Workers, strategy: Arguments, model: type[GAN]
) -> None:
    fits = workers.run(fit, strategy=strategy | UNUSED, model=model)
    assert_ranks_equal(fits)
    assert [stats.steps for stats in fits[0].stats] == [2, 4, 6, 8]


def test_a_backward_that_exchanges_nothing_is_said_once(workers: Workers) -> None:
    (first, warned), (second, _) = workers.run(fit_and_listen, strategy=INT8, model=Forgetful)
    assert first.stats[-1].steps == 0
    assert not torch.equal(first.parameters[-1], second.parameters[-1])
    assert len(warned) == 1
    assert "no gradient was exchanged since its last step, so ranks drift apart" in warned[0]
