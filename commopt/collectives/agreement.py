"""What ranks say to each other besides gradients: that they agree at the start, and what went wrong."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from commopt.collectives.wire import Wire
from commopt.errors import MismatchError

SHOWN = 5  # differences that an error lists


def check_agreement(
    wire: Wire,
    facts: Mapping[str, str],
    device: torch.device,
    remedy: str = "Nothing was sent. Give every rank the same.",
) -> None:
    """Compares ``facts`` over all ranks, by hash; the facts themselves travel only when hashes differ.

    Args:
        remedy: what the user is to do where they differ.

    Raises:
        MismatchError: on every rank, naming what differs and where.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    digests = _gather_bytes(wire, hashlib.sha256(text).digest(), 32, device)
    if len(set(digests)) == 1:
        return
    lengths = torch.zeros(wire.world, dtype=torch.int64, device=device)
    wire.all_gather(lengths, torch.tensor([len(text)], device=device))
    texts = _gather_bytes(wire, text, int(lengths.max()), device)
    described = _describe([json.loads(other.rstrip(b"\0")) for other in texts])
    raise MismatchError(f"ranks disagree. {described} {remedy}")


def share_text(wire: Wire, text: str, device: torch.device, limit: int = 600) -> list[str]:
    """Gathers a line of text from every rank, cut to ``limit`` bytes; empty where a rank has nothing to say."""
    lines = _gather_bytes(wire, text.encode(errors="replace")[:limit], limit, device)
    return [line.rstrip(b"\0").decode(errors="replace") for line in lines]


def from_rank_zero(wire: Wire, text: str, device: torch.device) -> str:
    """The text of rank 0, on every rank: the others add zeros to it."""
    data = text.encode()
    length = int(wire.all_reduce(torch.tensor([len(data)], device=device)))
    if length == 0:
        return ""
    octets = torch.zeros(length, dtype=torch.uint8, device=device)
    if data:
        octets.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return bytes(wire.all_reduce(octets).tolist()).decode()


def _gather_bytes(wire: Wire, data: bytes, size: int, device: torch.device) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    every: Tensor = mine.new_empty(wire.world, size)
    wire.all_gather(every, mine)
    return [bytes(row.tolist()) for row in every.cpu()]


def _describe(facts: list[dict[str, str]]) -> str:
    keys = dict.fromkeys(key for rank in facts for key in rank)
    lines = []
    for key in keys:
        values: dict[str, list[int]] = {}
        for rank, known in enumerate(facts):
            values.setdefault(known.get(key, "absent"), []).append(rank)
        if len(values) > 1:
            lines.append(f"{key}: " + "; ".join(f"{value} on rank {_ranks(ranks)}" for value, ranks in values.items()))
    more = f" (and {len(lines) - SHOWN} more differences)" if len(lines) > SHOWN else ""
    return " | ".join(lines[:SHOWN]) + more + "."


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
