"""What the lab asks of the machine: Linux, root, and the tools of iproute2."""

import os
import shutil
import subprocess
import sys

from commopt.errors import LabError


def require() -> None:
    """Raises a ``LabError`` that says what is missing here."""
    if sys.platform != "linux":
        raise LabError("network namespaces need Linux")
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        raise LabError(f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise LabError("network namespaces need root")


def sh(*command: str, stdin: str = "") -> str:
    """Runs a tool to its end and returns its output; a ``LabError`` with what it said if it failed.

    Ctrl-C does not reach it: what it does is done whole, and then undone.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        if "not permitted" in said:
            said += " (a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN: docker run --privileged)"
        raise LabError(f"{' '.join(command)}: {said}")
    return done.stdout


def namespaces() -> set[str]:
    """The names of all network namespaces of this machine."""
    return {line.split()[0] for line in sh("ip", "netns", "list").splitlines()}


def has_netem(namespace: str) -> bool:
    """Whether the kernel can delay and lose packets by itself; tried out in a namespace of the lab."""
    try:
        sh("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except LabError:
        return False
    sh("tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root")
    return True
