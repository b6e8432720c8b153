"""``commopt doctor``: what compression would do for a training, before anything is changed."""

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from commopt.cli.report import price
from commopt.config import QUALITIES
from commopt.doctor import STEPS, Diagnosis, Request
from commopt.errors import ConfigError

HOURS = 100.0
SHOWN = 6  # of the plans that were looked at
USAGE = """commopt doctor runs some steps of a training that uses commopt (attach, or a strategy), uncompressed whatever
it is set to, and says what would be best. Give it the command that you train with, its launcher included:
  commopt doctor -- torchrun --nproc-per-node 2 train.py
  commopt doctor --gpu-hour-price 2.5 -- commopt lab run --hosts 2 --rate 100mbit -- python train.py"""


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="measure some steps of a training, and recommend a plan or nothing",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of training (default: {STEPS})")
    parser.add_argument("--quality", choices=QUALITIES, default="safe", help="of what is allowed (default: safe)")
    parser.add_argument("--gpu-hour-price", metavar="PRICE", type=price, help="of one GPU (rank), in any currency")
    parser.add_argument(
        "--hours", metavar="H", type=_hours, default=HOURS, help=f"of uncompressed training (default: {HOURS:g})"
    )
    parser.add_argument("command", metavar="CMD", nargs="*", help="after --")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the command to the step where it ends itself, and prints the page."""
    if os.environ.get("RANK"):
        raise ConfigError(f"the doctor is inside of a launcher (RANK is set), and has to be around it. {USAGE}")
    if not options.command:
        raise ConfigError(f"no command is given. {USAGE}")
    with tempfile.TemporaryDirectory(prefix="commopt-doctor-") as folder:
        file = Path(folder, "diagnosis.json")
        request = Request(options.steps, options.quality, str(file))
        environment = {**os.environ, **request.to_environment()}
        status = _run(options.command, environment)
        if not file.exists():
            raise ConfigError(
                f"{options.command[0]} ended with status {status} before {options.steps} steps were measured: it "
                "failed, took fewer steps (see --steps), or does not exchange gradients by commopt.attach or a commopt "
                "strategy. On several hosts, the one of rank 0 has the page."
            )
        diagnosis = Diagnosis.read(file)
    Console().print(page(diagnosis, options.hours, options.gpu_hour_price))


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Its exit status. Whoever ends the doctor ends it, too."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        finally:
            process.terminate()  # a launcher ends its ranks then; Ctrl-C has reached it already


def page(found: Diagnosis, hours: float = HOURS, gpu_hour_price: float | None = None) -> RenderableType:
    """One page for a terminal.

    Args:
        hours: that training takes without compression.
        gpu_hour_price: of one rank.
    """
    where = f"{_plural(found.ranks, 'rank')} on {_plural(found.hosts, 'host')}"
    parts: list[RenderableType] = [Text(f"{where}, {found.steps} steps without compression")]
    if found.links:
        links = _table("Links, each way", "hosts", "latency, ms", "Gbit/s")
        for link in found.links:
            low, high = link.hosts
            links.add_row(f"{low} - {high}", f"{1e3 * link.latency:.3f}", f"{8e-9 * link.bandwidth:.4g}")
        parts.append(links)
    step = _table("A step", "", "")
    step.show_header = False
    step.add_row("gradients", f"{found.nbytes / 2**20:.1f} MiB")
    step.add_row("takes", _ms(found.step))
    step.add_row("waits for communication", f"{found.exposed:.1%}")
    step.add_row("without any exchange", _ms(found.compute))
    step.add_row("best possible gain", f"{found.best_gain:.1%}")
    parts.append(step)
    if found.looked_at:
        plans = _table("Predicted", "plan", "ms a step", "saves")
        for each in found.looked_at[:SHOWN]:
            saves = round(1 - each.step / found.step, 3) + 0.0  # which is no negative zero
            plans.add_row(Text(each.plan), f"{1e3 * each.step:.0f}", f"{saves:.1%}")
        parts.append(plans)
    return Group(*parts, Text(recommendation(found, hours, gpu_hour_price)))


def recommendation(found: Diagnosis, hours: float, gpu_hour_price: float | None) -> str:
    """What to do, what it saves, and why."""
    if found.recommended is None:
        return f"Recommended: do nothing: {found.reason}."
    saved = hours * found.gain
    quality = "" if found.quality == "safe" else f", quality={found.quality!r}"
    text = (
        f"Recommended: {found.recommended.plan}, {_ms(found.recommended.step)} a step predicted: {found.reason}. "
        f"Of {hours:g} hours of training it saves {saved:.1f} hours"
    )
    if gpu_hour_price is not None:
        money = saved * found.ranks * gpu_hour_price
        text += f", which is {money:.2f} for {_plural(found.ranks, 'GPU')} at {gpu_hour_price:g} an hour"
    return f"{text}. compressor='auto'{quality} finds it by itself, and follows the link."


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _hours(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of hours")
    return value
