"""One step of the exchange: what is gathered while it runs, what the vote says, and what remains to be told."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commopt.engine.ballot import Failure, Result
from commopt.engine.fidelity import WINDOW
from commopt.errors import CommOptError
from commopt.messages import Arrival, Bucket, Message


@dataclass(frozen=True)
class Stats:
    """Totals since the start, of this rank.

    ``bytes_sent`` is what was handed to the collectives, ``bytes_uncompressed`` what plain DDP would have handed to a
    ring all-reduce. On CUDA the seconds are those of enqueueing.
    """

    steps: int = 0
    skipped_steps: int = 0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    wire_seconds: float = 0.0
    codec_seconds: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """Uncompressed over sent bytes; 1 before anything was sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0


@dataclass
class Step:
    """What is known of the step under way, on this rank until the vote and on all after it."""

    number: int
    layout: list[list[str]] = field(default_factory=list)  # names a message
    arrivals: list[tuple[Arrival, Any]] = field(default_factory=list)  # and when
    norms: dict[int, tuple[Bucket, Tensor]] = field(default_factory=dict)  # by index of the bucket
    checksums: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)  # of residuals and contributions, where they are measured
    idle: bool = False  # whether a parameter took no part, so that its residual stays
    failure: tuple[Message, BaseException] | None = None
    error: CommOptError | None = None
    warm: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    exposed: float = 0.0
    span: float = 0.0
    looked: float = 0.0  # seconds that were spent on the choice of a plan
    result: Result | None = None
    fidelity: tuple[float, float] | None = None  # cosine and sign agreement
    ended: bool = False
    taken: bool = False

    def fail(self, message: Message, error: BaseException) -> None:
        """This rank could not exchange a message; the first such error counts."""
        self.failure = self.failure or (message, error)

    @property
    def norm(self) -> Tensor | None:
        """Of the mean gradient; None where nothing was delivered."""
        norms = [self.norms[index][1] for index in sorted(self.norms)]  # their sum has the same bits in each run
        return torch.stack(norms).norm() if norms else None

    @property
    def closes_window(self) -> bool:
        """Whether fidelity is measured in this step."""
        return self.number % WINDOW == WINDOW - 1

    def residual_ratio(self) -> float | None:
        """Norm of what is kept over the norm of what was contributed; None where it was not measured."""
        if not self.squares:
            return None
        residual, contribution = torch.stack(self.squares).sum(0).sqrt().tolist()
        return residual / contribution if contribution else None

    def unusable(self, name: str) -> str:
        """Why a step with the compressor ``name`` is not taken; empty if it is. All ranks find the same."""
        result = self.result
        assert result is not None
        if result.failure is Failure.OUT_OF_MEMORY:
            return (
                f"{name!r} ran out of memory on a rank in step {self.number}. The step was skipped on all ranks, and "
                "gradients travel uncompressed from the next one on. Smaller buckets need less memory."
            )
        if result.disputed:
            return (
                f"the checksum of the mean gradient differs between ranks in step {self.number}, so that something was "
                "damaged on its way. The step was skipped on all ranks. If it happens again: look at the memory and "
                "the network card of the hosts."
            )
        if result.finite:
            return ""
        where = next((bucket for bucket, norm in self.norms.values() if not bool(norm.isfinite())), "another rank")
        return (
            f"the mean gradient was not finite after {name!r} in step {self.number}, first in {where}. All ranks skip "
            "such steps and keep their residuals. If it happens often: a smaller learning rate, or 'bf16' or 'int8' "
            "where 'fp16' overflows."
        )


def norm(tensor: Tensor) -> Tensor:
    """The L2 norm, float32, on the tensor's device and without waiting for it; not finite where an element is not."""
    values = tensor._values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.is_floating_point() else values.float()
    length: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return length.float()


def checksum(tensor: Tensor) -> Tensor:
    """An int64 scalar that another value of any one bit changes."""
    values = (tensor._values() if tensor.is_sparse else tensor).reshape(-1)
    return values.view(torch.uint8 if values.nbytes % 4 else torch.int32).sum(dtype=torch.int64)


def kind_of(failure: tuple[Message, BaseException] | None) -> Failure:
    """Whether it was for lack of memory, which torch on the CPU says in words only."""
    if failure is None:
        return Failure.NONE
    error = failure[1]
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
    return Failure.OUT_OF_MEMORY if no_memory else Failure.ERROR
