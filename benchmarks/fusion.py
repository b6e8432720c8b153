"""Step time by the size of messages: which neighbouring buckets of DDP travel together, changed while training goes on.

    python -m benchmarks.fusion --rate 1gbit --delay 5ms

DDP is wrapped once, with buckets of 0.1 MB, and the plan alone changes from turn to turn. ``small`` is a model of
10 000 parameters of 64 elements, ``gpt`` the GPT of the recipe. The last row is what the policy chooses by itself.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from benchmarks import results
from benchmarks.variants import TIMEOUT
from commopt.errors import CommOptError
from commopt.lab import NetLab, on_each_host
from commopt.plan import Plan
from commopt.policy.choice import MESSAGES
from recipes.gpt.train import GPT, SIZES, batches, load_text, next_token_loss

BUCKET_MB = 0.1
SETTLE = 3  # steps after a change
SIZES_TRIED = (None, 1 << 18, *MESSAGES[:3])
LOOKS = 36  # steps, in which the policy finds its plan


class Scales(nn.Module):
    """Ten thousand scales of 64 channels, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(10_000)])

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.stack(tuple(self.scales))).sum()


def workloads() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    """A model by name, and the loss of its next step."""
    stream = batches(load_text()[0], SIZES["small"].block_size, 2, rank=dist.get_rank())

    def of_gpt(model: nn.Module) -> Tensor:
        inputs, targets = next(stream)
        return next_token_loss(model(inputs), targets)

    torch.manual_seed(0)
    return {"small": (Scales(), lambda model: model(torch.ones(64))), "gpt": (GPT(SIZES["small"]), of_gpt)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """On every rank: milliseconds of each step, by model and size of messages."""
    rows = []
    for name, (model, loss_of) in workloads().items():
        ddp = DDP(model, bucket_cap_mb=BUCKET_MB)
        handle = commopt.attach(ddp, timeout=TIMEOUT.total_seconds(), quality=args.quality)

        def steps(count: int, ddp: DDP = ddp, loss_of: Callable[[nn.Module], Tensor] = loss_of) -> list[float]:
            seconds = []
            for _ in range(count):
                start = time.perf_counter()
                loss_of(ddp).backward()
                ddp.zero_grad()
                seconds.append(time.perf_counter() - start)
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            return [1000 * float(value) for value in slowest]

        engine, pilot = handle.engine, handle.pilot
        steps(LOOKS)
        chosen = engine.configured
        if pilot is not None:
            pilot.close()  # from here on nobody changes the plan
        times: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for plan in (*(replace(chosen, message_bytes=size) for size in SIZES_TRIED), chosen):
                engine.configure(plan)
                label = "as chosen" if plan is chosen else _size(plan)
                times.setdefault(label, []).extend(steps(SETTLE + args.steps)[SETTLE:])
        handle.close()
        rows += [
            {
                "model": name,
                "plan": chosen.compressor.name,
                "messages": f"as chosen: {_size(chosen)}" if label == "as chosen" else label,
                "step_ms": dict(zip(("q25", "median", "q75"), results.quantiles(ms, 0.25, 0.5, 0.75), strict=True)),
                "reason": pilot.explanation if pilot is not None else "",
            }
            for label, ms in times.items()
        ]
    setup = {"rate": args.rate, "delay": args.delay, "hosts": dist.get_world_size(), "bucket cap": f"{BUCKET_MB} MB"}
    return {
        "command": results.command("benchmarks.fusion"),
        "conditions": {**results.conditions(), **setup, "rounds": args.rounds, "steps a round": args.steps},
        "runs": rows,
    }


def _size(plan: Plan) -> str:
    return "each bucket" if plan.message_bytes is None else f"{plan.message_bytes / 2**20:g} MiB"


HEADERS = ("model", "plan", "messages", "ms a step", "quartiles", "over each bucket")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`."""
    alone = {run["model"]: run["step_ms"]["median"] for run in result["runs"] if run["messages"] == "each bucket"}
    return [
        (
            run["model"],
            run["plan"],
            run["messages"],
            f"{run['step_ms']['median']:.0f}",
            f"{run['step_ms']['q25']:.0f}-{run['step_ms']['q75']:.0f}",
            f"{run['step_ms']['median'] / alone[run['model']]:.2f}",
        )
        for run in result["runs"]
    ]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--delay", default="5ms", help="that each host's link adds, one way")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--quality", default="safe")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        try:
            return on_each_host("benchmarks.fusion", NetLab(args.hosts, args.rate, delay=args.delay))
        except CommOptError as error:
            print(f"fusion: {error}", file=sys.stderr)
            return 2
    dist.init_process_group("gloo", timeout=TIMEOUT)
    result = measure(args)
    if dist.get_rank() == 0:
        results.publish("messages", HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
