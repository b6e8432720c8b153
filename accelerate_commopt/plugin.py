"""What Accelerate asks while it wraps a model: the arguments of DDP, and the communication hook."""

import functools
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import ref

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DistributedDataParallelKwargs  # type: ignore[import-untyped]
from torch.nn.parallel import DistributedDataParallel

from commopt import AttachError, CommOptConfig, Handle
from commopt.config import BUCKET_CAP_MB
from commopt.plan import Plan

_TORCH_BUCKET_CAP_MB = DistributedDataParallelKwargs.bucket_cap_mb


class CommOptPlugin(DistributedDataParallelKwargs):  # type: ignore[misc]
    """Takes the place of ``accelerator.ddp_handler``, and attaches commopt to each model that is prepared from then on.
    `attach` makes one; used alone, nothing watches the training.

        accelerator.ddp_handler = CommOptPlugin(CommOptConfig("int8"))

    Args:
        config: what to do with the gradients.
        given: the user's own arguments for DDP, which are kept. ``bucket_cap_mb`` becomes 3 where it is torch's 25.
        accelerator: whose gradient scaler residuals follow; and models which it has let go of are let go of here.

    Raises:
        ConfigError: an unknown compressor or option, or a value out of range.
        AttachError: ``given`` has a communication hook.
    """

    def __init__(
        self,
        config: CommOptConfig | None = None,
        given: DistributedDataParallelKwargs | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        given = given or DistributedDataParallelKwargs()
        hook = str(given.comm_hook)
        if hook != "no":
            raise AttachError(
                f"DistributedDataParallelKwargs(comm_hook={hook!r}) and commopt both want DDP's communication hook, "
                "and DDP takes one. Leave comm_hook out, and choose compressor='fp16', 'bf16' or 'powersgd' here for "
                "the same compression."
            )
        super().__init__(**{entry.name: getattr(given, entry.name) for entry in fields(given)})
        chosen = given.bucket_cap_mb != _TORCH_BUCKET_CAP_MB
        self.bucket_cap_mb = given.bucket_cap_mb if chosen else BUCKET_CAP_MB
        self.config = config or CommOptConfig()
        Plan.from_config(self.config)  # for names and the range of values, before anything is wrapped
        self.given = given
        self.compress = True
        self.attached: Callable[[torch.nn.Module, Handle], None] = lambda module, handle: None  # told of each
        self._accelerator: Callable[[], Accelerator | None] = ref(accelerator) if accelerator else lambda: None
        self._models: list[tuple[ref[torch.nn.Module], Handle]] = []

    @property
    def models(self) -> list[tuple[torch.nn.Module, Handle]]:
        """The models within DDP that were prepared and are in use, and their handles."""
        return [(module, handle) for reference, handle in self._models if (module := reference()) is not None]

    @property
    def handles(self) -> list[Handle]:
        """Those of all models that were prepared and not given up."""
        return [handle for _, handle in self._models]

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP that are not torch's own."""
        names = {entry.name for entry in fields(DistributedDataParallelKwargs)}
        plain = DistributedDataParallelKwargs(**{name: getattr(self, name) for name in names})
        return {"bucket_cap_mb": self.bucket_cap_mb, **plain.to_kwargs()}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attaches commopt to ``model``. Accelerate calls it on every rank.

        Raises:
            AttachError: its hook is taken.
            MismatchError: ranks disagree; raised on every rank.
        """
        accelerator = self._accelerator()
        used = None if accelerator is None else [id(module) for module in accelerator._models]
        # Held are neither DDP models nor those within: torch ends the hooks of a DDP model with its last reference, and
        # a model that is wrapped anew would meet them. Whether one is gone is never asked: ranks would differ in it.
        for entry in list(self._models):
            reference, handle = entry
            module = reference()
            if module is None or module is model.module or (used is not None and id(module) not in used):
                handle.close()
                self._models.remove(entry)
        handle = Handle(model, self.config, accelerator.scaler if accelerator is not None else None)
        if not self.compress:
            handle.disable()
        self.attached(model.module, handle)
        self._models.append((ref(model.module), handle))


def install(config: CommOptConfig) -> None:
    """Makes every ``Accelerator`` that is made afterwards in this process use commopt with ``config``, and with it
    every Hugging Face Trainer. Called again, another ``config`` holds for those that are made after that."""
    global _installed
    first, _installed = _installed is None, config
    if not first:
        return
    make = Accelerator.__init__

    @functools.wraps(make)
    def __init__(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        from accelerate_commopt.attach import attach_with

        make(self, *args, **kwargs)
        assert _installed is not None
        attach_with(self, _installed)
        # A Trainer makes its Accelerator before it trains, so that this is early enough for it, and a program that does
        # not use transformers never imports it.
        if "transformers.trainer" in sys.modules:
            from accelerate_commopt.trainer import adopt_all

            adopt_all()

    Accelerator.__init__ = __init__


_installed: CommOptConfig | None = None
