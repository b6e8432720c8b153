"""Measure what docs/figures.md shows, and write it.

make figures                                       # everything, about three hours on a quiet machine
python -m benchmarks.figures --from-json docs/figures   # only write the page from results that exist
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import accuracy, divergence, fidelity, follow, fusion, guard, overhead, parity, reach, soak, steptime

DOCS = Path(__file__).parent.parent / "docs"
STEP_COLUMNS = (
    "Each host behind a link of that rate both ways; loopback is a network that is never the limit. What *auto* chose "
    "stands below the table. "
    "*over nocomm* and *over ddp*: step time over that of the same step without communication, and over plain DDP; the "
    "median of the rounds, and the least and the most. *predicted*: by the cost model, from what the first automatic "
    "variant has measured. *wire idle*: the part of the exchange, from the first gradient to the last mean, in which "
    "nothing was on the wire. *wire ms*, *codec ms*: what a rank spent in collectives and in "
    "compression, most of it beside the backward pass. *MB*: 10^6 bytes that a rank sends in a step, by the formula of "
    "the exchange, as counted when handed to the collectives, and as the kernel counted them on the interface."
)
PARITY_COLUMNS = (
    "*difference*: relative, of the loss to that of plain DDP from the same weights on the same batches; the mean over "
    "seeds, with its 95 % confidence interval (Student's t). A negative difference is a better model."
)

GUARD_COLUMNS = (
    "Simulated losses of 10 000 steps on four curves (a power law, with a cosine schedule, flat, a sawtooth over "
    "epochs) and a gradient norm with a heavy tail. *spike*, *drift*, *all*: false alarms in 10 000 steps, the "
    "mean over the curves, and the curve with the most. *jump*: the loss is 15 % higher from one step on; steps "
    "until the guard falls or rolls back, median and (95 % quantile), and the share within 20. *drift*: it rises "
    "by 0.05 % a step from step 500, 2000 or 8000 on; the share within 150. *onset held*: the snapshot that would "
    "be restored was taken before the trouble."
)
DIVERGENCE_COLUMNS = (
    "Losses are those of the whole validation text after training, the second and third relative to the first. "
    "*steps*: what was trained, those that were rolled back included. The *clean* runs are to show that the guard "
    "keeps still."
)
SOAK_COLUMNS = (
    "A GPT of two layers, 1000 steps with 50 faults at random steps: NaN and infinite gradients, payloads times "
    "100, flipped bits in checked mode, codecs out of memory, ranks that switch compression off and on. A step "
    "that is skipped is done again, so that both trainings take as many. *ranks apart*: how often the parameters "
    "of two ranks differed, compared every five steps."
)
FIDELITY_COLUMNS = (
    "Sums over 50 steps of delivered and of true mean gradients, one figure a window. *sign agreement*: the mean "
    "product of their signs; Adam moves each coordinate by about its sign. Held against the table above it tells, "
    "and the cosine does not, which compressors reach the loss of plain DDP. *the guard*: what its defaults do "
    "about it."
)
OVERHEAD_COLUMNS = (
    "The median, over the rounds, of the ratio of median step times with and without monitor, guard and sampling; "
    "and one snapshot of model, optimizer and exchange, which is due every 50 steps."
)
REACH_COLUMNS = (
    "*steps*: until the loss of the whole validation text is that of plain DDP after 300; casts and no compression "
    "take as many. *ms a step*: from the tables above. What never comes to that loss is left out."
)
ACCURACY_COLUMNS = (
    "Of all images held out, one figure a seed. *difference*: in percentage points, to the same training uncompressed; "
    "the mean over seeds, with its 95 % confidence interval. *MB counted*: 10^6 bytes that a rank sent in a training, "
    "steps in which *auto* tries things included; *saved*: of what an uncompressed training sends. The last variant is "
    "the negative control."
)
FUSION_COLUMNS = (
    "DDP is wrapped once, with buckets of 0.1 MB; the size of messages is a part of the plan, and changes from turn to "
    "turn. *small*: 10 000 parameters of 64 elements."
)
FOLLOW_COLUMNS = "GPT *small*; *steps until it settled*: after which the plan no longer changed in this phase."

GLANCE_COLUMNS = (
    "ms a step, medians, and what *auto* chose; a column for each rate and number of hosts, from what follows."
)

FIXED = ("int8", "int4", "int3", "int2", "onebit", "topk:density=0.01", "powersgd:rank=4")
HOOKS = ("torch:fp16", "torch:bf16", "torch:powersgd")
AUTO = ("auto", "auto:quality=aggressive")
PLAIN = ("none", "bf16", "torch:allreduce")
POLICY = (  # rate, hosts, rounds, steps a turn, variants
    ("100mbit", 2, "3", "3", (*AUTO, *HOOKS, *PLAIN, *FIXED)),
    ("loopback", 2, "6", "4", (*AUTO, *HOOKS, *PLAIN, *FIXED)),
    ("1gbit", 2, "5", "4", (*AUTO, *HOOKS, *PLAIN, *FIXED)),
    ("25mbit", 2, "2", "2", (*AUTO, "torch:powersgd", "bf16", *FIXED)),
    ("10mbit", 2, "2", "1", (*AUTO, "torch:fp16", "torch:powersgd", *FIXED)),
    ("100mbit", 4, "2", "2", (*AUTO, "torch:powersgd", "bf16", *FIXED)),
    ("1gbit", 4, "3", "3", (*AUTO, *HOOKS, "bf16", *FIXED)),
    ("loopback", 4, "3", "3", (*AUTO, *HOOKS, "bf16", *FIXED)),
    ("25mbit", 4, "2", "1", (*AUTO, "torch:powersgd", *FIXED)),
    ("10mbit", 4, "2", "1", (*AUTO, *FIXED)),
)


@dataclass(frozen=True)
class Figure:
    """One measurement and its section of the page."""

    name: str
    title: str
    text: str
    module: ModuleType
    arguments: Sequence[str]


FIGURES = (
    *(
        Figure(
            f"policy-{rate}-{hosts}",
            f"Step time, auto against every fixed setting: {rate}, {hosts} hosts",
            "Columns as above." if number else STEP_COLUMNS,
            steptime,
            ("--rate", rate, "--hosts", str(hosts), "--rounds", rounds, "--steps", steps, "--variants", *variants),
        )
        for number, (rate, hosts, rounds, steps, variants) in enumerate(POLICY)
    ),
    Figure("reach", "Time to the loss of 300 uncompressed steps", REACH_COLUMNS, reach, ()),
    Figure("fusion", "The size of messages", FUSION_COLUMNS, fusion, ()),
    Figure("follow", "A link that is halved in mid-training, and restored", FOLLOW_COLUMNS, follow, ("--rate", "160")),
    Figure("parity", "Validation loss", PARITY_COLUMNS, parity, ()),
    Figure(
        "parity-int3",
        "Validation loss of int3, on seeds that nothing was tuned on",
        PARITY_COLUMNS,
        parity,
        ("--variants", "int3", "--seeds", "3", "4", "5"),
    ),
    Figure("accuracy", "Accuracy of a ResNet", ACCURACY_COLUMNS, accuracy, ()),
    Figure("fidelity", "What arrives of the true gradient", FIDELITY_COLUMNS, fidelity, ()),
    Figure("divergence", "Runs that a compressor spoils", DIVERGENCE_COLUMNS, divergence, ()),
    Figure("soak", "A run full of faults", SOAK_COLUMNS, soak, ("--seeds", "0", "1", "2")),
    Figure("guard", "False alarms, and how soon trouble is found", GUARD_COLUMNS, guard, ()),
    Figure("overhead", "What watching costs", OVERHEAD_COLUMNS, overhead, ()),
)


def render(folder: Path) -> str:
    """The page, from the JSON files in ``folder``; what has none there is left out."""
    parts = ["# Figures", "Written by `make figures`; each table by the command above it."]
    parts += ["## Step times at a glance", GLANCE_COLUMNS, _glance(folder)]
    for figure in FIGURES:
        path = folder / f"{figure.name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        parts += [f"## {figure.title}", figure.text, f"```\n{result['command']}\n```"]
        parts += [_conditions(result["conditions"]), _table(figure.module.HEADERS, figure.module.rows(result))]
        chosen = [v for v in result.get("variants", []) if v["variant"].startswith("auto")]
        parts += ["\n".join(f"- `{v['variant']}`: {v['explained']}" for v in chosen)] if chosen else []
    return "\n\n".join(parts) + "\n"


def _glance(folder: Path) -> str:
    """The medians of all networks that were measured, a column each."""
    columns: dict[str, dict[str, str]] = {}
    for rate, hosts, *_ in POLICY:
        path = folder / f"policy-{rate}-{hosts}.json"
        if not path.exists():
            continue
        column = columns[f"{rate}, {hosts}"] = {}
        for variant in json.loads(path.read_text())["variants"]:
            median, chosen = variant["step_ms"]["median"], variant.get("chosen")
            column[variant["variant"]] = f"{median:.0f}" + (f" ({chosen})" if chosen else "")
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return _table(["", *columns], [[name, *(column.get(name, "") for column in columns.values())] for name in names])


def _conditions(conditions: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in conditions.items())


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column holds names, the others are flush right."""
    lines = [" | ".join(headers), " | ".join(["---", *["---:"] * (len(headers) - 1)])]
    lines += [" | ".join([f"`{row[0]}`", *row[1:]]) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--from-json", type=Path, metavar="DIR", help="only write the page from the results in DIR")
    args = parser.parse_args()
    folder = args.from_json or DOCS / "figures"
    if args.from_json is None:
        for figure in FIGURES:
            target = (folder / f"{figure.name}.json").relative_to(DOCS.parent)
            command = [sys.executable, "-m", figure.module.__name__, *figure.arguments, "--json", str(target)]
            print("$", *command[1:], flush=True)
            if failed := subprocess.run(command, cwd=DOCS.parent, check=False).returncode:
                return failed
    page = DOCS / "figures.md"
    page.write_text(render(folder))
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
