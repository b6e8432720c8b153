"""A script of the user, run in this process: for what runs programs that know nothing of commopt."""

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from commopt.errors import ConfigError


def find(script: str, module: bool = False) -> None:
    """Raises ``ConfigError`` where there is no such script or module."""
    if module:
        try:
            found = importlib.util.find_spec(script) is not None
        except (ImportError, ValueError):  # a package around it is missing, or it is no name at all
            found = False
        if not found:
            raise ConfigError(f"there is no module {script!r} to run, seen from {Path.cwd()}; installed, or misspelt?")
    elif not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}, seen from {Path.cwd()}.")


def run(script: str, module: bool, arguments: Sequence[str]) -> None:
    """Runs it as ``python script arguments`` or ``python -m module arguments`` would."""
    sys.argv = [script, *arguments]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
