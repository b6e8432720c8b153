"""The same GPT, text and seed over a slow link, with plain DDP and then with compressed gradients.

    make demo
    python -m recipes.gpt.demo --compressor powersgd

Two processes train for about three minutes. As root on Linux they are two hosts joined at 100 Mbit/s (network
namespaces, see docs/lab.md); otherwise they talk over loopback. One table is printed, and ``demo/loss.png``
shows the two loss curves against wall-clock.
"""

import argparse
import csv
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commopt.compressors import available as available_compressors
from commopt.lab import Loopback, NetLab, available
from recipes.gpt.train import GPT, SIZES

SIZE = "small"
HOSTS = 2
RATE = "100mbit"
OUT = Path("demo")
POLL_SECONDS = 0.25


@dataclass
class Run:
    """One training run: its arguments, and what it wrote to ``metrics.csv`` so far."""

    name: str
    arguments: list[str]
    steps: int
    rows: list[dict[str, str]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return OUT / self.name.replace(" ", "-")

    def read(self) -> None:
        path = self.folder / "metrics.csv"
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def column(self, name: str) -> dict[int, float]:
        """The values of a metric by step; a row of the file holds those of training or those of validation."""
        return {int(row["step"]): float(row[name]) for row in self.rows if row.get(name)}

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """The seconds trained so far, and the metric."""
        seconds, values = self.column("seconds"), self.column(name)
        return [seconds[step] for step in values], list(values.values())

    @property
    def ms_per_step(self) -> float:
        return median(self.column("ms_per_step").values())


def train(run: Run, lab: Loopback, progress: Progress) -> None:
    """Run the recipe on every host of the lab and follow it; raises ``SystemExit`` when a process fails."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "metrics.csv").unlink(missing_ok=True)
    task = progress.add_task(run.name, total=run.steps, note="starting")
    command = [sys.executable, "-m", "recipes.gpt.train", "--size", SIZE, "--accelerator", "cpu"]
    command += ["--steps", str(run.steps), "--warmup", "10", "--val-every", "10", "--out", str(run.folder)]
    log = run.folder / "log.txt"
    with log.open("w") as output:
        processes = lab.popen([*command, *run.arguments], stdout=output, stderr=subprocess.STDOUT)
        while any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
            if any(process.returncode for process in processes):
                break
            run.read()
            if steps := run.column("ms_per_step"):
                progress.update(task, completed=len(steps), note=f"{run.ms_per_step:.0f} ms a step")
    if any(process.returncode for process in processes):
        raise SystemExit(f"{run.name} failed; the end of {log}:\n{log.read_text()[-3000:]}")
    run.read()
    progress.update(task, completed=run.steps, note=f"{run.ms_per_step:.0f} ms a step")


def table(alone: Run, plain: Run, compressed: Run) -> Table:
    """What each run cost and reached."""
    with torch.device("meta"):
        gradient_bytes = 4 * sum(parameter.numel() for parameter in GPT(SIZES[SIZE]).parameters())
    ring = 2 * (HOSTS - 1) / HOSTS * gradient_bytes  # what plain DDP sends, per rank
    sent = {alone.name: 0.0, plain.name: ring / 1e6, compressed.name: median(compressed.column("sent_mb").values())}
    result = Table(title=f"GPT {SIZE}, {HOSTS} ranks, {plain.steps} steps")
    result.add_column()
    for heading in ("ms a step", "communication share", "MB sent a step", "validation loss"):
        result.add_column(heading, justify="right")
    for run in (alone, plain, compressed):
        result.add_row(
            run.name,
            f"{run.ms_per_step:.0f}",
            f"{max(0.0, 1 - alone.ms_per_step / run.ms_per_step):.0%}",
            f"{sent[run.name]:.2f}",
            "" if run is alone else f"{list(run.column('val_loss').values())[-1]:.3f}",
        )
    return result


def draw(runs: list[Run], link: str, path: Path) -> None:
    """The loss of each run against the seconds that it trained; validation takes no part in them."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for colour, run in zip(("tab:gray", "tab:blue"), runs, strict=True):
        axes.plot(*run.curve("train_loss"), color=colour, alpha=0.35, linewidth=1)
        axes.plot(*run.curve("val_loss"), color=colour, marker="o", markersize=4, label=run.name)
    axes.set(xlabel="seconds of training", ylabel="loss, nats a byte", title=f"GPT {SIZE}, {HOSTS} ranks over {link}")
    axes.legend(title="validation (faint: training)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.gpt.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--compressor", choices=available_compressors(), default="int8")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    nodes = ["--num-nodes", str(HOSTS)]
    alone = Run("no communication", ["--strategy", "auto"], steps=10)  # a copy on every host: the cores are as busy
    plain = Run("plain DDP", ["--strategy", "ddp", *nodes], args.steps)
    chosen = ["--strategy", "commopt_ddp", "--compressor", args.compressor]
    compressed = Run(f"commopt {args.compressor}", [*chosen, *nodes], args.steps)

    console = Console()
    reason = available()
    link = "loopback" if reason else f"a link of {RATE.removesuffix('mbit')} Mbit/s"
    console.print(f"{HOSTS} ranks over {link}." + (f" A slow link was not to be had: {reason}." if reason else ""))
    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    lab = Loopback(HOSTS) if reason else NetLab(HOSTS, RATE)
    with lab, Progress(*columns, console=console) as progress:
        for run in (alone, plain, compressed):
            train(run, lab, progress)
    console.print(table(alone, plain, compressed))
    draw([plain, compressed], link, OUT / "loss.png")
    console.print(f"The two loss curves: {OUT / 'loss.png'}")


if __name__ == "__main__":
    main()
