"""What was measured, kept for the next run on the same nodes.

Rank 0 alone reads and writes; all ranks decide by the text that it sends them, and by one quick measurement.
"""

import hashlib
import json
import os
import time
import warnings
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from commopt.collectives.agreement import from_rank_zero
from commopt.collectives.wire import Wire
from commopt.errors import CommOptWarning, ConfigError
from commopt.network import probe as probing
from commopt.network.table import Network

MAX_AGE = 86400.0  # seconds
AGREES = 1.3  # a factor, between what was kept and what is seen now
JITTER = 4e-3  # seconds, a tick of many schedulers: a difference below it says nothing about the network
QUICK = 0.03  # seconds of one message at most, and of a batch of them, for the check of what was kept


def network_of(wire: Wire, device: torch.device, budget: float = 2.0) -> Network:
    """What is known of the network of these nodes, if it is still true; else `probe` measures it, and it is kept.

    Files lie under ``$XDG_CACHE_HOME/commopt`` (``~/.cache/commopt``); ``COMMOPT_CACHE=off`` neither reads nor writes
    any. Call it on every rank.

    Raises:
        WireError: a peer ended or stalled.
    """
    if wire.world == 1:
        return probing.probe(wire, device, budget)
    identities = probing.identify(wire, device)
    path = _path(identities, wire) if wire.rank == 0 else None
    network = _parse(from_rank_zero(wire, _read(path), device))
    if network and network.hosts == probing.number_hosts(identities) and still_true(network, wire, device):
        return network
    network = probing.probe(wire, device, budget)
    _write(path, network)
    return network


def still_true(network: Network, wire: Wire, device: torch.device) -> bool:
    """Whether a gather takes what ``network`` says, at the smallest size and at one that takes a while."""
    probing.drain(wire, device)
    wire.piece = network.piece
    kept = network.collectives["all_gather"]
    smallest, size = kept.points[0][0], kept.points[-1][0]
    while kept.seconds(size) > QUICK and size > smallest:
        size /= 2
    for asked in (smallest, size):
        once = probing.collective(wire, "all_gather", int(asked), device)
        seen = probing.sample(once, probing.agree(wire, device), QUICK).seconds
        low, high = sorted((seen, kept.seconds(asked)))
        if high > AGREES * low and high - low > JITTER:
            return False
    return True


def _path(identities: list[str], wire: Wire) -> Path | None:
    """Where results for these nodes lie; None for nowhere."""
    if os.environ.get("COMMOPT_CACHE", "on").lower() in ("off", "0", "false"):
        return None
    ranks = Counter(identities).items()
    try:
        release = version("commopt")
    except PackageNotFoundError:
        release = "(not installed)"
    nodes = sorted((identity.split(" ")[0], count) for identity, count in ranks)
    key = json.dumps([nodes, dist.get_backend(wire.group), release])
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "commopt")
    except RuntimeError:  # a user without a home, as in some containers
        return None
    return folder / f"network-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read(path: Path | None) -> str:
    """The text of a network that is not too old; empty if there is none."""
    if path is None:
        return ""
    try:
        kept = json.loads(path.read_text())
        Network.from_plain(kept["network"])
        age = time.time() - float(kept["time"])
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except Exception as error:  # whatever a file holds, the other ranks wait for a word
        _warn(f"{path} is ignored, and written anew: {error}")
        return ""
    return json.dumps(kept["network"]) if 0 <= age < MAX_AGE else ""


def _write(path: Path | None, network: Network) -> None:
    if path is None:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"time": time.time(), "network": network.to_plain()}))
        os.replace(part, path)
    except OSError as error:
        _warn(f"what the probe measured is not kept: {error}. Set XDG_CACHE_HOME, or COMMOPT_CACHE=off.")


def _parse(text: str) -> Network | None:
    try:
        return Network.from_plain(json.loads(text)) if text else None
    except ConfigError:  # of a rank 0 with another version of commopt
        return None


def _warn(message: str) -> None:
    warnings.warn(message, CommOptWarning, stacklevel=3)
