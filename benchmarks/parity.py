"""Final validation loss after training with compressed gradients, against the same training without compression.

    python -m benchmarks.parity --json parity.json
    python -m benchmarks.parity --variants int8 powersgd:rank=4 --seeds 0 1 2 --steps 300 --warmup-steps 30

For each seed, every variant starts from the same weights and sees the same batches on the same rank; the loss is that
of the whole validation text. Reported is the relative difference to plain DDP, paired by seed, with its 95 % confidence
interval. Two processes that stay alive do all trainings over loopback, one after the other.

``topk:density=0.01,error_feedback=false`` is the negative control: a benchmark that lets it pass measures nothing.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import results
from benchmarks.variants import TIMEOUT, Variant
from commopt.lab import on_each_rank
from recipes.gpt.train import GPT, SIZES, batches, load_text, next_token_loss, warmup_cosine, windows

RANKS = 2
REFERENCE = "ddp"
CONTROL = "topk:density=0.01,error_feedback=false"
DEFAULT = [
    *("none", "fp16", "bf16", "fp8", "int8", "int4", "onebit", "powersgd:rank=4"),
    *("topk:density=0.01", "threshold:density=0.01", "randomk:density=0.01", CONTROL),
]
LIMITS = {"none": 0.0, "fp16": 0.002, "bf16": 0.002, "fp8": 0.002, "int8": 0.002}  # of the relative difference
LIMIT = 0.005  # of what is not named above

LR_WARM_UP = 20
EVALUATION_BATCH = 64

# 97.5 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of 2 to 10 independent normal values."""
    assert 2 <= len(values) <= len(T_QUANTILES) + 1, len(values)
    half = T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def train(
    variant: Variant, seed: int, args: argparse.Namespace, tokens: Tensor, advance: Callable[[], None]
) -> nn.Module:
    """The model after its training, the same on all ranks."""
    config = SIZES[args.model]
    torch.manual_seed(seed)
    model = GPT(config)
    wrapped = variant.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, LR_WARM_UP, args.steps))
    stream = batches(tokens, config.block_size, args.batch_size, seed, dist.get_rank())
    if wrapped.handle and args.warmup_steps:
        wrapped.handle.disable()
    for step in range(args.steps):
        if wrapped.handle and step == args.warmup_steps > 0:
            wrapped.handle.enable()
        inputs, targets = next(stream)
        next_token_loss(wrapped.ddp(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        advance()
    if wrapped.handle:
        wrapped.handle.close()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, block_size: int) -> float:
    """Mean loss in nats a token over all windows of the text; ranks share the work."""
    inputs, targets = (part[dist.get_rank() :: dist.get_world_size()] for part in windows(tokens, block_size))
    total = torch.zeros(2, dtype=torch.float64)
    for x, y in zip(inputs.split(EVALUATION_BATCH), targets.split(EVALUATION_BATCH), strict=True):
        total += torch.tensor([next_token_loss(model(x), y).item() * y.numel(), y.numel()], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """On every rank: adds to ``result`` the runs that it lacks, and keeps the file up to date."""
    train_tokens, validation = load_text()
    done = {(run["variant"], run["seed"]) for run in result["runs"]}
    todo = [(v, seed) for seed in args.seeds for v in args.variants if (v.spec, seed) not in done]
    with results.progress(quiet=dist.get_rank() != 0) as watch:
        task = watch.add_task("", total=len(todo) * args.steps)
        for variant, seed in todo:
            watch.update(task, description=f"seed {seed}, {variant.spec}")
            start = time.perf_counter()
            model = train(variant, seed, args, train_tokens, partial(watch.advance, task))
            seconds = time.perf_counter() - start
            loss = evaluate(model, validation, SIZES[args.model].block_size)
            result["runs"].append(
                {"variant": variant.spec, "seed": seed, "val_loss": loss, "ms_per_step": 1000 * seconds / args.steps}
            )
            if args.json and dist.get_rank() == 0:
                results.write(args.json, result)


def setup(args: argparse.Namespace) -> dict[str, Any]:
    """What a loss depends on."""
    config = SIZES[args.model]
    return {
        "ranks": RANKS,
        "model": args.model,
        "parameters": sum(parameter.numel() for parameter in GPT(config).parameters()),
        "batch": f"{args.batch_size} x {config.block_size} tokens a rank",
        "steps": args.steps,
        "uncompressed steps after the first": args.warmup_steps,
        "optimizer": f"AdamW, {args.lr:g} after {LR_WARM_UP} steps, cosine to a tenth, gradients clipped to 1",
        "validation": f"{len(load_text()[1])} bytes, all of the held-out text",
    }


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """A result without runs, or with those that the file holds already."""
    conditions = {**results.conditions(), **setup(args)}
    runs: list[dict[str, Any]] = []
    if args.resume and args.json.exists():
        found = json.loads(args.json.read_text())
        if other := [name for name in setup(args) if found["conditions"].get(name) != conditions[name]]:
            raise SystemExit(f"parity: {args.json} was made with other {', '.join(other)}; leave out --resume")
        runs = found["runs"]
    return {"command": results.command("benchmarks.parity"), "conditions": conditions, "runs": runs}


def differences(result: dict[str, Any], variant: str) -> list[float]:
    """Relative differences of the validation loss to plain DDP, one for each seed that both have finished."""
    losses = {(run["variant"], run["seed"]): run["val_loss"] for run in result["runs"]}
    seeds = sorted(seed for name, seed in losses if name == variant and (REFERENCE, seed) in losses)
    return [losses[variant, seed] / losses[REFERENCE, seed] - 1 for seed in seeds]


def verdict(variant: str, mean: float, upper: float) -> str:
    """What the limits say of a mean difference and the upper end of its interval."""
    limit = LIMITS.get(variant, LIMIT)
    if variant == CONTROL:
        return "fails, as it must" if mean > limit else "PASSES, but must fail"
    if mean > limit:
        return "FAIL"
    return "pass" if upper <= limit else "pass; the interval ends above the limit"


HEADERS = ("variant", "seeds", "validation loss", "difference", "95 % interval", "limit", "verdict", "ms a step")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`."""
    table: list[tuple[str, ...]] = []
    for variant in dict.fromkeys(run["variant"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["variant"] == variant]
        loss = f"{statistics.fmean(run['val_loss'] for run in runs):.4f}"
        speed = f"{statistics.median(run['ms_per_step'] for run in runs):.0f}"
        found = differences(result, variant)
        if variant == REFERENCE or len(found) < 2:
            table.append((variant, str(len(runs)), loss, "", "", "", "", speed))
            continue
        mean, (low, high) = statistics.fmean(found), confidence_interval(found)
        judged = (f"{100 * LIMITS.get(variant, LIMIT):.1f} %", verdict(variant, mean, high))
        interval = f"{100 * low:+.2f} to {100 * high:+.2f} %"
        table.append((variant, str(len(found)), loss, f"{100 * mean:+.2f} %", interval, *judged, speed))
    return table


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = [Variant.parse(spec) for spec in DEFAULT]
    parser.add_argument("--variants", type=Variant.parse, nargs="+", default=default, help="beside plain DDP")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="up to 10")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of text a rank")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--warmup-steps", type=int, default=0, help="uncompressed steps after the first one")
    parser.add_argument("--json", type=Path, help="where to write the result, after each training")
    parser.add_argument("--resume", action="store_true", help="keep the trainings that --json holds already")
    args = parser.parse_args(arguments)
    if any(variant.spec == "nocomm" for variant in args.variants):
        parser.error("nocomm does not train one model")
    if len(args.seeds) > len(T_QUANTILES) + 1:
        parser.error(f"at most {len(T_QUANTILES) + 1} seeds")
    if args.resume and not args.json:
        parser.error("--resume needs --json")
    args.variants = [Variant.parse(REFERENCE), *(v for v in args.variants if v.spec != REFERENCE)]
    return args


def main() -> int:
    args = parse_args()
    result = begin(args)
    if "RANK" not in os.environ:
        return on_each_rank("benchmarks.parity", RANKS)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    measure(args, result)
    if dist.get_rank() == 0:
        results.show("", HEADERS, rows(result))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
