"""What of the true mean gradient arrives, for each compressor: what the guard judges by.

    python -m benchmarks.fidelity --json fidelity.json

Every variant trains the same model from the same weights on the same batches with AdamW. At the end of each window of
50 steps the sums of delivered and of true mean gradients are compared on a few thousand coordinates.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks import results
from benchmarks.parity import CONTROL, LR_WARM_UP
from benchmarks.variants import TIMEOUT, Variant
from commopt import GuardConfig
from commopt.engine.fidelity import WINDOW
from commopt.lab import on_each_rank
from recipes.gpt.train import GPT, SIZES, Batches, load_text, next_token_loss, warmup_cosine

RANKS = 2
LR = 1e-3
DEFAULT = [
    *("fp16", "int8", "fp8", "int4", "onebit", "powersgd:rank=4", "topk:density=0.01", "threshold:density=0.01"),
    *("randomk:density=0.01", CONTROL),
]


def windows(variant: Variant, args: argparse.Namespace) -> list[dict[str, float | None]]:
    """On every rank: what was measured at the end of each window."""
    config = SIZES[args.model]
    torch.manual_seed(args.seed)
    model = GPT(config)
    wrapped = variant.wrap(model)
    assert wrapped.handle is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, LR_WARM_UP, 2 * args.steps)
    )
    data = Batches(load_text()[0], config.block_size, args.batch_size, args.steps, args.seed, dist.get_rank())
    measured = []
    for step in range(args.steps):
        inputs, targets = data[step]
        next_token_loss(wrapped.ddp(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        record = wrapped.handle.engine.record
        assert record is not None
        if record.cosine is not None:
            ratio = record.residual_ratio
            measured.append({"cosine": record.cosine, "agreement": record.sign_agreement, "residual": ratio})
    wrapped.handle.close()
    return measured


HEADERS = ("compressor", "sign agreement", "cosine", "residual over gradient", "the guard")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`: one figure a window."""
    limit = GuardConfig().min_agreement

    def each(run: dict[str, Any], name: str) -> str:
        return ", ".join("-" if window[name] is None else f"{window[name]:.2f}" for window in run["windows"])

    return [
        (
            run["variant"],
            *(each(run, name) for name in ("agreement", "cosine", "residual")),
            "rolls back" if any(low(run, limit, at) for at in range(1, len(run["windows"]))) else "",
        )
        for run in result["runs"]
    ]


def low(run: dict[str, Any], limit: float, at: int) -> bool:
    """Whether a window and the one before it are below what the guard allows."""
    return all(run["windows"][index]["agreement"] < limit for index in (at - 1, at))


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = [Variant.parse(spec) for spec in DEFAULT]
    parser.add_argument("--variants", type=Variant.parse, nargs="+", default=default, help="compressors")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=3 * WINDOW)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of text a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        return on_each_rank("benchmarks.fidelity", RANKS)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    quiet = dist.get_rank() != 0
    watched = track(args.variants, "compressors", console=Console(stderr=True), disable=quiet)
    runs = [{"variant": variant.spec, "windows": windows(variant, args)} for variant in watched]
    if not quiet:
        batch = f"{args.batch_size} x {SIZES[args.model].block_size} tokens a rank"
        optimizer = f"AdamW, {LR:g} after {LR_WARM_UP} steps, the first half of a cosine; gradients clipped to 1"
        setup = {"ranks": RANKS, "model": args.model, "batch": batch, "steps": args.steps, "optimizer": optimizer}
        command = results.command("benchmarks.fidelity")
        result = {"command": command, "conditions": {**results.conditions(), **setup}, "runs": runs}
        results.publish("", HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
