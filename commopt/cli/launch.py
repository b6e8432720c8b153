"""``commopt launch``: a script under Accelerate, from one file."""

import argparse
import importlib.util
import os
import sys
from typing import Any

from commopt.errors import ConfigError


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommand. Nothing in it looks like an option, so that all goes to Accelerate's own parser."""
    parser = commands.add_parser(
        "launch",
        help="start a script under Accelerate, with its gradients compressed",
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Becomes the launcher of accelerate_commopt, which the core does not import: signals and the exit status are its
    own, and there is no process in between."""
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("commopt launch needs Accelerate: pip install 'commopt[accelerate]'")
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "accelerate_commopt.launch", *options.arguments]
    os.execv(sys.executable, command)
