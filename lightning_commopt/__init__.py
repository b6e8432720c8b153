"""Compressed gradient exchange for Lightning. Importing it registers the strategies ``commopt_ddp`` and
``commopt_ddp_<compressor>``, for the Trainers of ``lightning.pytorch`` and ``pytorch_lightning`` and for the Fabrics of
``lightning.fabric`` and ``lightning_fabric``, whichever are installed.

    Trainer(strategy="commopt_ddp")                                                    # watches and guards
    Trainer(strategy="commopt_ddp", callbacks=[CommMonitor(every=100), DivergenceGuard(sigma=8)])    # tunes that
    Fabric(strategy="commopt_ddp")

`CommOptDDPStrategy`, `CommMonitor` and `DivergenceGuard` are those for ``lightning.pytorch`` where that is installed.
The modules ``lightning_commopt.lightning`` and ``lightning_commopt.pytorch_lightning`` have those of the two packages,
and ``lightning_commopt.fabric`` and ``lightning_commopt.lightning_fabric`` the strategies of the two Fabrics.

``python -m lightning_commopt`` runs a script that does not import it.
"""

from importlib.util import find_spec

if find_spec("lightning_fabric"):
    from lightning_commopt import lightning_fabric  # noqa: F401  (registers)

if find_spec("pytorch_lightning"):
    from lightning_commopt import pytorch_lightning  # noqa: F401  (registers)

if find_spec("lightning"):
    from lightning_commopt import fabric  # noqa: F401  (registers)
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
