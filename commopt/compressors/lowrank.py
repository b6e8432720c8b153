"""PowerSGD: low-rank factors of matrices, whose payloads sum (Vogels et al. 2019, algorithms 1 and 2)."""

import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.compressors.contract import Contraction, RoundsCompressor, Sum, generator, option
from commopt.compressors.registry import register
from commopt.layout import Layout


@register("powersgd")
@dataclass(frozen=True)
class PowerSGD(RoundsCompressor):
    """One step of subspace iteration a training step, warm-started from the last one; factors are float32.

    A tensor of shape ``[m, ...]`` is seen as an ``[m, k]`` matrix. Tensors whose two factors would take more than half
    of their bytes, vectors among them, travel uncompressed beside the first factors.
    """

    rank: int = option(4, 1, 1024)

    @property
    def guarantee(self) -> Contraction:
        return Contraction(0.0)  # a projection; how much it keeps is up to the spectrum

    def payload_sizes(self, layout: Layout) -> tuple[int, ...]:
        first = second = 0
        for shape, numel in zip(layout.shapes, layout.numels, strict=True):
            if self._factored(shape):
                first += shape[0] * self.rank
                second += numel // shape[0] * self.rank
            else:
                first += numel
        return (first, second)

    def reduce(
        self, x: Tensor, out: Tensor, layout: Layout, warm: MutableMapping[str, Tensor], seed: int, all_reduce: Sum
    ) -> None:
        tensors = list(zip(layout.names, layout.views(x), layout.views(out), strict=True))
        factored = [(name, m.view(len(m), -1), o.view(len(o), -1)) for name, m, o in tensors if self._factored(m.shape)]
        whole = [(m.view(-1), o.view(-1)) for _, m, o in tensors if not self._factored(m.shape)]

        payload = x.new_zeros(self.payload_sizes(layout)[0])
        parts = payload.split([len(m) * self.rank for _, m, _ in factored] + [len(m) for m, _ in whole])
        left = [part.view(-1, self.rank) for part in parts[: len(factored)]]
        starts = [warm[name] if name in warm else self._start(name, m) for name, m, _ in factored]
        for p, q, (_, m, _) in zip(left, starts, factored, strict=True):
            torch.mm(m, q, out=p)
        for part, (m, _) in zip(parts[len(factored) :], whole, strict=True):
            part.copy_(m)
        all_reduce(payload)
        for part, (m, o) in zip(parts[len(factored) :], whole, strict=True):
            o.copy_(part)
            m.sub_(m)  # all of it was delivered; unlike zero_() this keeps a NaN visible
        left = [torch.linalg.qr(p).Q for p in left]

        payload = x.new_zeros(self.payload_sizes(layout)[1])
        right = [q.view(-1, self.rank) for q in payload.split([m.shape[1] * self.rank for _, m, _ in factored])]
        for p, q, (_, m, _) in zip(left, right, factored, strict=True):
            torch.mm(m.T, p, out=q)
            m.addmm_(p, q.T, alpha=-1)  # what this rank alone delivers, before the sum
        all_reduce(payload)
        for p, q, start, (name, _, o) in zip(left, right, starts, factored, strict=True):
            torch.mm(p, q.T, out=o)
            # Without the peak, the next product would have the magnitude of a squared gradient. Zeros teach nothing.
            peak = q.abs().amax()
            warm[name] = torch.where(peak > 0, q / peak, start)

    def _factored(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or shape.numel() == 0:
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return 2 * self.rank * (rows + columns) <= rows * columns and self.rank <= min(rows, columns)

    def _start(self, name: str, matrix: Tensor) -> Tensor:
        numbers = generator(zlib.crc32(name.encode()), matrix.device)  # whatever bucket the tensor is in
        return torch.randn(matrix.shape[1], self.rank, generator=numbers, device=matrix.device)
