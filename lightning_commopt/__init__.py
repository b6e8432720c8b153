"""Compressed gradient exchange for Lightning. Importing it registers the strategies ``commopt_ddp`` and
``commopt_ddp_<compressor>``, for ``lightning.pytorch`` and for ``pytorch_lightning``, whichever are installed.

`CommOptDDPStrategy` is the one for ``lightning.pytorch`` where that is installed. Those of the two packages are
``lightning_commopt.lightning.CommOptDDPStrategy`` and ``lightning_commopt.pytorch_lightning.CommOptDDPStrategy``.
"""

from importlib.util import find_spec

if find_spec("pytorch_lightning"):
    from lightning_commopt import pytorch_lightning  # noqa: F401  (registers)

if find_spec("lightning"):
    from lightning_commopt.lightning import CommOptDDPStrategy
elif find_spec("pytorch_lightning"):
    from lightning_commopt.pytorch_lightning import CommOptDDPStrategy  # type: ignore[assignment]
else:
    raise ImportError("lightning_commopt needs Lightning: pip install 'commopt[lightning]'")

__all__ = ["CommOptDDPStrategy"]
