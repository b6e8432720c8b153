"""``commopt report``: a page and a picture of a run."""

import argparse
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from commopt.errors import ConfigError
from commopt.monitor.summary import render


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "report",
        help="write one HTML page about a run",
        description="Writes one self-contained HTML page from the lines that a monitor wrote, and prints the summary.",
    )
    parser.add_argument("directory", metavar="RUN_DIR", type=Path, help="where the monitor wrote commopt.jsonl")
    parser.add_argument("--out", metavar="FILE.html", type=Path, help="the page (default: RUN_DIR/commopt.html)")
    parser.add_argument("--png", metavar="FILE.png", type=Path, help="the figure alone, as a picture")
    parser.add_argument(
        "--gpu-hour-price", metavar="PRICE", type=price, help="of one GPU, in any currency; tells what waiting costs"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Writes what was asked for."""
    try:
        from commopt.monitor.report import read, write
    except ImportError as error:
        raise ConfigError("commopt report needs matplotlib and jinja2: pip install matplotlib jinja2") from error
    page = options.out or options.directory / "commopt.html"
    summary = write(read(options.directory), page, options.png, options.gpu_hour_price)
    console = Console()
    console.print(render(summary))
    for path in filter(None, (page, options.png)):
        console.print(f"Wrote {path}", soft_wrap=True, markup=False, highlight=False)


def price(text: str) -> float:
    """A price from the command line; argparse names this function where ``text`` is no number."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a price")
    return value
