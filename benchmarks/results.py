"""What benchmarks share: how far they are, and what they write down: conditions, small statistics, JSON."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def conditions() -> dict[str, Any]:
    """What a number depends on beside the arguments of the benchmark."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads per rank": torch.get_num_threads(),
    }


def command(module: str) -> str:
    """The command line of this process, as a person would type it."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def quantiles(values: Sequence[float], *shares: float) -> list[float]:
    """Linearly interpolated quantiles, 0 the least and 1 the greatest."""
    return torch.tensor(values, dtype=torch.float64).quantile(torch.tensor(shares, dtype=torch.float64)).tolist()


def progress(quiet: bool) -> Progress:
    """A bar of trainings that take minutes, where standard output holds results; nothing if ``quiet``."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
        refresh_per_second=1,
        speed_estimate_period=600.0,
    )


def show(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; where nobody looks, as tab-separated text."""
    console = Console()
    if not console.is_terminal:
        print("\n".join("\t".join(row) for row in (headers, *rows)))
        return
    table = Table(*headers, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def publish(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], result: Any, path: Path | None) -> None:
    """Shows the table of a result, and writes the result if there is a path."""
    show(title, headers, rows)
    if path is not None:
        write(path, result)


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Writes JSON so that a reader, or a killed writer, never leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
