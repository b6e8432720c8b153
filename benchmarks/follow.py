"""What the policy does while the network changes: the link is halved in mid-training, and restored.

    python -m benchmarks.follow --rate 400 --hosts 2

Rank 0 writes a line a step; the links change when it comes to `HALVED` and to `RESTORED`. Ranks compare a hash of their
parameters in every tenth step.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from benchmarks import results
from benchmarks.variants import TIMEOUT
from commopt.errors import CommOptError
from commopt.lab import NetLab
from commopt.policy.choice import describe
from commopt.resume.snapshot import fingerprint
from lightning_commopt import CommOptDDPStrategy
from recipes.gpt.train import GPT, SIZES, batches, load_text, next_token_loss

HALVED, RESTORED, END = 60, 120, 180  # steps
LINE = "at step"


def train(args: argparse.Namespace) -> dict[str, Any]:
    """On every rank: the plan of each step, and how often ranks differed."""
    torch.manual_seed(0)
    model = DDP(GPT(SIZES["small"]), bucket_cap_mb=CommOptDDPStrategy.bucket_cap_mb)
    handle = commopt.attach(model, quality=args.quality, timeout=TIMEOUT.total_seconds())
    assert handle.pilot is not None
    notes: list[tuple[int, str]] = []
    handle.pilot.tell = lambda step, reason: notes.append((step, reason))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stream = batches(load_text()[0], SIZES["small"].block_size, 5, rank=dist.get_rank())
    steps, apart = [], 0
    for step in range(END):
        start = time.perf_counter()
        inputs, targets = next(stream)
        next_token_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append((describe(handle.engine.plan), time.perf_counter() - start))
        if step % 10 == 9:
            mine = torch.tensor([fingerprint(model.parameters()) >> 1], dtype=torch.int64)
            high = mine.clone()
            dist.all_reduce(high, dist.ReduceOp.MAX)
            dist.all_reduce(mine, dist.ReduceOp.MIN)
            apart += int(high != mine)
        if dist.get_rank() == 0:
            print(LINE, step, flush=True)
    handle.close()
    return {"plans": steps, "apart": apart, "notes": notes}


def summary(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """Phases: the link, the plan at its end, and the steps until the plan no longer changed."""
    phases = []
    for link, begin, end in (("full", 0, HALVED), ("half", HALVED, RESTORED), ("full", RESTORED, END)):
        plans = [plan for plan, _ in seen["plans"][begin:end]]
        settled = next((i for i in range(len(plans)) if set(plans[i:]) == {plans[-1]}), 0)
        ms = sorted(1000 * seconds for _, seconds in seen["plans"][begin + settled : end])
        phases.append(
            {
                "link": link,
                "from": begin,
                "plan": plans[-1],
                "settled after": settled,
                "step_ms": ms[len(ms) // 2],
                "reasons": [f"step {step}: {reason}" for step, reason in seen["notes"] if begin <= step < end],
            }
        )
    return phases


HEADERS = ("link", "from step", "plan at the end", "steps until it settled", "ms a step", "the last reason")


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`."""
    return [
        (
            run["link"],
            str(run["from"]),
            run["plan"],
            str(run["settled after"]),
            f"{run['step_ms']:.0f}",
            run["reasons"][-1] if run["reasons"] else "no change",
        )
        for run in result["runs"]
    ]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.follow", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default=400.0, help="of each host's link, in Mbit/s", type=float)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--quality", default="safe")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def watch(args: argparse.Namespace) -> int:
    """Starts the ranks, and changes the links when rank 0 comes to it."""
    rates = {HALVED: f"{args.rate / 2:g}mbit", RESTORED: f"{args.rate:g}mbit"}
    with NetLab(args.hosts, f"{args.rate:g}mbit") as lab:
        command = [sys.executable, "-m", "benchmarks.follow", *sys.argv[1:]]
        processes = lab.popen(command, stdout=subprocess.PIPE, text=True)
        first = processes[0].stdout
        assert first is not None
        for line in first:
            if not line.startswith(LINE):
                print(line, end="")
            elif (rate := rates.get(int(line.split()[-1]))) is not None:
                lab.set_rate(rate)
        return max(process.wait() for process in processes)


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            return watch(args)
        except CommOptError as error:
            print(f"follow: {error}", file=sys.stderr)
            return 2
    dist.init_process_group("gloo", timeout=TIMEOUT)
    seen = train(args)
    setup = {
        "rate": f"{args.rate:g} Mbit/s",
        "hosts": args.hosts,
        "quality": args.quality,
        "ranks apart": seen["apart"],
    }
    if dist.get_rank() == 0:
        result = {
            "command": results.command("benchmarks.follow"),
            "conditions": {**results.conditions(), **setup},
            "runs": summary(seen),
        }
        results.publish("", HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
