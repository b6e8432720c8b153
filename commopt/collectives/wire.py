"""The only module that hands tensors to torch.distributed. It counts what it hands over."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.errors import ExchangeError
from commopt.transfers import Transfer

# Renamed in torch 2.13; the old name warns there.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# A long message fills the sender's queue, and behind it wait the acknowledgements of what comes the other way: on a
# slow link the two directions then take turns. Few and small pieces in flight keep both busy (32 kB at 100 Mbit/s), and
# cost calls and wake-ups that a fast link feels (128 kB at 1 Gbit/s; on loopback, whole messages).
PIECE = 32_000  # bytes, before the link is known
IN_FLIGHT = 4  # pieces each way


class WireError(ExchangeError):
    """A collective failed, so that peers are gone or no longer in step: nothing can be sent any more."""


class Turn(Protocol):
    """The right to use the wire, which messages get in order."""

    def take(self) -> None:
        """Waits for it."""

    def give(self) -> None:
        """Passes it on."""


@dataclass
class Wire:
    """Collectives over one process group, with counters. ``group`` None is the default group.

    Where several messages are under way at once, each on a wire of its own, `begin` gives each its turn, so that all
    ranks make the same collectives in the same order.
    """

    group: dist.ProcessGroup | None
    bytes_sent: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0  # for a turn, in seconds
    piece: int = PIECE  # bytes, the same on all ranks
    finished: int = field(default=0, init=False)  # collectives that took place
    _turn: Turn | None = field(default=None, init=False)
    _left: int | None = field(default=None, init=False)  # collectives until the turn ends by itself

    def __post_init__(self) -> None:
        self.rank: int = dist.get_rank(self.group)
        self.world: int = dist.get_world_size(self.group)

    def begin(self, turn: Turn, collectives: int | None = None) -> None:
        """A message begins, which passes its turn on after so many collectives; None: it does so itself."""
        self._turn, self._left = turn, collectives

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Sums ``tensor`` over ranks, in place, and returns it."""
        if self.world == 1:
            return tensor
        if tensor.is_sparse:  # backends gather the values and indices of all ranks
            numel = tensor._values().numel() + tensor._indices().nbytes // tensor.dtype.itemsize
            transfer = Transfer("all_gather", numel, tensor.dtype)
        else:
            transfer = Transfer("all_reduce", tensor.numel(), tensor.dtype)
        self._run(transfer, lambda: dist.all_reduce(tensor, op=op, group=self.group))
        return tensor

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """``out[i]`` becomes the tensor of rank ``i``."""
        if self.world == 1:
            out.view(-1).copy_(tensor.view(-1))
            return
        transfer = Transfer("all_gather", tensor.numel(), tensor.dtype)
        if tensor.device.type == "cpu":
            self._run(transfer, lambda: self._pairwise([tensor.view(-1)] * self.world, self._parts(out)))
        else:
            self._run(transfer, lambda: _all_gather_single(out.view(-1), tensor.view(-1), group=self.group))

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """``out[i]`` becomes ``tensor[this rank]`` of rank ``i``; both are ``[world, ...]``."""
        if self.world == 1:
            out.view(-1).copy_(tensor.view(-1))
            return
        transfer = Transfer("all_to_all", tensor.numel(), tensor.dtype)
        if tensor.device.type == "cpu":
            self._run(transfer, lambda: self._pairwise(self._parts(tensor), self._parts(out)))
        else:
            self._run(transfer, lambda: dist.all_to_all_single(out.view(-1), tensor.view(-1), group=self.group))

    def exchange_with(self, peer: int, out: Tensor, tensor: Tensor) -> None:
        """``tensor`` goes to rank ``peer`` and ``out`` becomes what it sent; both ranks call it with the same size."""
        transfer = Transfer("exchange", tensor.numel(), tensor.dtype)
        if tensor.device.type == "cpu":
            self._run(transfer, lambda: self._in_pieces([(peer, tensor.view(-1), peer, out.view(-1))]))
        else:
            both = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer)]
            both.append(dist.P2POp(dist.irecv, out, group=self.group, group_peer=peer))
            self._run(transfer, lambda: [work.wait() for work in dist.batch_isend_irecv(both)])

    def blank(self, transfer: Transfer, device: torch.device) -> None:
        """Takes part in a collective with zeros, for peers that wait for it."""
        tensor = torch.zeros(transfer.numel, dtype=transfer.dtype, device=device)
        if transfer.op == "all_reduce":
            self.all_reduce(tensor)
        elif transfer.op == "all_gather":
            self.all_gather(tensor.new_empty(self.world, transfer.numel), tensor)
        else:
            self.all_to_all(torch.empty_like(tensor), tensor)

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self.world, -1))

    def _pairwise(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """``sends[i]`` goes to rank ``i`` and ``receives[i]`` is filled by it, in pieces."""
        receives[self.rank].copy_(sends[self.rank])
        legs = []
        for distance in range(1, self.world):
            to, source = (self.rank + distance) % self.world, (self.rank - distance) % self.world
            legs.append((to, sends[to], source, receives[source]))
        self._in_pieces(legs)

    def _in_pieces(self, legs: Sequence[tuple[int, Tensor, int, Tensor]]) -> None:
        """Each leg: the rank that a tensor goes to, and the rank that fills another one of the same size."""
        flight: deque[list[dist.Work | None]] = deque()
        for to, send, source, receive in legs:
            for outgoing, incoming in zip(self._pieces(send), self._pieces(receive), strict=True):
                flight.append(
                    [
                        dist.isend(outgoing, group=self.group, group_dst=to),
                        dist.irecv(incoming, group=self.group, group_src=source),
                    ]
                )
                if len(flight) == IN_FLIGHT:
                    _wait(flight.popleft())
        for pair in flight:
            _wait(pair)

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(torch.uint8).split(self.piece))

    def _run(self, transfer: Transfer, collective: Callable[[], Any]) -> None:
        start = time.perf_counter()
        if self._turn is not None:
            self._turn.take()
            start, asked = time.perf_counter(), start
            self.waited += start - asked
        try:
            collective()
        except RuntimeError as error:
            raise WireError(f"{transfer.op} on rank {self.rank}: {error}") from error
        self.seconds += time.perf_counter() - start
        self.bytes_sent += transfer.sent(self.world)
        self.finished += 1
        if self._turn is not None and self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._turn.give()


def _wait(pair: "list[dist.Work | None]") -> None:
    for work in pair:
        if work is not None:
            work.wait()
