"""The strategy and the callbacks for ``pytorch_lightning``."""

from pytorch_lightning import Callback
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt.callbacks import Guarding, Monitoring
from lightning_commopt.strategy import CompressedGradients


class CommMonitor(Monitoring, Callback):  # type: ignore[misc]  # the checker sees the other package
    """What is measured of each step, and where it goes; `Monitoring` lists its arguments."""


class DivergenceGuard(Guarding, Callback):  # type: ignore[misc]  # the checker sees the other package
    """When a fit is in trouble, and how far back it can go; `Guarding` lists its arguments."""


class CommOptDDPStrategy(CompressedGradients, DDPStrategy):  # type: ignore[misc]  # the checker sees the other package
    """``DDPStrategy`` of ``pytorch_lightning`` with compressed gradients; `CompressedGradients` lists its arguments."""

    monitoring = CommMonitor
    guarding = DivergenceGuard
    asynchronous = AsyncCheckpointIO


CommOptDDPStrategy.register_strategies(StrategyRegistry)
