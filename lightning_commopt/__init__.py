"""Compressed gradient exchange for Lightning. Importing it registers the strategies ``commopt_ddp`` and
``commopt_ddp_<compressor>``, for ``lightning.pytorch`` and for ``pytorch_lightning``, whichever are installed.

    Trainer(strategy="commopt_ddp")                                                    # watches and guards
    Trainer(strategy="commopt_ddp", callbacks=[CommMonitor(every=100), DivergenceGuard(sigma=8)])    # tunes that

`CommOptDDPStrategy`, `CommMonitor` and `DivergenceGuard` are those for ``lightning.pytorch`` where that is installed.
The modules ``lightning_commopt.lightning`` and ``lightning_commopt.pytorch_lightning`` have those of the two packages.
"""

from importlib.util import find_spec

if find_spec("pytorch_lightning"):
    from lightning_commopt import pytorch_lightning  # noqa: F401  (registers)

if find_spec("lightning"):
    from lightning_commopt.lightning import CommMonitor, CommOptDDPStrategy, DivergenceGuard
elif find_spec("pytorch_lightning"):
    from lightning_commopt.pytorch_lightning import (  # type: ignore[assignment]
        CommMonitor,
        CommOptDDPStrategy,
        DivergenceGuard,
    )
else:
    raise ImportError("lightning_commopt needs Lightning: pip install 'commopt[lightning]'")

__all__ = ["CommMonitor", "CommOptDDPStrategy", "DivergenceGuard"]
