"""The strategy for ``lightning.fabric``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_commopt.arguments import spelled_out
from lightning_commopt.modules import CompressedModules


@spelled_out
class CommOptDDPStrategy(CompressedModules, DDPStrategy):
    """``DDPStrategy`` of ``lightning.fabric`` with compressed gradients; `Compressing` lists its arguments."""


CommOptDDPStrategy.register_strategies(STRATEGY_REGISTRY)
