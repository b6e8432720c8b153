"""Fast distributed PyTorch training on the networks that people really have."""

from commopt import compressors
from commopt.collectives import all_gather, all_reduce, reduce_scatter
from commopt.config import CommOptConfig
from commopt.errors import (
    AttachError,
    CommOptError,
    CommOptWarning,
    ConfigError,
    ExchangeError,
    MismatchError,
    UnsupportedError,
)
from commopt.hooks.ddp import Handle, attach
from commopt.step import Stats

__all__ = [
    "AttachError",
    "CommOptConfig",
    "CommOptError",
    "CommOptWarning",
    "ConfigError",
    "ExchangeError",
    "Handle",
    "MismatchError",
    "Stats",
    "UnsupportedError",
    "all_gather",
    "all_reduce",
    "attach",
    "compressors",
    "reduce_scatter",
]
