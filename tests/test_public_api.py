"""The public surface: changing it is a decision, and its examples run."""

import doctest
import importlib
import pkgutil

import pytest

import commopt
from commopt import compressors

MODULES = [info.name for info in pkgutil.walk_packages(commopt.__path__, "commopt.")]


def test_names_of_commopt() -> None:
    assert sorted(commopt.__all__) == [
        "AttachError",
        "CheckpointError",
        "CommOptConfig",
        "CommOptError",
        "CommOptWarning",
        "ConfigError",
        "DivergenceError",
        "ExchangeError",
        "GuardConfig",
        "Handle",
        "MismatchError",
        "Monitor",
        "RandomState",
        "Stats",
        "Supervisor",
        "UnsupportedError",
        "all_gather",
        "all_reduce",
        "attach",
        "compressors",
        "reduce_scatter",
    ]
    assert all(hasattr(commopt, name) for name in commopt.__all__)


def test_names_of_compressors() -> None:
    assert sorted(compressors.__all__) == [
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
    assert all(hasattr(compressors, name) for name in compressors.__all__)


def test_errors_can_be_caught_as_what_they_are() -> None:
    assert issubclass(commopt.ConfigError, ValueError)
    assert issubclass(commopt.UnsupportedError, TypeError)
    assert issubclass(commopt.AttachError, RuntimeError)
    assert issubclass(commopt.CommOptWarning, UserWarning)
    for error in (
        commopt.ConfigError,
        commopt.UnsupportedError,
        commopt.AttachError,
        commopt.MismatchError,
        commopt.ExchangeError,
    ):
        assert issubclass(error, commopt.CommOptError)


@pytest.mark.parametrize("name", ["commopt", *MODULES])
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(name) for name in MODULES]
    assert sum(bool(test.examples) for module in modules for test in finder.find(module)) >= 2
