"""The strategy and the callbacks for ``lightning.pytorch``."""

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt.callbacks import Guarding, Monitoring
from lightning_commopt.strategy import CompressedGradients


class CommMonitor(Monitoring, Callback):
    """What is measured of each step, and where it goes; `Monitoring` lists its arguments."""


class DivergenceGuard(Guarding, Callback):
    """When a fit is in trouble, and how far back it can go; `Guarding` lists its arguments."""


class CommOptDDPStrategy(CompressedGradients, DDPStrategy):
    """``DDPStrategy`` of ``lightning.pytorch`` with compressed gradients; `CompressedGradients` lists its arguments."""

    monitoring = CommMonitor
    guarding = DivergenceGuard
    asynchronous = AsyncCheckpointIO


CommOptDDPStrategy.register_strategies(StrategyRegistry)
