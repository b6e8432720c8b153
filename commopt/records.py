"""What is known of a step, and what was done about it: plain values that the engine makes and everybody reads."""

from dataclasses import dataclass
from typing import Literal

Action = Literal["skip", "fall_back", "re_arm", "roll_back", "stop", "note"]


@dataclass(frozen=True)
class StepRecord:
    """One step of the exchange, on one rank. Seconds are those of this rank; ``loss``, ``gradient_norm``, ``finite``,
    ``out_of_memory``, ``corrupt``, ``cosine`` and ``sign_agreement`` are the same on all ranks, bit for bit.

    Args:
        step: number of the exchange, from 0; it goes back when training is rolled back.
        plan: name of the compressor that was used, ``"none"`` for none.
        finite: whether the mean gradient was.
        out_of_memory: a codec ran out of memory on some rank; the step is not taken.
        loss: mean over the ranks that told theirs; None where none did.
        gradient_norm: L2 norm of the mean gradient as delivered, before any clipping, without the loss scale.
        step_seconds: from the end of the step before to the end of this one.
        exposed_seconds: what backward waited for after its last gradient was ready.
        wire_seconds: inside collectives, hidden or not.
        codec_seconds: compressing, decompressing and feedback, hidden or not.
        bytes_sent: handed to the collectives, by this rank.
        bytes_uncompressed: what plain DDP would have handed to a ring all-reduce.
        corrupt: in checked mode, whether ranks received different mean gradients; the step is not taken.
        samples: what the trainer counts (samples or tokens) on this rank; None where it does not.
        cosine: between the sums of delivered and of true mean gradients over the window that ends before this step, on
            a sample of coordinates that all ranks share; None within a window.
        sign_agreement: mean over those coordinates of the product of the signs of the two sums; None within a window.
        exchange_seconds: from the first gradient that was ready to the end of the exchange.
        predicted_seconds: what this step was expected to take; None before anything was predicted.
        residual_ratio: norm of this rank's residuals over that of its contribution to the mean; None within a window.
    """

    step: int
    plan: str
    finite: bool
    out_of_memory: bool
    loss: float | None
    gradient_norm: float
    step_seconds: float
    exposed_seconds: float
    wire_seconds: float
    codec_seconds: float
    bytes_sent: float
    bytes_uncompressed: float
    corrupt: bool = False
    samples: float | None = None
    cosine: float | None = None
    sign_agreement: float | None = None
    residual_ratio: float | None = None
    exchange_seconds: float = 0.0
    predicted_seconds: float | None = None

    @property
    def usable(self) -> bool:
        """Whether the mean gradient may be used; where not, the step is not taken."""
        return self.finite and not self.out_of_memory and not self.corrupt

    @property
    def compute_seconds(self) -> float:
        """The step without what it waited for."""
        return max(self.step_seconds - self.exposed_seconds, 0.0)


@dataclass(frozen=True)
class Event:
    """Something that was done to a run, and why.

    Args:
        step: the exchange at whose end it was decided.
        action: what was done.
        reason: in words, with the figures that led to it.
        restored_step: the step that the run went back to, for a roll-back.
    """

    step: int
    action: Action
    reason: str
    restored_step: int | None = None
