"""What can be compared: plain DDP, torch's own communication hooks, every compressor of commopt, and no communication.

A variant is written ``name`` or ``name:option=value,option=value``: ``ddp``, ``nocomm``, ``torch:fp16``, ``int8``,
``powersgd:rank=4``, ``topk:density=0.01,error_feedback=false``, ``auto``, ``auto:quality=aggressive``.
"""

import argparse
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from commopt.compressors import RowCompressor
from commopt.compressors.lowrank import PowerSGD
from commopt.compressors.sparse import RandomK, Sparse
from commopt.plan import Plan
from recipes.gpt.train import parse_option

TIMEOUT = timedelta(seconds=60)  # of a collective: a benchmark that hangs should say so soon
TORCH_RANK = 4  # of torch's PowerSGD
WARM_UP = 4  # steps until every variant runs as it will: DDP rebuilds its buckets, torch's PowerSGD starts at the third
AUTO_WARM_UP = 36  # until a policy has used the plans of the warm-up, then its own, and looked at it once


def _torch_bf16(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Under a name of our own: DDP refuses torch's by its name where there is no NCCL, though gloo carries bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


_TORCH_HOOKS: dict[str, Callable[[Any, GradBucket], Future[Tensor]]] = {
    "torch:allreduce": default_hooks.allreduce_hook,  # what DDP does without a hook: what having one costs
    "torch:fp16": default_hooks.fp16_compress_hook,
    "torch:bf16": _torch_bf16,
    "torch:powersgd": powerSGD_hook,
}


@dataclass(frozen=True)
class Wrapped:
    """A model under DDP, ready to train; ``handle`` is commopt's, None for plain DDP and torch's hooks."""

    ddp: DDP
    handle: commopt.Handle | None = None
    communicates: bool = True

    def step_context(self) -> AbstractContextManager[None]:
        """Wraps forward and backward."""
        return nullcontext() if self.communicates else self.ddp.no_sync()


@dataclass(frozen=True, repr=False)
class Variant:
    """One way to exchange gradients."""

    spec: str
    config: commopt.CommOptConfig | None  # None for what is not commopt's

    def __repr__(self) -> str:
        return self.spec

    @property
    def warm_up(self) -> int:
        """Steps until it runs as it will."""
        return AUTO_WARM_UP if self.config is not None and self.config.automatic else WARM_UP

    @classmethod
    def parse(cls, spec: str) -> "Variant":
        """Raises ``argparse.ArgumentTypeError`` for what does not exist: it is the type of an argument."""
        if spec in ("ddp", "nocomm", *_TORCH_HOOKS):
            return cls(spec, None)
        name, _, listed = spec.partition(":")
        if name == "torch":
            raise argparse.ArgumentTypeError(f"unknown hook {spec!r}; valid: {', '.join(_TORCH_HOOKS)}")
        options = dict(parse_option(part) for part in listed.split(",")) if listed else {}
        feedback, quality = options.pop("error_feedback", None), options.pop("quality", "safe")
        try:
            config = commopt.CommOptConfig(name, options, feedback, TIMEOUT.total_seconds(), quality=quality)
            Plan.from_config(config)
            return cls(spec, config)
        except commopt.ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    def wrap(self, model: nn.Module, bucket_cap_mb: float | None = None) -> Wrapped:
        """The model under DDP, with the hook of this variant; for variants other than nocomm, ranks start out equal.

        ``bucket_cap_mb`` is DDP's; None is torch's default.
        """
        if (config := self.config) is not None:
            ddp = DDP(model, bucket_cap_mb=bucket_cap_mb)
            return Wrapped(ddp, commopt.Handle(ddp, config))
        if self.spec in ("ddp", "nocomm"):
            return Wrapped(DDP(model, bucket_cap_mb=bucket_cap_mb), communicates=self.spec == "ddp")
        state = None
        if self.spec == "torch:powersgd":
            state = PowerSGDState(None, matrix_approximation_rank=TORCH_RANK, start_powerSGD_iter=2)
            bucket_cap_mb = 4096.0  # one bucket: on gloo this hook hangs with more
        ddp = DDP(model, bucket_cap_mb=bucket_cap_mb)
        ddp.register_comm_hook(state, _TORCH_HOOKS[self.spec])
        return Wrapped(ddp)

    def wire_bytes(self, shapes: Iterable[torch.Size], world: int) -> float | None:
        """Bytes that a rank sends in one step of float32 gradients, by the formula for this variant's exchange; None
        where measurements decide on it.

        A ring all-reduce sends 2 (world - 1) / world times the payload, and so do two shots of a payload that does not
        sum. Gathering sends it world - 1 times.
        """
        ring, shapes = 2 * (world - 1) / world, list(shapes)
        elements = sum(shape.numel() for shape in shapes)
        per_element = {"ddp": 4.0, "nocomm": 0.0, "torch:allreduce": 4.0, "torch:fp16": 2.0, "torch:bf16": 2.0}
        if self.spec in per_element:
            return ring * per_element[self.spec] * elements
        if self.spec == "torch:powersgd":
            return ring * 4 * sum(_factor_elements(shape, TORCH_RANK) for shape in shapes)

        assert self.config is not None
        if self.config.automatic:
            return None
        compressor = commopt.compressors.create(self.config.compressor, **self.config.options)
        if isinstance(compressor, PowerSGD):
            return ring * 4 * sum(_factor_elements(shape, compressor.rank) for shape in shapes)
        assert isinstance(compressor, RowCompressor)
        rows = sum(-(-shape.numel() // compressor.block) for shape in shapes)  # a row never holds parts of two tensors
        gathered = isinstance(compressor, Sparse) and world * compressor.density <= 0.1
        return (world - 1 if gathered else ring) * rows * _row_bytes(compressor)


def _row_bytes(compressor: RowCompressor) -> float:
    """Payload of ``block`` elements."""
    if isinstance(compressor, Sparse):
        return (4 + 2) * compressor.density * compressor.block  # a value and its 16-bit position
    if isinstance(compressor, RandomK):
        return 4
    bits = {
        "none": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "int3": 3, "int2": 2, "onebit": 1,
    }[compressor.name]  # fmt: skip
    scale = 0 if bits > 8 else 2 if bits in (2, 3) else 4
    return compressor.block * bits / 8 + scale


def _factor_elements(shape: torch.Size, rank: int) -> int:
    """What PowerSGD sends of an [m, k] matrix: two factors, or all of it if these would not take less than half."""
    m, k = (shape[0], shape.numel() // shape[0]) if len(shape) > 1 else (1, shape.numel())
    return rank * (m + k) if 2 * rank * (m + k) < m * k else m * k
