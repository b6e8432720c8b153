"""``commopt launch``: `accelerate launch` from one file, which starts as many ranks as it was asked for."""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import psutil  # type: ignore[import-untyped]
from accelerate.commands.config.config_args import default_config_file  # type: ignore[import-untyped]
from accelerate.commands.launch import launch_command, launch_command_parser  # type: ignore[import-untyped]
from accelerate.utils import str_to_bool  # type: ignore[import-untyped]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accelerate_commopt.file import LaunchFile
from commopt.errors import CommOptError, ConfigError
from commopt.script import find

DESCRIPTION = """Starts a script under Accelerate, with its gradients compressed. FILE holds the keys of `accelerate
config` and a `commopt:` section; `python -m accelerate_commopt config` writes one. The options are those of `accelerate
launch`."""
MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # set where MPI has started the processes already
GRACE = 10.0  # seconds for processes to end by themselves


@dataclass
class Launch:
    """What is going to be started.

    Args:
        options: of `accelerate launch`.
        values: the configuration file for it; empty for none.
        environment: variables for all processes.
        notes: what the user should know.
    """

    options: argparse.Namespace
    values: dict[str, Any]
    environment: dict[str, str]
    notes: list[str]

    def given(self, name: str, default: Any = None) -> Any:
        """A value of the command line, else of the file."""
        flag = getattr(self.options, name)
        return flag if flag is not None else self.values.get(name, default)


def main(arguments: Sequence[str] | None = None) -> int:
    """Launches, and returns the exit status of the first process that failed; 2 if the user has to change something."""
    try:
        launch = prepare(sys.argv[1:] if arguments is None else arguments)
        for note in launch.notes:
            print(f"commopt launch: {note}", file=sys.stderr)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stop)
        return start(launch)
    except CommOptError as error:
        print(f"commopt launch: {error}", file=sys.stderr)
        return 2


def prepare(arguments: Sequence[str]) -> Launch:
    """Reads the command line and the file.

    Raises:
        ConfigError: a mistake in one of them.
    """
    parser = launch_command_parser()
    parser.prog, parser.description = "commopt launch", DESCRIPTION
    options = parser.parse_args(arguments)
    if options.no_python:
        raise ConfigError("--no_python: commopt runs inside of Python; give a script, or -m MODULE.")
    path = options.config_file
    if path is None and not options.cpu and Path(default_config_file).is_file():
        path = default_config_file  # as accelerate does
    file = LaunchFile.read(path) if path is not None else LaunchFile({}, None)
    find(options.training_script, options.module)
    target = [*(["-m"] if options.module else []), options.training_script]
    options.training_script_args = [*target, *options.training_script_args]
    options.training_script, options.module = "accelerate_commopt", True
    launch = Launch(options, dict(file.accelerate), file.config.to_environment() if file.config else {}, [])
    _place(launch)
    return launch


def _place(launch: Launch) -> None:
    """Checks where ranks are to run. With several on CPUs, Accelerate starts one process a machine, and leaves the
    others to MPI; torchrun, which it uses for GPUs, starts them all."""
    options, values = launch.options, launch.values
    kind = values.get("distributed_type", "NO")
    if not kind.startswith(("NO", "MULTI_")) or options.tpu or options.use_deepspeed or options.use_fsdp:
        return
    machines, machine = launch.given("num_machines", 1), launch.given("machine_rank", 0)
    processes = launch.given("num_processes", 1 if kind == "NO" else -1)
    if processes < 1 or machines < 1:
        raise ConfigError(
            "num_processes has to be given, those of all machines together; and num_machines is 1 or more."
        )
    if machines > 1:
        if launch.given("main_process_ip") is None:
            raise ConfigError(f"{machines} machines need the address of the first one: main_process_ip.")
        if not 0 <= machine < machines:
            raise ConfigError(f"machine_rank of {machines} machines is 0 to {machines - 1}, got {machine}.")
        if processes % machines:
            raise ConfigError(
                f"num_processes counts those of all machines, so it has to be a multiple of their number; got "
                f"{processes} for {machines} machines."
            )
    on_cpu = options.cpu or kind == "MULTI_CPU" or str_to_bool(str(values.get("use_cpu", False)))
    by_mpi = options.mpirun_hostfile or values.get("mpirun_config") or any(os.environ.get(name) for name in MPI)
    if not on_cpu or by_mpi or options.multi_gpu or processes < 2:
        return
    options.cpu, options.gpu_ids = False, None
    values.pop("gpu_ids", None)
    values |= {"distributed_type": "MULTI_GPU", "use_cpu": True}  # the name under which it calls torchrun
    launch.environment["ACCELERATE_USE_CPU"] = "true"
    if machines == 1 and launch.given("main_process_port") is None:
        options.main_process_port = 0  # any that is free
    here = f" ({processes // machines} of them here)" if machines > 1 else ""
    launch.notes.append(
        f"{processes} processes on CPUs{here} are started by torchrun; accelerate launch itself starts one a machine, "
        "and leaves the others to MPI."
    )


def start(launch: Launch) -> int:
    """Starts what was prepared, in this environment, and waits for it. No process is left when it returns or raises."""
    os.environ.update(launch.environment)
    others = psutil.Process().children(recursive=True)
    with tempfile.TemporaryDirectory(prefix="commopt-launch-") as folder:
        if launch.values:
            file = Path(folder, "accelerate.json")
            file.write_text(json.dumps(launch.values))
            launch.options.config_file = str(file)
        try:
            launch_command(launch.options)
        except ChildFailedError as error:  # of torchrun: a table of who failed, and when
            print(error, file=sys.stderr)
            return _status(error.get_first_failure()[1].exitcode)
        except CalledProcessError as error:
            return _status(error.returncode)
        except SignalException as error:
            return _status(-error.sigval)
        except KeyboardInterrupt:  # which the terminal sends to all
            psutil.wait_procs(psutil.Process().children(), timeout=GRACE)
            return _status(-signal.SIGINT)
        except (ValueError, AssertionError, OSError) as error:  # what it says to combinations of options
            raise ConfigError(f"accelerate launch: {error}") from error
        finally:
            _end([child for child in psutil.Process().children(recursive=True) if child not in others])
    return 0


def _stop(number: int, _: object) -> None:
    sys.exit(128 + number)


def _status(code: int) -> int:
    """As a shell reports it: 128 and the signal, where one has ended the process."""
    return code if code >= 0 else 128 - code


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(processes, timeout=GRACE)[1]:
        process.kill()


if __name__ == "__main__":
    sys.exit(main())
