"""The same model, data and seed through every front door: the same losses, and the same counted bytes."""

import tempfile
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from accelerate_commopt import attach
from tests.accelerate.training import (
    SIZE,
    Regression,
    Samples,
    accelerator_of,
    closing,
    flat,
    loader_of,
    ranks_of_the_group,
    sgd,
    train,
    trainer_of,
)
from tests.workers import Workers

STEPS = 6
COMPRESSOR = "int8"


class Run(NamedTuple):
    """What one rank tells."""

    losses: list[float]
    parameters: torch.Tensor
    bytes_sent: float
    bytes_uncompressed: float


def run_of(model: Regression, handle: commopt.Handle) -> Run:
    stats = handle.stats()
    return Run(model.losses, flat(model), stats.bytes_sent, stats.bytes_uncompressed)


def bare_torch(rank: int, world: int) -> Run:
    model, samples = Regression(), Samples(STEPS * world * SIZE)
    ddp, optimizer = DDP(model, bucket_cap_mb=3), sgd(model)
    handle = commopt.attach(ddp, COMPRESSOR)
    supervisor = commopt.Supervisor(handle, {}, guard=None)  # adapters make one, whose few bytes count, too
    for step in range(STEPS):
        part = slice((step * world + rank) * SIZE, (step * world + rank + 1) * SIZE)
        ddp(samples.x[part], samples.y[part])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    run = run_of(model, handle)
    supervisor.close()
    handle.close()
    return run


def accelerate(rank: int, world: int) -> Run:
    with accelerator_of(rank, world) as accelerator:
        attachment = attach(accelerator, COMPRESSOR, guard=None)
        model = Regression()
        train(accelerator, *accelerator.prepare(model, sgd(model), loader_of(STEPS, world)))
        return run_of(model, attachment.handle)


def hugging_face(rank: int, world: int) -> Run:
    with ranks_of_the_group(rank, world), tempfile.TemporaryDirectory() as folder:
        model = Regression()
        trainer = trainer_of(model, folder, STEPS, world)
        with closing(attach(trainer, COMPRESSOR, guard=None)) as attachment:
            trainer.train()
            return run_of(model, attachment.handle)


def lightning(rank: int, world: int) -> Run:
    import lightning.pytorch as pl

    from lightning_commopt import CommOptDDPStrategy, DivergenceGuard
    from tests.lightning.fits import handle_of, make_trainer, rank_of_the_group

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module, samples = Module(), Samples(STEPS * world * SIZE)
    mine = [index for index in range(len(samples)) if index // SIZE % world == rank]
    data = torch.utils.data.DataLoader(torch.utils.data.Subset(samples, mine), batch_size=SIZE)
    with rank_of_the_group(rank):
        strategy = CommOptDDPStrategy(COMPRESSOR)
        options = {"callbacks": [DivergenceGuard(enabled=False)], "use_distributed_sampler": False}
        trainer = make_trainer(world, strategy, **options)
        trainer.fit(module, data)
    return run_of(module.model, handle_of(trainer))


@pytest.mark.parametrize("door", [accelerate, hugging_face, lightning])
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_every_front_door_does_the_same(workers: Workers, door: Callable[[int, int], Run]) -> None:
    for bare, through in zip(workers.run(bare_torch), workers.run(door), strict=True):
        assert through.losses == bare.losses
        assert torch.equal(through.parameters, bare.parameters)
        assert (through.bytes_sent, through.bytes_uncompressed) == (bare.bytes_sent, bare.bytes_uncompressed)
        assert through.bytes_sent < 0.5 * through.bytes_uncompressed
        assert len(through.losses) == STEPS


def test_adapters_choose_the_same_buckets() -> None:
    from accelerate_commopt import CommOptPlugin
    from lightning_commopt import CommOptDDPStrategy

    assert CommOptPlugin().to_kwargs() == {"bucket_cap_mb": CommOptDDPStrategy.bucket_cap_mb}
