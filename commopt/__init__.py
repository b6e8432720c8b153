"""Fast distributed PyTorch training on the networks that people really have."""

from commopt import compressors
from commopt.collectives import all_gather, all_reduce, reduce_scatter
from commopt.config import CommOptConfig
from commopt.engine.step import Stats
from commopt.errors import (
    AttachError,
    CheckpointError,
    CommOptError,
    CommOptWarning,
    ConfigError,
    DivergenceError,
    ExchangeError,
    MismatchError,
    UnsupportedError,
)
from commopt.guard import GuardConfig
from commopt.hooks.ddp import Handle, attach
from commopt.monitor import Monitor
from commopt.resume.snapshot import RandomState
from commopt.supervisor import Supervisor

__all__ = [
    "AttachError",
    "CheckpointError",
    "CommOptConfig",
    "CommOptError",
    "CommOptWarning",
    "ConfigError",
    "DivergenceError",
    "ExchangeError",
    "GuardConfig",
    "Handle",
    "MismatchError",
    "Monitor",
    "RandomState",
    "Stats",
    "Supervisor",
    "UnsupportedError",
    "all_gather",
    "all_reduce",
    "attach",
    "compressors",
    "reduce_scatter",
]
