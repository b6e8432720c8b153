"""Every registered compressor with the options that matter: what the suites of this project run over."""

from collections.abc import Callable
from typing import Any

import pytest

from commopt.compressors import Compressor, available, create

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fp8": [{"block": 32}, {"block": 1024}],
    "int2": [{"block": 32}],
    "int3": [{"block": 32}],
    "int8": [{"block": 32}, {"block": 1024}, {"stochastic": True}],
    "int4": [
        {"block": 8},
        {"block": 128},
        {"stochastic": True},
        {"hadamard": True},
        {"hadamard": True, "stochastic": True},
    ],
    "onebit": [{"block": 32}, {"block": 4096}],
    "powersgd": [{"rank": 1}, {"rank": 16}],
    "randomk": [{"density": 0.1}, {"density": 1.0}],
    "threshold": [{"density": 0.1}, {"block": 1024, "density": 0.05}],
    "topk": [{"density": 1e-5}, {"density": 0.3, "block": 64}, {"density": 1.0}],
}


def cases(wanted: Callable[[Compressor], bool] = lambda compressor: True) -> pytest.MarkDecorator:
    """Every registered compressor with every set of options, as far as wanted."""
    every = [(name, options) for name in available() for options in [{}, *OPTIONS.get(name, [])]]
    chosen = [(name, options) for name, options in every if wanted(create(name, **options))]
    ids = ["-".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in chosen]
    return pytest.mark.parametrize(("name", "options"), chosen, ids=ids)


every_case = cases()
