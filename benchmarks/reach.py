"""Time until a training with compressed gradients reaches the validation loss of an uncompressed one after 300 steps.

    python -m benchmarks.reach --json docs/figures/reach.json

Two processes train each variant over loopback from the same weights on the same batches, with a constant learning
rate, until the loss of the whole validation text is that of plain DDP after ``--steps``. How many steps that takes does
not depend on the link; how long a step takes is read from the results of ``benchmarks.steptime`` in ``--figures``,
with ``--resume`` anew.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import results
from benchmarks.parity import LR_WARM_UP, RANKS, REFERENCE, evaluate
from benchmarks.variants import TIMEOUT, Variant
from commopt.lab import on_each_rank
from commopt.plan import Plan
from commopt.policy.choice import describe
from recipes.gpt.train import GPT, SIZES, batches, load_text, next_token_loss

DEFAULT = (
    *("torch:fp16", "torch:powersgd", "int8", "int4", "int3", "int2", "onebit"),
    *("powersgd:rank=4", "powersgd:rank=1", "topk:density=0.01"),
)


def train(
    variant: Variant, args: argparse.Namespace, text: tuple[Tensor, Tensor], target: float, advance: Callable[[], None]
) -> list[tuple[int, float]]:
    """Steps and validation losses, every ``--every`` steps and until ``target`` is reached; from two thirds of
    ``--steps`` on, which spares evaluations that cannot reach it."""
    config = SIZES[args.model]
    torch.manual_seed(args.seed)
    model = GPT(config)
    wrapped = variant.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / LR_WARM_UP, 1.0))
    stream = batches(text[0], config.block_size, args.batch_size, args.seed, dist.get_rank())
    seen: list[tuple[int, float]] = []
    for step in range(1, args.most * args.steps + 1):
        inputs, targets = next(stream)
        next_token_loss(wrapped.ddp(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        advance()
        if step % args.every == 0 and 3 * step >= 2 * args.steps:
            seen.append((step, evaluate(model, text[1], config.block_size)))
            if seen[-1][1] <= target or (variant.spec == REFERENCE and step >= args.steps):
                break
    if wrapped.handle:
        wrapped.handle.close()
    return seen


def reached(seen: Sequence[tuple[int, float]], target: float) -> float | None:
    """Steps until ``target``, on a line between two evaluations; None where it was not reached."""
    before: tuple[int, float] | None = None
    for step, loss in seen:
        if loss <= target:
            if before is None or before[1] == loss:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """On every rank: adds to ``result`` a run of each variant that it lacks, plain DDP first."""
    text, done = load_text(), {run["variant"] for run in result["runs"]}
    with results.progress(quiet=dist.get_rank() != 0) as watch:
        for variant in [variant for variant in args.variants if variant.spec not in done]:
            task = watch.add_task(variant.spec, total=args.most * args.steps)
            target = result["runs"][0]["seen"][-1][1] if result["runs"] else 0.0
            seen = train(variant, args, text, target, partial(watch.advance, task))
            target = target or seen[-1][1]
            result["runs"].append({"variant": variant.spec, "seen": seen, "steps": reached(seen, target)})
            if args.json and dist.get_rank() == 0:
                results.write(args.json, result)


def step_times(folder: Path) -> dict[str, dict[str, float]]:
    """Milliseconds a step by link and variant; what ``auto`` chose stands as ``auto -> choice``."""
    times: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("policy-*.json")):
        found = json.loads(path.read_text())
        if found["conditions"]["hosts"] != RANKS:
            continue
        link = times.setdefault(found["conditions"]["rate"], {})
        for entry in found["variants"]:
            name = entry["variant"] + (f" -> {entry['chosen']}" if entry.get("chosen") else "")
            link[name] = entry["step_ms"]["median"]
    return times


HEADERS = ("link", "variant", "steps", "ms a step", "seconds", "over the fastest")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`: what ``auto`` chose takes the steps of that compressor."""
    steps = {_described(run["variant"]): run["steps"] for run in result["runs"]}
    table: list[tuple[str, ...]] = []
    for link, times in result["step_ms"].items():
        seconds = {}
        for name, ms in times.items():
            needed = steps.get(_described(name.split(" -> ")[-1]))
            if needed is not None:
                seconds[name] = needed, ms, needed * ms / 1000
        least = min(total for *_, total in seconds.values())
        for name, (needed, ms, total) in sorted(seconds.items(), key=lambda item: item[1][-1]):
            table.append((link, name, f"{needed:.0f}", f"{ms:.0f}", f"{total:.0f}", f"{total / least:.2f}"))
    return table


def _described(spec: str) -> str:
    """One name for a compressor, whether it was asked for or chosen; casts and no compression take DDP's steps."""
    if spec in ("none", "bf16", "fp16", "torch:bf16"):
        return REFERENCE
    if spec.startswith(("torch:", "auto")) or "(" in spec or spec in (REFERENCE, "nocomm"):
        return spec
    config = Variant.parse(spec).config
    assert config is not None
    return describe(Plan(Plan.from_config(config).compressor, False))


def setup(args: argparse.Namespace) -> dict[str, Any]:
    """What the steps depend on."""
    config = SIZES[args.model]
    return {
        "ranks": RANKS,
        "model": args.model,
        "batch": f"{args.batch_size} x {config.block_size} tokens a rank",
        "optimizer": f"AdamW, {args.lr:g} after {LR_WARM_UP} steps and then constant, gradients clipped to 1",
        "target": f"plain DDP after {args.steps} steps; at most {args.most} times as many",
        "evaluated": f"every {args.every} steps",
        "seed": args.seed,
    }


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reach",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = [Variant.parse(spec) for spec in DEFAULT]
    parser.add_argument("--variants", type=Variant.parse, nargs="+", default=default, help="beside plain DDP")
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=300, help="of plain DDP, whose loss is the target")
    parser.add_argument("--most", type=int, default=2, help="times as many, after which a variant has failed")
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations")
    parser.add_argument("--batch-size", type=int, default=5, help="windows of text a rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="with results of steptime")
    parser.add_argument("--json", type=Path, help="where to write the result, after each training")
    parser.add_argument("--resume", action="store_true", help="keep the trainings that --json holds already")
    args = parser.parse_args(arguments)
    args.variants = [Variant.parse(REFERENCE), *(v for v in args.variants if v.spec != REFERENCE)]
    return args


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        return on_each_rank("benchmarks.reach", RANKS)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    result = {
        "command": results.command("benchmarks.reach"),
        "conditions": {**results.conditions(), **setup(args)},
        "runs": json.loads(args.json.read_text())["runs"] if args.resume else [],
        "step_ms": step_times(args.figures),
    }
    measure(args, result)
    if dist.get_rank() == 0:
        results.publish("", HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
