"""The strategy and the callbacks for ``lightning.pytorch``."""

from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt.arguments import spelled_out
from lightning_commopt.callbacks import Guarding, Monitoring
from lightning_commopt.strategy import CompressedGradients


class CommMonitor(Monitoring, Callback):  # noqa: D101
    __doc__ = Monitoring.__doc__  # for help()


class DivergenceGuard(Guarding, Callback):  # noqa: D101
    __doc__ = Guarding.__doc__  # for help()


@spelled_out
class CommOptDDPStrategy(CompressedGradients, DDPStrategy):
    """``DDPStrategy`` of ``lightning.pytorch`` with compressed gradients; `Compressing` lists its arguments."""

    monitoring = CommMonitor
    guarding = DivergenceGuard
    asynchronous = AsyncCheckpointIO


CommOptDDPStrategy.register_strategies(StrategyRegistry)
