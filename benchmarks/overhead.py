"""What watching and guarding cost: steps with and without a supervisor, in turns, over loopback.

    python -m benchmarks.overhead --json overhead.json

Two models are trained in the same processes, round after round: one bare, of which nothing is sampled either, one under
a `commopt.Supervisor` with its defaults and a file of JSON lines. Snapshots are timed apart, and spread over the steps
between two of them.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from benchmarks import results
from benchmarks.variants import TIMEOUT, WARM_UP
from commopt.engine.fidelity import Fidelity
from commopt.lab import on_each_rank
from lightning_commopt import CommOptDDPStrategy
from recipes.gpt.train import GPT, SIZES, batches, load_text, next_token_loss

RANKS = 2


class Blind(Fidelity):
    """Samples nothing."""

    def sample(self, names: Sequence[str], buffer: Tensor) -> Tensor:
        return buffer.new_zeros(())

    def stage(self, index: int, names: Sequence[str], contributed: Tensor, delivered: Tensor) -> None:
        pass


class Subject:
    """A model that is trained, watched or not."""

    def __init__(self, args: argparse.Namespace, directory: Path | None) -> None:
        torch.manual_seed(0)
        self.model = DDP(GPT(SIZES[args.model]), bucket_cap_mb=CommOptDDPStrategy.bucket_cap_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.handle = commopt.attach(self.model, args.compressor, timeout=TIMEOUT.total_seconds())
        self.supervisor: commopt.Supervisor | None = None
        if directory is None:
            self.handle.engine._fidelity = Blind(1)
        else:
            monitor = commopt.Monitor(directory, rank=dist.get_rank(), world=dist.get_world_size())
            states: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "random": commopt.RandomState()}
            self.supervisor = commopt.Supervisor(self.handle, states, monitor=monitor, every=1_000_000)
        self.position = 0
        self.rounds: list[list[float]] = []

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        start = time.perf_counter()
        loss = next_token_loss(self.model(inputs), targets)
        if self.supervisor:
            self.supervisor.observe(loss, samples=len(inputs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.supervisor:
            self.position = self.supervisor.end_step(self.position)
        return time.perf_counter() - start

    def round(self, stream: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
        dist.barrier()
        seconds = torch.tensor([self.step(*next(stream)) for _ in range(steps)], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.rounds.append(seconds.tolist())


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """On every rank."""
    train, _ = load_text()
    stream = batches(train, SIZES[args.model].block_size, args.batch_size, rank=dist.get_rank())
    bare, watched = Subject(args, None), Subject(args, directory)
    for subject in (bare, watched):
        for _ in range(WARM_UP):
            subject.step(*next(stream))
    quiet = dist.get_rank() != 0
    for number in track(range(args.rounds), "rounds", console=Console(stderr=True), disable=quiet):
        pair = (bare, watched) if number % 2 else (watched, bare)
        for subject in pair:
            subject.round(stream, args.steps)
    ratios = [
        statistics.median(mine) / statistics.median(theirs)
        for mine, theirs in zip(watched.rounds, bare.rounds, strict=True)
    ]
    takes = []
    ring = watched.supervisor.ring if watched.supervisor else None
    assert ring is not None
    for number in range(12):
        start = time.perf_counter()
        ring.take(watched.position + number)
        takes.append(time.perf_counter() - start)
    steps = [seconds for mine in bare.rounds for seconds in mine]
    low, median, high = results.quantiles(ratios, 0.25, 0.5, 0.75)
    interval = 50  # the default of steps between two snapshots
    snapshot = statistics.median(takes[6:])
    for subject in (bare, watched):
        subject.handle.close()
    return {
        "step_ms": 1000 * statistics.median(steps),
        "watched_over_bare": {"median": median, "q25": low, "q75": high},
        "snapshot_ms": 1000 * snapshot,
        "snapshot_share": snapshot / interval / statistics.median(steps),
        "ring_mb": ring.nbytes / 1e6,
    }


HEADERS = (
    "compressor",
    "bare step, ms",
    "watched over bare",
    "quartiles",
    "snapshot, ms",
    "of a step",
    "four snapshots, MB",
)


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`."""
    found, over = result["found"], result["found"]["watched_over_bare"]
    return [
        (
            result["conditions"]["compressor"],
            f"{found['step_ms']:.0f}",
            f"{over['median']:.3f}",
            f"{over['q25']:.3f}-{over['q75']:.3f}",
            f"{found['snapshot_ms']:.1f}",
            f"{found['snapshot_share']:.2%}",
            f"{found['ring_mb']:.0f}",
        )
    ]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--compressor", default="int8")
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--batch-size", type=int, default=5, help="windows of text a rank")
    parser.add_argument("--rounds", type=int, default=24, help="turns of each")
    parser.add_argument("--steps", type=int, default=8, help="of each in a round")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        return on_each_rank("benchmarks.overhead", RANKS)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(args, Path(directory))
    if dist.get_rank() == 0:
        batch = f"{args.batch_size} x {SIZES[args.model].block_size} tokens a rank"
        setup = {"ranks": RANKS, "model": args.model, "batch": batch, "compressor": args.compressor}
        setup |= {"rounds": args.rounds, "steps a round": args.steps}
        command = results.command("benchmarks.overhead")
        result = {"command": command, "conditions": {**results.conditions(), **setup}, "found": found}
        results.publish("", HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
