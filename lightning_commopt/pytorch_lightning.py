"""The strategy for ``pytorch_lightning``."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_commopt.strategy import CompressedGradients


class CommOptDDPStrategy(CompressedGradients, DDPStrategy):  # type: ignore[misc]  # the checker sees the other package
    """``DDPStrategy`` of ``pytorch_lightning`` with compressed gradients; `CompressedGradients` lists its arguments."""


CommOptDDPStrategy.register_strategies(StrategyRegistry)
