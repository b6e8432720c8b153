"""Labs of tests keep their records apart from those of whoever runs the tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from commopt.lab import NetLab, available, links, record
from commopt.lab.system import namespaces

ROOT = Path(__file__).parents[2]

# The command in a process of its own, with the records of the test.
COMMAND = """
import sys
from pathlib import Path
from commopt.lab import links, record
record.FOLDER = Path(sys.argv.pop(1))
{first}
from commopt.cli import main
sys.exit(main())
"""


@pytest.fixture(scope="session")
def _machine() -> None:
    if reason := available():
        pytest.skip(reason)


@pytest.fixture
def machine(_machine: None, folder: Path) -> None:
    """A machine on which labs can be made; elsewhere the test is skipped, with the reason."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the records lie."""
    monkeypatch.setattr(record, "FOLDER", tmp_path / "labs")
    return record.FOLDER


@pytest.fixture
def name() -> str:
    """For a lab; other labs may come and go on this machine."""
    return f"test-{os.getpid()}"


@pytest.fixture
def made() -> Callable[[str], set[str]]:
    """The namespaces of labs whose name or prefix begins like this."""
    return lambda beginning: {namespace for namespace in namespaces() if namespace.startswith(f"{beginning}-")}


@pytest.fixture(params=["netem", "relay"])
def means(request: pytest.FixtureRequest, machine: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to delay and to lose packets, where the kernel has both."""
    if request.param == "relay":
        monkeypatch.setattr(links, "has_netem", lambda namespace: False)
    elif not _netem():
        pytest.skip("this kernel has no netem")
    return str(request.param)


@pytest.fixture
def begin(folder: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts ``commopt lab`` as a process; ``first`` is Python that it runs before."""

    def start(arguments: Sequence[str], first: str = "", **kwargs: Any) -> "subprocess.Popen[str]":
        code = [sys.executable, "-c", COMMAND.format(first=first), str(folder), "lab"]
        return subprocess.Popen([*code, *arguments], text=True, cwd=ROOT, **kwargs)

    return start


def _netem() -> bool:
    with NetLab(1, None) as lab:
        return lab.record.netem
