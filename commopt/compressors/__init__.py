"""What a gradient becomes on its way: ``available()`` names them, ``create`` makes one, ``register`` adds one."""

from commopt.compressors import blocks, casts, lowrank, midrise, sparse  # noqa: F401  (they register themselves)
from commopt.compressors.contract import (
    Compressor,
    Contraction,
    Guarantee,
    RoundsCompressor,
    RowCompressor,
    Unbiased,
    option,
)
from commopt.compressors.registry import available, create, register

__all__ = [
    "Compressor",
    "Contraction",
    "Guarantee",
    "RoundsCompressor",
    "RowCompressor",
    "Unbiased",
    "available",
    "create",
    "option",
    "register",
]
