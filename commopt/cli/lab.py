"""``commopt lab``: a cluster rehearsed on one machine."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from commopt.lab import Lab, NetLab, links, record
from commopt.lab.system import require

NETWORK = ("hosts", "rate", "delay", "loss", "racks", "between_racks")


def add_to(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the subcommand and its actions."""
    parser = commands.add_parser(
        "lab",
        help="rehearse a cluster on one machine (Linux, root)",
        description="Hosts that are network namespaces of this machine, behind links of a chosen rate, delay and loss.",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, function: Callable[[argparse.Namespace], None], what: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what)
        added.add_argument("--name", help="of the lab, where several are up")
        added.set_defaults(run=function)
        return added

    _add_network(action("up", up, "make a lab, which stays up"))
    job = action("run", run, "run one copy of a command a host, in the lab that is up or in one made for it")
    _add_network(job)
    job.add_argument("command", metavar="CMD", nargs="+", help="after --; finds RANK, WORLD_SIZE, MASTER_ADDR, ...")
    for what, example in (("rate", "25mbit"), ("delay", "20ms"), ("loss", "1%%")):
        changed = action(what, change, f"change the {what} of links, also while a job runs")
        changed.add_argument("value", metavar=what.upper(), help=f"as in {example}")
        changed.set_defaults(what=what, host=None)
        if what == "rate":
            changed.add_argument("--host", type=int, metavar="I", help="only of the link of this host, counted from 0")
    action("status", status, "what is up")
    action("down", down, "remove the lab that is up, and what crashed ones have left")


def up(options: argparse.Namespace) -> None:
    """Makes a lab that stays."""
    lab = _new(options, options.name or "lab")
    lab.up()
    print(_described(lab.record))


def run(options: argparse.Namespace) -> None:
    """Runs the job; ends with its status, and that of a shell where there is no such command."""
    if shutil.which(options.command[0]) is None:
        print(f"commopt: {options.command[0]}: no such command", file=sys.stderr)
        sys.exit(127)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    alone = any(getattr(options, name) is not None for name in NETWORK)
    with _new(options, options.name) if alone else Lab.find(options.name) as lab:
        status = lab.run(options.command)
    sys.exit(status)


def change(options: argparse.Namespace) -> None:
    """Changes links of the lab that is up."""
    lab = Lab.find(options.name)
    if options.what == "rate":
        lab.set_rate(options.value, options.host)
    else:
        {"delay": lab.set_delay, "loss": lab.set_loss}[options.what](options.value)


def status(options: argparse.Namespace) -> None:
    """Prints every lab, or the one of the name given."""
    require()
    for found in [record.find(options.name)] if options.name else record.everything():
        print(_described(found))


def down(options: argparse.Namespace) -> None:
    """Removes labs."""
    require()
    print(f"Removed: {', '.join(record.down(options.name)) or 'nothing was up'}")


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, metavar="N", help="(default: 2)")
    parser.add_argument("--rate", help="of each host's link, both ways: 100mbit, or none (default: 100mbit)")
    parser.add_argument("--delay", help="added to what each host sends: 20ms; a round trip takes twice that")
    parser.add_argument("--loss", help="share of packets that each link loses: 1%%")
    parser.add_argument("--racks", type=int, metavar="N", help="that the hosts stand in (default: 1)")
    parser.add_argument("--between-racks", metavar="RATE", help="of the link between each rack and the others")


def _new(options: argparse.Namespace, name: str | None) -> NetLab:
    given = {key: getattr(options, key) for key in NETWORK if getattr(options, key) is not None}
    return NetLab(**{"hosts": 2, "rate": "100mbit", "name": name, **given})


def _described(lab: record.Record) -> str:
    racks = f", {lab.racks} racks, {lab.between_racks or 'unshaped'} between" if lab.racks > 1 else ""
    owner = f"; of process {lab.owner[0]}{'' if lab.owned() else ', which has ended'}" if lab.owner else ""
    head = f"{lab.name}: {len(lab.rates)} hosts, delay {lab.delay * 1e3:g}ms, loss {lab.loss * 100:g}%{racks}{owner}"
    hosts = [
        f"  host {rank}: {links.address(rank)}, {rate or 'unshaped'}, rack {lab.rack(rank)}, namespace {namespace}"
        for rank, (rate, namespace) in enumerate(zip(lab.rates, lab.hosts, strict=True))
    ]
    return "\n".join([head, *hosts])
