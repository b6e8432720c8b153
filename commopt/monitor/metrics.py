"""What communication costs, as a torchmetrics metric that reduces over ranks."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from commopt.monitor.summary import Totals, Window
from commopt.records import Event, StepRecord


def tracked(window: Window, events: Sequence[Event], device: torch.device) -> dict[str, float]:
    """What trackers are told of a window, by name: what `CommunicationMetrics` gives, over all ranks; what this rank
    saw last of ``cosine``, ``sign_agreement`` and ``residual_ratio``; and how many ``events`` and ``roll_backs`` there
    were so far. What is not known is left out. Call it on all ranks: values are gathered on ``device``."""
    metrics = CommunicationMetrics().to(device)
    metrics.update(window)
    values = {name: value.item() for name, value in metrics.compute().items() if not value.isnan()}
    counts = {"events": len(events), "roll_backs": sum(event.action == "roll_back" for event in events)}
    latest = {name: getattr(window, name) for name in ("cosine", "sign_agreement", "residual_ratio")}
    return values | {name: float(value) for name, value in (counts | latest).items() if value is not None}


class CommunicationMetrics(Metric):
    """Means of what a step costs, over the steps and ranks that were given. Its one state is a float64 vector of sums,
    so that a sync is one gather.

    ``compute`` gives scalars, float32, by name, with the meaning that they have in ``Window``: ``ratio``,
    ``exposed_share``, ``compression_ratio``, ``throughput`` (of all ranks; NaN where nobody counts samples),
    ``step_seconds``, ``exposed_seconds``, ``wire_seconds``, ``codec_seconds``, ``bytes_sent``.

    Args:
        kwargs: those of ``torchmetrics.Metric``.

    >>> from commopt.records import Event, StepRecord
    >>> metrics = CommunicationMetrics()
    >>> metrics.update(
    ...     StepRecord(
    ...         step=0, plan="int8", finite=True, out_of_memory=False, loss=2.5, gradient_norm=1.0,
    ...         step_seconds=0.5, exposed_seconds=0.125, wire_seconds=0.25, codec_seconds=0.0625,
    ...         bytes_sent=1e6, bytes_uncompressed=4e6, samples=32.0,
    ...     )
    ... )
    >>> {name: round(value.item(), 3) for name, value in metrics.compute().items() if "seconds" not in name}
    {'ratio': 0.667, 'exposed_share': 0.25, 'compression_ratio': 4.0, 'throughput': 64.0, 'bytes_sent': 1000000.0}
    """

    is_differentiable = False
    full_state_update = False

    sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(len(fields(Totals)), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, part: StepRecord | Window) -> None:
        """Counts a step of this rank, or a window of steps."""
        if isinstance(part, Window):
            totals = part.totals(self._world())
        else:
            totals = Totals()
            totals.add(part, self._world())
        self.sums += torch.tensor(astuple(totals), dtype=self.sums.dtype, device=self.sums.device)

    def compute(self) -> dict[str, Tensor]:
        """Over all steps since the last reset, and over all ranks."""
        totals = Totals(*self.sums.tolist())
        steps = totals.steps or 1.0
        values = {
            "ratio": totals.ratio,
            "exposed_share": totals.exposed_share,
            "compression_ratio": totals.compression_ratio,
            "throughput": float("nan") if totals.throughput is None else totals.throughput,
            "step_seconds": totals.step_seconds / steps,
            "exposed_seconds": totals.exposed_seconds / steps,
            "wire_seconds": totals.wire_seconds / steps,
            "codec_seconds": totals.codec_seconds / steps,
            "bytes_sent": totals.bytes_sent / steps,
        }
        return {name: torch.tensor(value, device=self.sums.device) for name, value in values.items()}

    def _world(self) -> int:
        return dist.get_world_size(self.process_group) if dist.is_available() and dist.is_initialized() else 1
