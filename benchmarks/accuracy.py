"""Validation accuracy of a ResNet on real images, with the default of commopt against the same training uncompressed.

    python -m benchmarks.accuracy --json docs/figures/accuracy.json
    python -m benchmarks.accuracy --rate 100mbit --width 16 --steps 600 --seeds 0 1 2

For each seed, every variant starts from the same weights and sees the same images on the same rank; the accuracy is
that of all images held out. Reported is its difference to ``none`` in percentage points, paired by seed, with its 95 %
confidence interval, and the traffic that was saved, the steps in which ``auto`` tries things included. Two hosts of a
lab train, since over a fast network ``auto`` rightly compresses nothing.

The last variant is the negative control: a benchmark that lets it pass measures nothing.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy

from benchmarks import results
from benchmarks.parity import T_QUANTILES, confidence_interval
from benchmarks.steptime import interface, sent_by_kernel
from benchmarks.variants import TIMEOUT, Variant
from commopt.errors import CommOptError
from commopt.lab import on_each_host, open_lab
from lightning_commopt import CommOptDDPStrategy
from recipes.gpt.train import warmup_cosine
from recipes.resnet.resnet import BLOCKS, DATA, Images, ResNet, TrainingBatches, ValidationBatches, load_images

HOSTS = 2
REFERENCE = "none"
DEFAULT = "auto"
CONTROL = "topk:density=0.001,error_feedback=false"
POINTS = 0.5  # of accuracy that the default may lose
SAVED = 0.7  # of the traffic that it must save, at least

LABEL_SMOOTHING = 0.1
LR_WARM_UP = 20
EVALUATION_BATCH = 125


def train(
    variant: Variant, seed: int, args: argparse.Namespace, data: tuple[Images, Images], advance: Callable[[], None]
) -> dict[str, Any]:
    """On every rank: one training; what it reached, and what this rank sent for it."""
    images, held_out = data
    rank, world, classes = dist.get_rank(), dist.get_world_size(), int(images.labels.max()) + 1
    torch.manual_seed(seed)
    model = ResNet(args.depth, classes, images.pixels.shape[1], args.width)
    dist.barrier()
    began, sent_before = time.perf_counter(), sent_by_kernel()
    wrapped = variant.wrap(model, CommOptDDPStrategy.bucket_cap_mb)
    assert wrapped.handle is not None
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, LR_WARM_UP, args.steps))
    for batch, labels in _each(TrainingBatches(images, args.batch_size, args.steps, seed, rank, world)):
        loss = F.cross_entropy(wrapped.ddp(batch), labels, label_smoothing=LABEL_SMOOTHING)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        advance()
    dist.barrier()
    seconds, sent = time.perf_counter() - began, sent_by_kernel() - sent_before

    accuracy = MulticlassAccuracy(classes, average="micro")  # sums over ranks
    model.eval()
    with torch.no_grad():
        for batch, labels in _each(ValidationBatches(held_out, EVALUATION_BATCH, rank, world)):
            accuracy.update(wrapped.ddp(batch), labels)
    stats, explained = wrapped.handle.stats(), wrapped.handle.explain()
    wrapped.handle.close()
    return {
        "variant": variant.spec,
        "seed": seed,
        "accuracy": float(accuracy.compute()),
        "train_loss": loss.item(),
        "counted_bytes": stats.bytes_sent,
        "uncompressed_bytes": stats.bytes_uncompressed,
        "kernel_bytes": sent if interface() != "lo" else None,
        "ms_per_step": 1000 * seconds / args.steps,
        "explained": explained,
    }


def _each(batches: TrainingBatches | ValidationBatches) -> Any:
    return (batches[index] for index in range(len(batches)))


def measure(args: argparse.Namespace, data: tuple[Images, Images], result: dict[str, Any]) -> None:
    """On every rank: a run a variant and seed, and after each the file is up to date."""
    todo = [(variant, seed) for seed in args.seeds for variant in args.variants]
    with results.progress(quiet=dist.get_rank() != 0) as watch:
        task = watch.add_task("", total=len(todo) * args.steps)
        for variant, seed in todo:
            watch.update(task, description=f"seed {seed}, {variant.spec}")
            result["runs"].append(train(variant, seed, args, data, partial(watch.advance, task)))
            if args.json and dist.get_rank() == 0:
                results.write(args.json, result)


def differences(result: dict[str, Any], variant: str) -> list[float]:
    """Of the accuracy to that of `REFERENCE` in percentage points, one for each seed that both have finished."""
    found = {(run["variant"], run["seed"]): run["accuracy"] for run in result["runs"]}
    seeds = sorted(seed for name, seed in found if name == variant and (REFERENCE, seed) in found)
    return [100 * (found[variant, seed] - found[REFERENCE, seed]) for seed in seeds]


def verdict(variant: str, mean: float, saved: float) -> str:
    """What the limits say of a mean difference in points and of the share of the traffic that was saved."""
    if variant == CONTROL:
        return "fails, as it must" if mean < -POINTS else "PASSES, but must fail"
    if mean < -POINTS:
        return "FAIL"
    return "FAIL: too much traffic" if variant == DEFAULT and saved < SAVED else "pass"


HEADERS = (
    *("variant", "accuracy", "mean", "difference", "95 % interval", "MB counted", "MB kernel", "saved", "verdict"),
    "ms a step",
)


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`. A megabyte is 10^6 bytes, sent by one rank in one training."""
    table: list[tuple[str, ...]] = []
    for variant in dict.fromkeys(run["variant"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["variant"] == variant]
        accuracies = [100 * run["accuracy"] for run in runs]
        counted = statistics.fmean(run["counted_bytes"] for run in runs)
        saved = 1 - counted / statistics.fmean(run["uncompressed_bytes"] for run in runs)
        judged, found = ("", "", ""), differences(result, variant)
        if variant != REFERENCE and len(found) >= 2:
            mean, (low, high) = statistics.fmean(found), confidence_interval(found)
            judged = (f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}", verdict(variant, mean, saved))
        kernel = [run["kernel_bytes"] for run in runs]
        table.append(
            (
                variant,
                ", ".join(f"{accuracy:.1f}" for accuracy in accuracies),
                f"{statistics.fmean(accuracies):.2f} %",
                *judged[:2],
                f"{counted / 1e6:.1f}",
                "" if None in kernel else f"{statistics.fmean(kernel) / 1e6:.1f}",
                f"{100 * saved:.1f} %",
                judged[2],
                f"{statistics.median(run['ms_per_step'] for run in runs):.0f}",
            )
        )
    return table


def setup(args: argparse.Namespace, data: tuple[Images, Images]) -> dict[str, Any]:
    """What an accuracy depends on."""
    images, held_out = data
    model = ResNet(args.depth, int(images.labels.max()) + 1, images.pixels.shape[1], args.width)
    return {
        "rate": args.rate,
        "hosts": HOSTS,
        "model": f"ResNet-{args.depth}, width {args.width}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": f"{args.data}, {len(images.labels)} images",
        "validation": f"{len(held_out.labels)} images",
        "batch": f"{args.batch_size} images a rank",
        "steps": args.steps,
        "optimizer": f"SGD, {args.lr:g} after {LR_WARM_UP} steps, cosine to a tenth, Nesterov momentum 0.9",
    }


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = [Variant.parse(spec) for spec in (DEFAULT, CONTROL)]
    parser.add_argument("--variants", type=Variant.parse, nargs="+", default=default, help="beside none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="up to 10")
    parser.add_argument("--rate", default="25mbit", help="of each host's link, as tc writes it; none; or loopback")
    parser.add_argument("--depth", type=int, choices=BLOCKS, default=18)
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage")
    parser.add_argument("--data", choices=DATA, default="mnist")
    parser.add_argument("--data-dir", type=Path, help="of cifar10 or imagefolder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate")
    parser.add_argument("--json", type=Path, help="where to write the result, after each training")
    args = parser.parse_args(arguments)
    if any(variant.config is None for variant in args.variants):
        parser.error("only variants of commopt count their bytes")
    if len(args.seeds) > len(T_QUANTILES) + 1:
        parser.error(f"at most {len(T_QUANTILES) + 1} seeds")
    args.variants = [Variant.parse(REFERENCE), *(v for v in args.variants if v.spec != REFERENCE)]
    return args


def main() -> int:
    args = parse_args()
    try:
        if "RANK" not in os.environ:
            return on_each_host("benchmarks.accuracy", open_lab(HOSTS, args.rate))
        data = load_images(args.data, args.data_dir)
    except CommOptError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    dist.init_process_group("gloo", timeout=TIMEOUT)
    conditions = {**results.conditions(), **setup(args, data)}
    result = {"command": results.command("benchmarks.accuracy"), "conditions": conditions, "runs": []}
    measure(args, data, result)
    if dist.get_rank() == 0:
        results.publish(f"{HOSTS} hosts, {args.rate}", HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
