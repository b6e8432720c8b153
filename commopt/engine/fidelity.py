"""How much of the true mean gradient arrives, over a window of steps and on a sample of coordinates.

One step says little: with error feedback a single step of 1 % top-k points elsewhere (cosine 0.3) and still trains, and
without it points better (0.8) and does not. The sums over a window tell the two apart. The true sum is linear in the
ranks' contributions, so that it takes one small all-reduce a window and none a step.

The cosine is what SGD would feel; large coordinates dominate it. Adam moves each coordinate by about its sign (Balles
and Hennig 2018), and feels the sign agreement, in which all coordinates count alike.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.collectives.wire import Wire

WINDOW = 50  # steps
LEAST = WINDOW // 2  # of a window that says something
COORDINATES = 4096  # of the whole model

Names = tuple[str, ...]


class Fidelity:
    """Sums of what was contributed and of what was delivered, of one rank.

    Args:
        numel: elements of the whole model.
    """

    def __init__(self, numel: int) -> None:
        self._rate = COORDINATES / max(numel, 1)
        self._places: dict[Names, Tensor] = {}
        self._sums: dict[Names, Tensor] = {}  # [2, places]: contributed by this rank, delivered to all
        self._staged: dict[int, tuple[Names, Tensor]] = {}
        self._steps = 0  # that were taken since the window began

    def sample(self, names: Sequence[str], buffer: Tensor) -> Tensor:
        """The elements of a flat ``buffer`` that are watched, float32: the same places on all ranks."""
        key = tuple(names)
        places = self._places.get(key)
        if places is None:
            seed = zlib.crc32("\n".join(key).encode())
            count = max(1, min(buffer.numel(), round(buffer.numel() * self._rate)))
            draw = torch.randint(buffer.numel(), (count,), generator=torch.Generator().manual_seed(seed))
            places = self._places[key] = draw.to(buffer.device)
        return buffer.view(-1)[places].float()

    def stage(self, index: int, names: Sequence[str], contributed: Tensor, delivered: Tensor) -> None:
        """Samples of one bucket, without the loss scale; ``contributed`` is this rank's share of the mean."""
        self._staged[index] = tuple(names), torch.stack([contributed, delivered])

    def commit(self) -> None:
        """The step that was staged is taken."""
        for _, (key, pair) in sorted(self._staged.items()):  # the same order on all ranks, whichever was done first
            known = self._sums.get(key)
            self._sums[key] = pair if known is None else known.add_(pair)
        self._steps += bool(self._staged)
        self._staged.clear()

    def discard(self) -> None:
        """The step that was staged never happened."""
        self._staged.clear()

    def measure(self, wire: Wire) -> tuple[float, float] | None:
        """Ends the window, on all ranks. None where it is short, because it began late or few steps were taken.

        Returns:
            the cosine between the delivered and the true sum, and their sign agreement: the mean product of their
            signs, 1 where all coordinates move as they should and 0 where nothing of them arrives.
        """
        sums, steps = list(self._sums.values()), self._steps
        self._sums, self._steps = {}, 0
        if steps < LEAST:
            return None
        contributed, delivered = torch.cat(sums, dim=1)
        true = wire.all_reduce(contributed.contiguous())
        scale = true.norm() * delivered.norm()
        cosine = torch.where(scale > 0, torch.dot(true, delivered) / scale, torch.ones_like(scale))
        seen = true != 0
        agreement = (true.sign() * delivered.sign()).sum() / seen.sum().clamp(min=1)
        agreement = torch.where(seen.any(), agreement, torch.ones_like(agreement))
        # Ranks of different makes round differently; what is decided from this must not.
        cosine, agreement = wire.all_reduce(torch.stack([cosine, agreement]), op=dist.ReduceOp.MAX).tolist()
        return cosine, agreement

    def reset(self) -> None:
        """Begins a new window."""
        self._sums.clear()
        self._staged.clear()
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The sums so far."""
        return {"steps": self._steps, "sums": [[list(key), pair] for key, pair in self._sums.items()]}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Goes on with sums that ``state_dict`` gave."""
        self.reset()
        self._steps = state["steps"]
        self._sums = {tuple(names): pair.to(device, copy=True) for names, pair in state["sums"]}
