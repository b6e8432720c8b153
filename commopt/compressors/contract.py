"""The contract of a compressor, stated once. All registered ones pass ``tests/compressors/test_conformance.py``.

With ``C`` the compressor and ``x`` what one rank contributes (its gradient over the world size, plus its residual):

- **identity**: ``x == C(x) + residual``. The exchange computes the residual so; a compressor only has to be
  deterministic: the same payload decompresses to the same bits on every rank.
- **guarantee**: a declared `Unbiased` or `Contraction`, over the rows or tensors of ``x``.
- **exact size**: the payload's shape and dtype follow from the shape of ``x`` alone, never from its values.
- **zero stays zero**: rows of zeros decompress to zeros.
- **non-finite stays visible**: if ``x`` holds an infinity or a NaN then ``C(x)`` holds one. All ranks then see it in
  the sum and skip the same step.
- **no state**: randomness comes from the ``seed`` argument, memory over steps from the caller.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from commopt.errors import ConfigError, UnsupportedError
from commopt.layout import Layout

CHUNK = 1 << 17  # elements a codec works on at a time on CPU: its temporaries then stay in the second-level cache


@dataclass(frozen=True)
class Unbiased:
    """``E[C(x)] = x`` and ``E||C(x) - x||^2 <= variance * ||x||^2``."""

    variance: float


@dataclass(frozen=True)
class Contraction:
    """``||C(x) - x||^2 <= (1 - delta) * ||x||^2``; ``delta`` 1 is lossless, 0 only promises not to amplify."""

    delta: float


Guarantee = Unbiased | Contraction


def option(default: Any, low: float | None = None, high: float | None = None, multiple: int = 1) -> Any:
    """A dataclass field that is an option of a compressor: an inclusive range, and a whole number's step."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "multiple": multiple})


def generator(seed: int, device: torch.device) -> torch.Generator:
    """A generator on ``device`` that gives the same numbers for the same ``seed``."""
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Compressor(ABC):
    """What a gradient becomes on its way. Subclass `RowCompressor`, or this class for a protocol of several rounds."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            _check(self.name, entry, getattr(self, entry.name))

    @property
    @abstractmethod
    def guarantee(self) -> Guarantee:
        """The declared property, for the options at hand."""

    @property
    def energy_kept(self) -> float:
        """The part of a gradient's energy that one step is sure to deliver, from 0 to 1."""
        return self.guarantee.delta if isinstance(self.guarantee, Contraction) else self.shrinkage

    @property
    def wants_feedback(self) -> bool:
        """Error feedback is on by default where over 1 % of the energy is lost, or a variance exceeds the signal."""
        if isinstance(self.guarantee, Contraction):
            return self.guarantee.delta < 0.99
        return self.guarantee.variance > 1.0

    @property
    def shrinkage(self) -> float:
        """What turns an unbiased compressor into a contraction, ``1 / (1 + variance)``; error feedback needs one."""
        return 1.0 / (1.0 + self.guarantee.variance) if isinstance(self.guarantee, Unbiased) else 1.0


class RowCompressor(Compressor):
    """A compressor of independent rows: ``[rows, block]`` float32 to ``[rows, width]`` of ``payload_dtype`` and back.

    A row never straddles two tensors (the tail of a tensor is padded by zeros), so that the result does not depend
    on how gradients were gathered into buckets. ``summable`` says that payloads may be added while compressed; they
    then travel by all-reduce.
    """

    summable: ClassVar[bool] = False
    payload_dtype: torch.dtype = torch.uint8
    block: int = 1

    @property
    def width(self) -> int:
        """Elements of ``payload_dtype`` a row takes."""
        return 1

    @property
    def row_bytes(self) -> int:
        """Exact size of one row on the wire, in bytes."""
        return self.width * self.payload_dtype.itemsize

    @abstractmethod
    def compress(self, rows: Tensor, seed: int) -> Tensor:
        """``[rows, block]`` float32 to ``[rows, width]`` of ``payload_dtype``."""

    @abstractmethod
    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        """``[rows, width]`` of ``payload_dtype`` to ``[rows, block]`` float32, without any shrinkage.

        ``seed`` is that of `compress` where the compressor is summable, and no other's otherwise: what else is needed
        to decompress has to be in the payload.
        """

    def accumulate(self, payload: Tensor, out: Tensor, seed: int, alpha: float) -> None:
        """``out += alpha * decompress(payload)``, in place. Sparse compressors touch only what they carry."""
        decoded = self.decompress(payload, seed)
        self._expect("decompress", decoded, out)
        out.add_(decoded, alpha=alpha)

    def encode(self, rows: Tensor, payload: Tensor, seed: int) -> None:
        """Compresses into ``payload``, on CPU chunk by chunk so that temporaries stay small and in cache."""
        for index, (source, target) in enumerate(self._chunks(rows, payload)):
            compressed = self.compress(source, _mix(seed, index))
            self._expect("compress", compressed, target)
            target.copy_(compressed)

    def add_decoded(self, payload: Tensor, out: Tensor, seed: int, alpha: float = 1.0) -> None:
        """The inverse of `encode`: ``out += alpha * decoded``."""
        for index, (target, source) in enumerate(self._chunks(out, payload)):
            self.accumulate(source, target, _mix(seed, index), alpha)

    def _expect(self, method: str, result: Tensor, like: Tensor) -> None:
        """Else it would be broadcast or cast to what is expected, without a word."""
        if result.shape != like.shape or result.dtype != like.dtype:
            raise UnsupportedError(
                f"{method} of compressor {self.name!r} must return {list(like.shape)} of {like.dtype}, "
                f"got {list(result.shape)} of {result.dtype}."
            )

    def _chunks(self, rows: Tensor, payload: Tensor) -> list[tuple[Tensor, Tensor]]:
        assert len(rows) == len(payload), (rows.shape, payload.shape)
        step = max(1, CHUNK // self.block) if rows.device.type == "cpu" else max(1, len(rows))
        return list(zip(rows.split(step), payload.split(step), strict=True))


Sum = Callable[[Tensor], Tensor]


class RoundsCompressor(Compressor):
    """A compressor whose payloads sum, in several rounds that depend on each other."""

    @abstractmethod
    def payload_sizes(self, layout: Layout) -> tuple[int, ...]:
        """Float32 elements that each round sends, in order."""

    @abstractmethod
    def reduce(
        self, x: Tensor, out: Tensor, layout: Layout, warm: MutableMapping[str, Tensor], seed: int, all_reduce: Sum
    ) -> None:
        """``out`` becomes the compressed sum over ranks and ``x`` the residual of this rank; both flat float32.

        Args:
            warm: memory over steps by parameter name, the same on all ranks; read and replaced, never changed in place.
            all_reduce: sums a float32 vector over ranks in place; called once for each of `payload_sizes`.
        """


def _mix(seed: int, index: int) -> int:
    return (seed * 0x9E3779B1 + index * 0x85EBCA77) % (1 << 63)


def _check(name: str, entry: "dataclasses.Field[Any]", value: Any) -> None:
    """Options come from YAML and command lines: check type and range here, once for all compressors."""
    low, high = entry.metadata.get("low"), entry.metadata.get("high")
    multiple = entry.metadata.get("multiple", 1)
    if isinstance(entry.default, bool):
        kind, ok = "true or false", isinstance(value, bool)
    elif isinstance(entry.default, float):
        kind, ok = "a number", isinstance(value, (int, float)) and not isinstance(value, bool)
    else:
        kind, ok = "a whole number", isinstance(value, int) and not isinstance(value, bool) and value % multiple == 0
    if ok and (low is None or low <= value) and (high is None or value <= high):
        return
    span = f" from {low:g} to {high:g}" if low is not None and high is not None else ""
    step = f", a multiple of {multiple}" if multiple > 1 else ""
    raise ConfigError(f"option {entry.name!r} of compressor {name!r} must be {kind}{span}{step}, got {value!r}.")
