"""``python -m accelerate_commopt config``: some questions, and a file for ``commopt launch``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.prompt import Confirm, IntPrompt, Prompt

from accelerate_commopt.file import LOCAL, SECTION, LaunchFile
from commopt.compressors import available
from commopt.config import AUTO, QUALITIES, VERSION
from commopt.errors import CommOptError, ConfigError

FILE = "launch.yaml"
PORT = 29500
FEEDBACK = {"auto": None, "yes": True, "no": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Asks and writes; 2 if the user has to change something, 1 if there was no answer: then nothing is written."""
    parser = argparse.ArgumentParser("accelerate_commopt config", description="Writes a file for commopt launch.")
    parser.add_argument("--default", action="store_true", help="ask nothing: this machine, and compressor: auto")
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=Path(FILE), help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        if options.default:
            if options.file.exists():
                raise ConfigError(f"{options.file} exists: remove it, or leave out --default to be asked.")
            values = default()
        else:
            values = ask(console)
            question = f"{options.file} exists. Overwrite it?"
            if options.file.exists() and not Confirm.ask(question, console=console, default=False):
                raise ConfigError("nothing was written.")
        write(options.file, values)
    except (EOFError, KeyboardInterrupt):
        print("\naccelerate_commopt config: no answer, so nothing was written.", file=sys.stderr)
        return 1
    except (CommOptError, OSError) as error:
        print(f"accelerate_commopt config: {error}", file=sys.stderr)
        return 2
    console.print(
        f"Written. Start with: commopt launch --config_file {options.file} SCRIPT", soft_wrap=True, markup=False
    )
    return 0


def default() -> dict[str, Any]:
    """Every GPU of this machine, or two processes without any; commopt chooses the compressor."""
    gpus = torch.cuda.device_count()
    return _values(cpu=not gpus, processes=gpus or 2, commopt={"compressor": AUTO})


def ask(console: Console) -> dict[str, Any]:
    """Asks in the terminal.

    Raises:
        EOFError, KeyboardInterrupt: no answer.
    """
    network: dict[str, Any] = {}
    machines = _number(console, "How many machines", 1)
    if machines > 1:
        ranks = [str(rank) for rank in range(machines)]
        network["machine_rank"] = int(Prompt.ask("Which of them is this", console=console, choices=ranks, default="0"))
        network["main_process_ip"] = _text(console, "Address of machine 0")
        network["main_process_port"] = _number(console, "Free port on machine 0", PORT)
    gpus = torch.cuda.device_count()
    device = Prompt.ask("Train on", console=console, choices=["cpu", "gpu"], default="gpu" if gpus else "cpu")
    each = (gpus or 1) if device == "gpu" else 2 if machines == 1 else 1
    processes = machines * _number(console, "Processes on each machine", each)
    precision = Prompt.ask("Mixed precision", console=console, choices=["no", "bf16", "fp16"], default="no")
    names = [AUTO, *available()]
    commopt: dict[str, Any] = {"compressor": Prompt.ask("Compressor", console=console, choices=names, default=AUTO)}
    if commopt["compressor"] == AUTO:
        question = "Quality of what it may choose"
        commopt["quality"] = Prompt.ask(question, console=console, choices=list(QUALITIES), default="safe")
    else:
        question = "Error feedback (auto: as the compressor needs it)"
        feedback = FEEDBACK[Prompt.ask(question, console=console, choices=list(FEEDBACK), default="auto")]
        commopt |= {} if feedback is None else {"error_feedback": feedback}
    return _values(device == "cpu", processes, commopt, precision, {"num_machines": machines, **network})


def write(file: Path, values: dict[str, Any]) -> None:
    """Writes a file that `commopt launch` takes, as a whole or not at all."""
    LaunchFile.from_dict(values)
    text = f"# commopt launch --config_file {file.name} SCRIPT ARGS\n{yaml.safe_dump(values, sort_keys=False)}"
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        os.replace(half, file)
    finally:
        half.unlink(missing_ok=True)


def _values(
    cpu: bool,
    processes: int,
    commopt: dict[str, Any],
    precision: str = "no",
    network: dict[str, Any] | None = None,
) -> dict[str, Any]:
    several = "MULTI_CPU" if cpu else "MULTI_GPU"
    return {
        "compute_environment": LOCAL,
        "distributed_type": several if processes > 1 else "NO",
        "use_cpu": cpu,
        "num_processes": processes,
        **(network or {"num_machines": 1}),
        "mixed_precision": precision,
        SECTION: {"version": VERSION, **commopt},
    }


def _number(console: Console, question: str, default: int) -> int:
    while (number := IntPrompt.ask(question, console=console, default=default)) < 1:
        console.print("A whole number from 1 on.")
    return number


def _text(console: Console, question: str) -> str:
    while not (text := Prompt.ask(question, console=console, default="", show_default=False).strip()):
        console.print("An address or a host name that the other machines know.")
    return text
