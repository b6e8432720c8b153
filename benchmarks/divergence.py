"""Runs that a compressor spoils, with and without the guard, against the same training without compression.

    python -m benchmarks.divergence --json divergence.json

Each case trains three times from the same weights on the same batches: uncompressed, compressed and left alone, and
compressed under a `commopt.Supervisor`, which is to notice, roll back by itself, and end where uncompressed training
ends. The cases named ``clean`` are ordinary compressed runs, once and longer, in which the guard is to keep still.
Two processes that stay alive do all trainings over loopback, one after the other.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commopt
from benchmarks import results
from benchmarks.parity import LIMIT, LR_WARM_UP, evaluate
from benchmarks.variants import TIMEOUT, Variant
from commopt.lab import on_each_rank
from recipes.gpt.train import GPT, SIZES, Batches, load_text, next_token_loss, warmup_cosine

RANKS = 2
MODES = ("uncompressed", "unguarded", "guarded")


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        spec: what compresses, as in `benchmarks.variants`.
        lr: peak learning rate.
        momentum: of SGD; None is AdamW.
        steps: optimizer steps.
        spoiled_from: from this step on, rank 1 compresses ``SPOILED`` times its contribution.
    """

    name: str
    spec: str
    lr: float = 1e-3
    momentum: float | None = None
    steps: int = 300
    spoiled_from: int | None = None

    @property
    def clean(self) -> bool:
        """Whether the guard has no reason to act."""
        return self.name.startswith("clean")


SPOILED = 100.0
CASES = (
    Case("no error feedback", "topk:density=0.01,error_feedback=false"),
    Case("learning rate too high for it", "onebit", lr=0.3, momentum=0.9),
    Case("payload x100 on one rank", "int8", spoiled_from=200),
    Case("clean int8", "int8", steps=2000),
    Case("clean int4", "int4", steps=2000),
    Case("clean fp16", "fp16", steps=2000),
)


def train(
    case: Case, mode: str, args: argparse.Namespace, tokens: Tensor, advance: Callable[[], None]
) -> tuple[nn.Module, list[str], int]:
    """The model after its training, what the guard did, and how many steps that took."""
    config = SIZES[args.model]
    torch.manual_seed(args.seed)
    model = GPT(config)
    wrapped = Variant.parse("none" if mode == "uncompressed" else case.spec).wrap(model)
    handle = wrapped.handle
    assert handle is not None
    if case.spoiled_from is not None and dist.get_rank() == 1:
        _spoil(handle, case.spoiled_from)
    optimizer: torch.optim.Optimizer
    if case.momentum is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=case.momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, LR_WARM_UP, case.steps))
    supervisor = None
    if mode == "guarded":
        supervisor = commopt.Supervisor(handle, {"model": model, "optimizer": optimizer, "schedule": schedule})
    data = Batches(tokens, config.block_size, args.batch_size, case.steps, args.seed, dist.get_rank())
    step, taken = 0, 0
    while step < case.steps:
        inputs, targets = data[step]
        loss = next_token_loss(wrapped.ddp(inputs), targets)
        if supervisor:
            supervisor.observe(loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step, taken = supervisor.end_step(step) if supervisor else step + 1, taken + 1
        advance()
    did = []
    if supervisor:
        for event in supervisor.monitor.summary().events:
            back = f" to step {event.restored_step}" if event.restored_step is not None else ""
            did.append(f"step {event.step}: {event.action}{back}: {event.reason}")
        supervisor.close()
    handle.close()
    return model, did, taken


def _spoil(handle: commopt.Handle, start: int) -> None:
    """A codec that is out of order: it compresses too large a contribution. Without compression nothing is wrong."""
    engine = handle.engine
    exchange = engine._path.exchange

    def spoiled(message: Any, plan: Any, *arguments: Any) -> None:
        if engine.step >= start and not plan.lossless:
            torch._foreach_mul_(message.gradients, SPOILED)
        exchange(message, plan, *arguments)

    engine._path.exchange = spoiled  # type: ignore[method-assign, assignment]


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """On every rank: adds the runs to ``result``, and keeps the file up to date."""
    tokens, validation = load_text()
    todo = [(case, mode) for case in args.cases for mode in (("guarded",) if case.clean else MODES)]
    with results.progress(quiet=dist.get_rank() != 0) as watch:
        task = watch.add_task("", total=sum(case.steps for case, _ in todo))
        for case, mode in todo:
            watch.update(task, description=f"{case.name}, {mode}")
            start = time.perf_counter()
            model, did, taken = train(case, mode, args, tokens, partial(watch.advance, task))
            loss = evaluate(model, validation, SIZES[args.model].block_size)
            seconds = round(time.perf_counter() - start, 1)
            rule = "AdamW" if case.momentum is None else "SGD"
            run = {"case": case.name, "mode": mode, "compressor": case.spec, "optimizer": f"{rule}, {case.lr:g}"}
            run |= {"val_loss": loss}
            result["runs"].append({**run, "steps": case.steps, "taken": taken, "seconds": seconds, "events": did})
            if args.json and dist.get_rank() == 0:
                results.write(args.json, result)


HEADERS = ("case", "compressor", "uncompressed", "left alone", "guarded", "limit", "verdict", "steps", "the guard")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`."""
    table: list[tuple[str, ...]] = []
    for name in dict.fromkeys(run["case"] for run in result["runs"]):
        runs = {run["mode"]: run for run in result["runs"] if run["case"] == name}
        if "guarded" not in runs:
            continue
        guarded = runs["guarded"]
        setting = f"{guarded['compressor']}, {guarded['optimizer']}"
        steps = f"{guarded['taken']} for {guarded['steps']}"
        did = "; ".join(event.partition(" (")[0] for event in guarded["events"]) or "did nothing"
        if len(runs) < len(MODES):
            verdict = "FALSE ALARM" if guarded["events"] else "quiet"
            table.append((name, setting, "", "", "", "", verdict, steps, did))
            continue
        plain, alone = runs["uncompressed"], runs["unguarded"]
        excess = guarded["val_loss"] / plain["val_loss"] - 1
        losses = (f"{run['val_loss'] / plain['val_loss'] - 1:+.2%}" for run in (alone, guarded))
        verdict = "pass" if excess <= LIMIT and any("roll_back" in event for event in guarded["events"]) else "FAIL"
        limit = f"{LIMIT:.1%}"
        table.append((name, setting, f"{plain['val_loss']:.4f}", *losses, limit, verdict, steps, did))
    return table


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.divergence",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = {case.name: case for case in CASES}
    parser.add_argument("--cases", nargs="+", choices=names, default=list(names), help="which")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--batch-size", type=int, default=8, help="windows of text a rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result, after each training")
    args = parser.parse_args(arguments)
    args.cases = [names[name] for name in args.cases]
    return args


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        return on_each_rank("benchmarks.divergence", RANKS)
    warnings.simplefilter("ignore", commopt.CommOptWarning)  # what the guard does is in the table
    config = SIZES[args.model]
    setup = {"ranks": RANKS, "model": args.model, "batch": f"{args.batch_size} x {config.block_size} tokens a rank"}
    schedule = f"peak after {LR_WARM_UP} steps, cosine to a tenth; gradients clipped to 1"
    conditions = {**results.conditions(), **setup, "seed": args.seed, "learning rate": schedule}
    result = {"command": results.command("benchmarks.divergence"), "conditions": conditions, "runs": []}
    dist.init_process_group("gloo", timeout=TIMEOUT)
    measure(args, result)
    if dist.get_rank() == 0:
        results.show("", HEADERS, rows(result))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
