"""Runs a script that knows nothing of commopt, with every Accelerator (and Trainer) that it makes using it."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from accelerate_commopt.plugin import install
from commopt.config import CommOptConfig
from commopt.errors import CommOptError
from commopt.plan import Plan
from commopt.script import find, run

USAGE = """python -m accelerate_commopt [--config FILE] [--compressor NAME] SCRIPT [ARGS ...]
       python -m accelerate_commopt [--config FILE] [--compressor NAME] -m MODULE [ARGS ...]
       python -m accelerate_commopt config [--default] [FILE]

The first two run under a launcher, as in
  accelerate launch --config_file accelerate.yaml -m accelerate_commopt --config commopt.yaml train.py ARGS
  torchrun --nproc-per-node 2 -m accelerate_commopt train.py ARGS
and the third asks some questions and writes a file for `commopt launch`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; 2 if the user has to change something first."""
    parser = argparse.ArgumentParser("accelerate_commopt", usage=USAGE, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML; without it, what commopt launch chose, or 'auto'")
    parser.add_argument("--compressor", metavar="NAME", help="instead of the one in FILE")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        config = choose(options.config, options.compressor)
        find(options.script, options.module)
        unite()
    except CommOptError as error:
        print(f"accelerate_commopt: {error}", file=sys.stderr)
        return 2
    install(config)
    run(options.script, options.module, options.arguments)
    return 0


def choose(file: str | None, compressor: str | None) -> CommOptConfig:
    """The configuration: of the file, else of the environment, else the default; with another compressor if given.

    Raises:
        ConfigError: a mistake in one of them.
    """
    config = CommOptConfig.from_yaml(file) if file is not None else CommOptConfig.from_environment() or CommOptConfig()
    if compressor not in (None, config.compressor):
        assert compressor is not None
        config = replace(config, compressor=compressor, options={}, error_feedback=None)  # those were of the other
    Plan.from_config(config)  # for the names of compressors and their options
    return config


def unite() -> None:
    """Several processes without a device of their own compute on CPUs. Accelerate has to be told, or else each of them
    is a world of its own, and trains alone."""
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    device = torch.accelerator.current_accelerator(check_available=True)
    if launched == 1 or (device is not None and device.type != "mps") or os.environ.get("ACCELERATE_USE_CPU"):
        return
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if os.environ.get("RANK") == "0":
        print(
            f"accelerate_commopt: {launched} processes were launched and there is no GPU, so they train on CPUs, "
            "together (ACCELERATE_USE_CPU=true).",
            file=sys.stderr,
        )
