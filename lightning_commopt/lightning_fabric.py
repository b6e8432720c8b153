"""The strategy for ``lightning_fabric``."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_commopt.arguments import spelled_out
from lightning_commopt.modules import CompressedModules


@spelled_out
class CommOptDDPStrategy(CompressedModules, DDPStrategy):  # type: ignore[misc]  # the checker sees the other package
    """``DDPStrategy`` of ``lightning_fabric`` with compressed gradients; `Compressing` lists its arguments."""


CommOptDDPStrategy.register_strategies(STRATEGY_REGISTRY)
