"""The strategy and the callbacks for ``pytorch_lightning``."""

from pytorch_lightning import Callback
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt.arguments import spelled_out
from lightning_commopt.callbacks import Guarding, Monitoring
from lightning_commopt.strategy import CompressedGradients


class CommMonitor(Monitoring, Callback):  # type: ignore[misc]  # the checker sees the other package  # noqa: D101
    __doc__ = Monitoring.__doc__  # for help()


class DivergenceGuard(Guarding, Callback):  # type: ignore[misc]  # the checker sees the other package  # noqa: D101
    __doc__ = Guarding.__doc__  # for help()


@spelled_out
class CommOptDDPStrategy(CompressedGradients, DDPStrategy):  # type: ignore[misc]  # the checker sees the other package
    """``DDPStrategy`` of ``pytorch_lightning`` with compressed gradients; `Compressing` lists its arguments."""

    monitoring = CommMonitor
    guarding = DivergenceGuard
    asynchronous = AsyncCheckpointIO


CommOptDDPStrategy.register_strategies(StrategyRegistry)
