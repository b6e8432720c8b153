"""How the tensors of one message lie in rows. Rows never straddle tensors; see ``compressors/contract.py`` for why."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Layout:
    """Tensors by name in a ``[rows, block]`` buffer, each starting at a row of its own.

    Args:
        names: one name a tensor; residuals and warm starts are kept under it.
        shapes: one shape a tensor.
        block: elements a row.
        multiple: pad the number of rows to a multiple of this (the world size, where rows are dealt out to ranks).
    """

    def __init__(self, names: Sequence[str], shapes: Sequence[torch.Size], block: int, multiple: int = 1) -> None:
        assert len(names) == len(shapes)
        self.names = tuple(names)
        self.shapes = tuple(shapes)
        self.numels = tuple(shape.numel() for shape in shapes)
        self.block = block
        self.starts: list[int] = []
        rows = 0
        for numel in self.numels:
            self.starts.append(rows * block)
            rows += -(-numel // block)
        self.rows = -(-rows // multiple) * multiple
        self.numel = sum(self.numels)

    @property
    def padded(self) -> bool:
        """Whether any row holds elements that belong to no tensor."""
        return self.rows * self.block != self.numel

    def views(self, rows: Tensor) -> list[Tensor]:
        """The tensors, each in its shape, inside a ``[rows, block]`` buffer."""
        flat = rows.view(-1)
        spans = zip(self.starts, self.numels, self.shapes, strict=True)
        return [flat[start : start + numel].view(shape) for start, numel, shape in spans]

    def zero_padding(self, rows: Tensor) -> None:
        """Clears what belongs to no tensor."""
        if self.padded:
            flat = rows.view(-1)
            for stop, start in self._gaps():
                flat[stop:start].zero_()

    def _gaps(self) -> Iterator[tuple[int, int]]:
        ends = [start + numel for start, numel in zip(self.starts, self.numels, strict=True)]
        for end, following in zip(ends, [*self.starts[1:], self.rows * self.block], strict=True):
            if end != following:
                yield end, following
