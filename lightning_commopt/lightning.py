"""The strategy for ``lightning.pytorch``."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt.strategy import CompressedGradients


class CommOptDDPStrategy(CompressedGradients, DDPStrategy):
    """``DDPStrategy`` of ``lightning.pytorch`` with compressed gradients; `CompressedGradients` lists its arguments."""


CommOptDDPStrategy.register_strategies(StrategyRegistry)
