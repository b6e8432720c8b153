"""``python -m lightning_commopt``: runs a script that knows nothing of commopt, with its strategies registered."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from commopt import CommOptConfig, CommOptError
from commopt.script import find, run
from lightning_commopt import keys, swap
from lightning_commopt.arguments import Compressing

USAGE = """python -m lightning_commopt [--strategy NAME] [--config FILE] SCRIPT [ARGS ...]
       python -m lightning_commopt [--strategy NAME] [--config FILE] -m MODULE [ARGS ...]

Runs SCRIPT as python does, in which "commopt_ddp" and the other strategies of commopt have their names: for Trainers
and Fabrics of all Lightning packages, and on the command line of a LightningCLI. Processes that Lightning starts run
the same way. With --strategy or --config, commopt's strategy takes the place of Lightning's DDP, where a Trainer or
Fabric asks for that by name, or gets it by "auto". One with a single device is left as it is, with a warning; one with
another strategy, or with an object of the script's own, is an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; 2 if the user has to change something first."""
    parser = argparse.ArgumentParser("lightning_commopt", usage=USAGE, allow_abbrev=False)
    parser.add_argument("--strategy", metavar="NAME", help="swapped in: commopt_ddp, commopt_ddp_int8, ...")
    parser.add_argument("--config", metavar="FILE", help="YAML: what commopt_ddp does, which is swapped in")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    name, file = options.strategy, options.config
    try:
        config = None if file is None else CommOptConfig.from_yaml(file)
        find(options.script, options.module)
        if name is not None or config is not None:
            name = name or Compressing.strategy_name
            swap.install(name, config)
    except CommOptError as error:
        print(f"lightning_commopt: {error}", file=sys.stderr)
        return 2
    given = {"--strategy": name, "--config": file and str(Path(file).resolve())}
    keys.explain()
    swap.lead([part for key, value in given.items() if value for part in (key, value)])
    run(options.script, options.module, options.arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
