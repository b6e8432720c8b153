"""``commopt lab``: a cluster rehearsed on one machine."""

import argparse
import signal
import sys
from typing import Any

from commopt.lab import open_lab


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("lab", help="rehearse a cluster on one machine (Linux, root)")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    job = actions.add_parser("run", help="make a lab, run a command on each of its hosts, remove it")
    job.add_argument("--hosts", type=int, default=2)
    job.add_argument("--rate", default="100mbit", help="as tc writes it, 'none' (unshaped) or 'loopback'")
    job.add_argument("command", nargs="+", help="after --, the command that each host runs")
    job.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Runs the job; ends with its status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open_lab(options.hosts, options.rate) as lab:
        status = lab.run(options.command)
    sys.exit(status)
