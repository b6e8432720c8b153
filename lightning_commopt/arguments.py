"""What all strategies share, for the Trainer and for Fabric: their arguments, their names, and the user's switch."""

import inspect
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Optional, TypeVar, get_type_hints

from torch.nn.parallel import DistributedDataParallel

from commopt import CommOptConfig, ConfigError, Handle
from commopt.compressors import Compressor, available, create
from commopt.config import BUCKET_CAP_MB, Quality
from commopt.errors import unknown

BY_LIGHTNING = {"module", "device_ids"}  # arguments of DDP that the strategy itself passes
OF_OTHER_HOOKS = {"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision"}

S = TypeVar("S", bound="type[Compressing]")


class Compressing:
    """Mixin before a ``DDPStrategy`` that has compressed gradients.

    Args:
        compressor: a registered name, see ``commopt.compressors.available()``, or ``"auto"``, see ``commopt.attach``.
        error_feedback: keep what compression lost for the next step; ``None`` follows the compressor's guarantee.
        checked: compare a checksum of the mean gradient over ranks, see ``commopt.attach``.
        quality: what ``"auto"`` may choose, see ``commopt.attach``.
        block: elements that share a scale (``"int8"`` and others like it), or from which some are taken (``"topk"``).
            This and what follows are options of compressors; None counts as not given.
        density: share of the elements that travel, above 0 and up to 1, of ``"topk"``, ``"threshold"``, ``"randomk"``.
        hadamard: whether ``"int4"`` rotates a block before it rounds.
        rank: of ``"powersgd"``.
        stochastic: whether ``"int8"`` and ``"int4"`` round at random, so that errors are zero in the mean.
        kwargs: other options, arguments of ``DDPStrategy`` (``process_group_backend="gloo"``; ``timeout`` holds for the
            compressed exchange too) and of torch's DDP (``find_unused_parameters=True``).

    Raises:
        ConfigError: an unknown argument or compressor (the nearest valid one is named), a value out of range, or a
            communication hook of one's own.
    """

    strategy_name: ClassVar[str] = "commopt_ddp"
    bucket_cap_mb: ClassVar[float] = BUCKET_CAP_MB

    def __init__(
        self,
        compressor: str = "auto",
        error_feedback: bool | None = None,
        checked: bool = False,
        quality: Quality = "safe",
        **kwargs: Any,
    ) -> None:
        valid = _parameters(base_of(type(self))).keys() | _parameters(DistributedDataParallel).keys()
        self.config, arguments = _separate(
            CommOptConfig(compressor, {}, error_feedback, checked=checked, quality=quality), kwargs, valid
        )
        super().__init__(**{"bucket_cap_mb": self.bucket_cap_mb, **arguments})
        self._compress = True

    def disable_compression(self) -> None:
        """Sends gradients uncompressed, on all ranks from the same step on (see ``commopt.Handle.disable``). One rank's
        word is enough, and holds for what is trained later."""
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

    def _handles(self) -> list[Handle]:
        """Of the models in training."""
        raise NotImplementedError

    def _attach(self, model: DistributedDataParallel, scaler: Any) -> Handle:
        handle = Handle(model, self.config, scaler)
        if not self._compress:
            handle.disable()
        return handle

    def _switch(self, compress: bool) -> None:
        self._compress = compress
        for handle in self._handles():
            (handle.enable if compress else handle.disable)()


def spelled_out(cls: S) -> S:
    """Class decorator: gives the constructor a signature with all that ``kwargs`` may hold, for tools that read it.
    By jsonargparse, LightningCLI finds and explains arguments in YAML."""

    inherited = cls.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        inherited(self, *args, **kwargs)

    def keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    own = inspect.signature(Compressing.__init__).parameters
    options = {name: keyword(name, None, Optional[kind]) for name, kind in _options().items()}  # noqa: UP045  # no class
    others = _parameters(DistributedDataParallel) | _parameters(base_of(cls))
    others = {name: keyword(name, p.default, p.annotation) for name, p in others.items() if name not in OF_OTHER_HOOKS}
    others["bucket_cap_mb"] = keyword("bucket_cap_mb", cls.bucket_cap_mb, float)
    named = [p for p in own.values() if p.kind is not p.VAR_KEYWORD]
    signature = inspect.Signature([*named, *options.values(), *others.values()])
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    __init__.__doc__ = inspect.getdoc(Compressing)
    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def base_of(cls: type) -> type:
    """Lightning's ``DDPStrategy`` that ``cls`` is made of."""
    return next(base for base in cls.__mro__ if base.__name__ == "DDPStrategy")


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Those of the constructor that a user can give, with their types."""
    types = get_type_hints(cls.__init__)  # type: ignore[misc]
    given = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return {
        p.name: p.replace(annotation=types.get(p.name, p.annotation))
        for p in given
        if p.kind is not p.VAR_KEYWORD and p.name not in BY_LIGHTNING
    }


def _options() -> dict[str, Any]:
    """The options of all compressors that are loaded, and their types."""
    found: dict[str, Any] = {}
    kinds: list[type] = [Compressor]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if is_dataclass(kind):
            found |= {entry.name: entry.type for entry in fields(kind) if entry.init}
    return found


def _separate(config: CommOptConfig, given: dict[str, Any], valid: set[str]) -> tuple[CommOptConfig, dict[str, Any]]:
    """The configuration of the exchange, with what is for it; and the arguments that are Lightning's and torch's."""
    automatic = config.automatic
    given = {key: value for key, value in given.items() if value is not None or key not in _options()}
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
