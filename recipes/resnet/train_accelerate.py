"""Train the ResNet of `resnet.py` with Accelerate: a plain loop, and one line for compressed gradients.

    torchrun --nproc-per-node 2 -m recipes.resnet.train_accelerate --cpu
    torchrun --nproc-per-node 2 -m recipes.resnet.train_accelerate --cpu --compressor none
    accelerate launch --num_processes 8 -m recipes.resnet.train_accelerate --depth 50 --width 64 --mixed-precision bf16

The same model, images and hyperparameters as `train.py`, with the same result.
"""

import argparse
import csv
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import set_seed  # type: ignore[import-untyped]
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from accelerate_commopt import attach
from commopt.errors import CommOptError
from recipes.gpt.train import warmup_cosine
from recipes.resnet.resnet import ResNet, TrainingBatches, ValidationBatches, load_images
from recipes.resnet.train import add_arguments


def train(args: argparse.Namespace) -> dict[str, float]:
    """On every rank: trains, writes ``metrics.csv``, and returns what its last row holds."""
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        step_scheduler_with_optimizer=False,  # it would take as many steps as there are ranks
    )
    attachment = attach(accelerator, args.compressor or "auto", directory=args.out, **dict(args.option))

    set_seed(args.seed)
    images, held_out = load_images(args.data, args.data_dir, args.image_size)
    classes = int(images.labels.max()) + 1
    rank, world = accelerator.process_index, accelerator.num_processes
    training = TrainingBatches(images, args.batch_size, args.steps, args.seed, rank, world)  # sharded by themselves
    validation = ValidationBatches(held_out, 4 * args.batch_size, rank, world)

    model: nn.Module = ResNet(args.depth, classes, images.pixels.shape[1], args.width)
    if accelerator.device.type == "cuda":  # torch has it for CUDA only
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, args.warmup, args.steps))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accuracy = MulticlassAccuracy(classes, average="micro").to(accelerator.device)  # sums over ranks

    @torch.no_grad()
    def validate() -> float:
        model.eval()
        accuracy.reset()
        for index in range(len(validation)):
            inputs, labels = (part.to(accelerator.device) for part in validation[index])
            accuracy.update(model(inputs), labels)
        model.train()
        return float(accuracy.compute())

    rows: list[dict[str, float]] = []
    seconds = 0.0
    for step in range(args.steps):
        began = time.perf_counter()
        inputs, labels = (part.to(accelerator.device) for part in training[step])
        loss = F.cross_entropy(model(inputs), labels, label_smoothing=args.label_smoothing)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - began
        if (step + 1) % args.val_every == 0 or step + 1 == args.steps:
            stats = attachment.stats()
            row = {"step": step, "seconds": seconds, "sent_mb": stats.bytes_sent / 1e6}
            row |= {"uncompressed_mb": stats.bytes_uncompressed / 1e6, "train_loss": loss.item()}
            rows.append(row | {"val_accuracy": validate()})
            if accelerator.is_main_process:
                print("  ".join(f"{name} {value:.5g}" for name, value in rows[-1].items()))
    explained = attachment.explain()
    accelerator.end_training()

    if accelerator.is_main_process:
        print(explained)
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[-1])
            writer.writeheader()
            writer.writerows(rows)
    return rows[-1]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.resnet.train_accelerate",
        description="Train a ResNet on real images with Accelerate.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    parser.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    args = parser.parse_args(arguments)
    if args.option and not args.compressor:
        parser.error("--option goes with --compressor")
    return args


def main() -> None:
    try:
        train(parse_args())
    except CommOptError as error:
        sys.exit(f"resnet: {error}")


if __name__ == "__main__":
    main()
