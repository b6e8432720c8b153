"""``commopt bench``: what the network and the codecs of a job can do."""

import argparse
import json
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from commopt.collectives.wire import Wire
from commopt.compressors import available, create
from commopt.errors import ConfigError
from commopt.network import Curve, Network
from commopt.network.machine import Machine, measure_codecs
from commopt.network.probe import probe

TIMEOUT = timedelta(seconds=60)
LAUNCHERS = """commopt bench measures the network between the ranks of a job: start it with a launcher, for example
  torchrun --nproc-per-node 2 --no-python commopt bench
  commopt lab run --hosts 2 --rate 100mbit -- commopt bench"""


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="measure links, collectives and codecs (under a launcher)",
        description=LAUNCHERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="where rank 0 writes the figures")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures, and rank 0 prints."""
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        raise ConfigError(f"RANK and WORLD_SIZE are not set. {LAUNCHERS}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        wire = Wire(None)
        start = time.perf_counter()
        network = probe(wire, device)
        probed = time.perf_counter()
        machine = measure_codecs(map(create, available()), device, wire)
        if wire.rank == 0:
            console = Console()
            show(console, network, machine)
            seconds = (probed - start, time.perf_counter() - probed)
            console.print(f"Measured in {seconds[0]:.1f} s, codecs in {seconds[1]:.1f} s.", highlight=False)
            if options.json:
                plain = {"network": network.to_plain(), "machine": machine.to_plain()}
                options.json.write_text(json.dumps(plain, indent=1))
    finally:
        dist.destroy_process_group()


def show(console: Console, network: Network, machine: Machine) -> None:
    """Prints the tables."""
    hosts = max(network.hosts) + 1
    console.print(f"{len(network.hosts)} ranks on {hosts} hosts, {machine_line(network, machine)}", highlight=False)
    links = [
        (f"{low} - {high}", f"{1e3 * link.latency:.3f}", f"{8e-9 * link.bandwidth:.4g}")
        for (low, high), link in network.links.items()
    ]
    _print(console, "Links, each way", ("hosts", "latency, ms", "Gbit/s"), links)
    sizes = sorted({size for curve in network.collectives.values() for size, _ in curve.points})
    names = list(network.collectives)
    by_size = [(_bytes(size), *(_ms(network.collectives[name], size) for name in names)) for size in sizes]
    _print(console, "Collectives, ms by bytes that a rank hands over", ("bytes", *names), by_size)
    codecs = [
        (name, f"{32e-9 * codec.encode.rate:.3g}", f"{32e-9 * codec.decode.rate:.3g}")
        for name, codec in machine.codecs.items()
    ]
    _print(console, "Codecs, Gbit/s of float32", ("compressor", "encode", "decode"), codecs)


def machine_line(network: Network, machine: Machine) -> str:
    """What the exchange takes from the cores."""
    return (
        f"{network.cpu_share:.0%} of a core busy in collectives; "
        f"a second of codec costs the main thread {machine.steal:.2f} s"
    )


def _print(console: Console, title: str, headers: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    if table.rows:
        console.print(table)


def _ms(curve: Curve, size: float) -> str:
    """Empty where this size was not measured."""
    measured = size in (point for point, _ in curve.points)
    return f"{1e3 * curve.seconds(size):.2f}" if measured else ""


def _bytes(size: float) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / (1 << 10):g} KiB"
