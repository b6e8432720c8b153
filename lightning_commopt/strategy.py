"""What makes Lightning's DDPStrategy exchange compressed gradients.

`lightning` and `pytorch_lightning` carry the same classes twice and refuse those of the other. The mixin is for both;
the modules ``lightning`` and ``pytorch_lightning`` beside this file each make a strategy of it.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from commopt import CommOptConfig, ConfigError, Handle
from commopt.compressors import available, create
from commopt.config import Quality
from commopt.errors import unknown
from lightning_commopt.supervision import Supervised

BY_LIGHTNING = {"module", "device_ids"}  # arguments of DDP that the strategy itself passes
OF_OTHER_HOOKS = {"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision"}


class CompressedGradients(Supervised):
    """Mixin before a ``DDPStrategy``: attaches commopt to the model that each ``fit`` wraps, on CPU and on CUDA.

    Args:
        compressor: a registered name, see ``commopt.compressors.available()``, or ``"auto"``, see ``commopt.attach``.
        error_feedback: keep what compression lost for the next step; ``None`` follows the compressor's guarantee.
        checked: compare a checksum of the mean gradient over ranks, see ``commopt.attach``.
        quality: what ``"auto"`` may choose, see ``commopt.attach``.
        kwargs: options of the compressor (``rank=4``), arguments of ``DDPStrategy`` (``process_group_backend="gloo"``;
            ``timeout`` holds for the compressed exchange too) and of torch's DDP (``find_unused_parameters=True``).

    Raises:
        ConfigError: an unknown argument or compressor (the nearest valid one is named), a value out of range, or a
            communication hook of one's own.
    """

    strategy_name: ClassVar[str] = "commopt_ddp"
    bucket_cap_mb: ClassVar[float] = 3.0  # where the user gives none: torch's 25 leave the link idle during backward

    def __init__(
        self,
        compressor: str = "auto",
        error_feedback: bool | None = None,
        checked: bool = False,
        quality: Quality = "safe",
        **kwargs: Any,
    ) -> None:
        base = inspect.signature(super(Supervised, self).__init__).parameters.values()
        valid = {p.name for p in base if p.kind is not p.VAR_KEYWORD}
        valid |= inspect.signature(DistributedDataParallel).parameters.keys() - BY_LIGHTNING
        self.config, arguments = _separate(
            CommOptConfig(compressor, {}, error_feedback, checked=checked, quality=quality), kwargs, valid
        )
        super().__init__(**{"bucket_cap_mb": self.bucket_cap_mb, **arguments})
        self._compress = True

    def disable_compression(self) -> None:
        """Sends gradients uncompressed, on all ranks from the same step on (see ``commopt.Handle.disable``). One rank's
        word is enough, and holds in its later fits."""
        self._switch(False)

    def enable_compression(self) -> None:
        """Compresses again."""
        self._switch(True)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Adds ``commopt_ddp``, one name a compressor, and one that finds unused parameters."""
        names: dict[str, dict[str, Any]] = {f"_{name}": {"compressor": name} for name in available()}
        names |= {"": {}, "_find_unused_parameters_true": {"find_unused_parameters": True}}
        for suffix, arguments in names.items():
            described = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            name, description = cls.strategy_name + suffix.lower(), f"DDP with compressed gradients. {described}"
            strategy_registry.register(name, cls, description=description, override=True, **arguments)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates without an exchange. DDP learns a static graph from its first backward, which has to exchange."""
        model, totals = self.model, self.handle and self.handle.stats()
        learns = isinstance(model, DistributedDataParallel) and model.static_graph
        if learns and totals and totals.steps + totals.skipped_steps == 0:
            yield
        else:
            with super().block_backward_sync():
                yield

    def _register_ddp_hooks(self) -> None:  # Lightning's own acts on CUDA only
        assert isinstance(self.model, DistributedDataParallel)
        self.handle = Handle(self.model, self.config, getattr(self.precision_plugin, "scaler", None))
        self.supervisor = None
        if not self._compress:
            self.handle.disable()

    def _switch(self, compress: bool) -> None:
        self._compress = compress
        if self.handle is not None:
            (self.handle.enable if compress else self.handle.disable)()


def _separate(config: CommOptConfig, given: dict[str, Any], valid: set[str]) -> tuple[CommOptConfig, dict[str, Any]]:
    """The configuration of the exchange, with what is for it; and the arguments that are Lightning's and torch's."""
    automatic = config.automatic
    options = set() if automatic else {entry.name for entry in fields(create(config.compressor)) if entry.init}
    for key in given:
        if key in OF_OTHER_HOOKS and given[key] is not None:
            raise ConfigError(
                f"{key} is not for commopt's strategy: DDP takes one communication hook, and here it is commopt's own. "
                "Use Lightning's DDPStrategy for another hook, and Trainer(precision=...) for mixed precision."
            )
        if key not in options | valid:
            raise unknown(
                f"argument of the strategy with {config.compressor!r}:", key, options | valid - OF_OTHER_HOOKS
            )
    timeout = given.get("timeout")
    if timeout is None:
        timeout = timedelta(seconds=config.timeout)
    elif not isinstance(timeout, timedelta):
        raise ConfigError(f"timeout must be a datetime.timedelta here, as in DDPStrategy; got {timeout!r}.")
    chosen = {key: value for key, value in given.items() if key in options}
    if not automatic:
        create(config.compressor, **chosen)  # for the range of values
    config = replace(config, options=chosen, timeout=timeout.total_seconds())
    return config, {key: value for key, value in given.items() if key not in options}
