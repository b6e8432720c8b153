"""The ``commopt`` command: one small module a subcommand."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from commopt.cli import bench, doctor, lab, launch, report
from commopt.errors import CommOptError

COMMANDS = (report, lab, bench, doctor, launch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; 0 if it worked, 2 if the user has to change something."""
    parser = argparse.ArgumentParser("commopt", description="Compressed gradient exchange: what it does for a run.")
    parser.add_argument("--version", action="version", version=f"commopt {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (CommOptError, OSError) as error:
        print(f"commopt: {error}", file=sys.stderr)
        return 2
    return 0


def _version() -> str:
    try:
        return version("commopt")
    except PackageNotFoundError:
        return "(not installed)"
