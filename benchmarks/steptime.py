"""Time of a whole training step, forward to optimizer, for each way to exchange gradients, side by side.

    python -m benchmarks.steptime --rate 100mbit --hosts 2
    python -m benchmarks.steptime --rate loopback --variants nocomm ddp none int8 powersgd:rank=4

The same processes hold one model a variant and run the variants in turn, round after round: what a machine does
beside the benchmark meets all of them alike. ``nocomm``, the same step without any exchange, is the limit.

Under a launcher that sets RANK and WORLD_SIZE, such as torchrun, it measures the network that these ranks have.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks import results
from benchmarks.variants import TIMEOUT, Variant
from commopt.collectives.wire import Wire
from commopt.errors import CommOptError
from commopt.lab import on_each_host, open_lab
from commopt.network.machine import measure_codecs
from commopt.plan import Plan
from commopt.policy.choice import describe
from commopt.policy.cost import predict
from lightning_commopt import CommOptDDPStrategy
from recipes.gpt.train import GPT, SIZES, batches, load_text, next_token_loss

REFERENCES = ("nocomm", "ddp")  # always measured: the limit, and what a user has today
DEFAULT = [
    *("none", "torch:fp16", "fp16", "torch:bf16", "bf16", "fp8", "int8", "int4", "onebit"),
    *("topk:density=0.01", "threshold:density=0.01", "randomk:density=0.01", "torch:powersgd", "powersgd:rank=4"),
]


class Subject:
    """A model that is trained one way, and what was measured on it."""

    def __init__(self, variant: Variant, model: str, bucket_cap_mb: float) -> None:
        torch.manual_seed(0)
        self.variant = variant
        self.model = GPT(SIZES[model])
        self.wrapped = variant.wrap(self.model, bucket_cap_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.rounds: list[list[float]] = []  # seconds of each step, those of the slower rank
        self.steps, self.exchange_seconds = 0, 0.0
        counted = ("steps", "kernel_bytes", "counted_bytes", "wire_seconds", "codec_seconds", "exchange_seconds")
        self.totals = dict.fromkeys(counted, 0.0)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """One training step; its seconds."""
        start = time.perf_counter()
        with self.wrapped.step_context():
            next_token_loss(self.wrapped.ddp(inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.wrapped.handle and self.wrapped.handle.engine.record:
            self.exchange_seconds += self.wrapped.handle.engine.record.exchange_seconds
        return time.perf_counter() - start

    def round(self, stream: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
        """Measures some steps. The one before them is not timed: it starts on an idle network and a cold cache."""
        dist.barrier()  # so that all that was sent before has arrived, and been counted
        before = self._counters()
        seconds = [self.step(*next(stream)) for _ in range(1 + steps)][1:]
        dist.barrier()
        for name, count in self._counters().items():
            self.totals[name] += count - before[name]
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.rounds.append(slowest.tolist())

    def _counters(self) -> dict[str, float]:
        counters: dict[str, float] = {"steps": self.steps, "kernel_bytes": sent_by_kernel()}
        counters["exchange_seconds"] = self.exchange_seconds
        if self.wrapped.handle:
            stats = self.wrapped.handle.stats()
            counters["counted_bytes"] = stats.bytes_sent
            counters["wire_seconds"], counters["codec_seconds"] = stats.wire_seconds, stats.codec_seconds
        return counters

    def chosen(self) -> str | None:
        """The compressor that measurements chose; None where nothing was to be chosen."""
        handle, config = self.wrapped.handle, self.variant.config
        return (
            describe(Plan(handle.engine.configured.compressor, False))
            if handle and config and config.automatic
            else None
        )

    def over(self, reference: "Subject") -> dict[str, float]:
        """Step time over that of another variant, round by round: what slows a machine down for a while cancels."""
        pairs = zip(self.rounds, reference.rounds, strict=True)
        ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs]
        return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}

    def summary(self, references: "list[Subject]") -> dict[str, Any]:
        """What goes into the result, for one rank and step. Times in ms; None for what nobody counted."""
        a_step = {name: total / self.totals["steps"] for name, total in self.totals.items()}
        flat = [1000 * seconds for steps in self.rounds for seconds in steps]
        low, median, high = results.quantiles(flat, 0.25, 0.5, 0.75)
        shapes = [parameter.shape for parameter in self.model.parameters()]
        return {
            "variant": self.variant.spec,
            "step_ms": {"median": median, "q25": low, "q75": high},
            "over": {reference.variant.spec: self.over(reference) for reference in references},
            "formula_bytes": self.variant.wire_bytes(shapes, dist.get_world_size()),
            "counted_bytes": a_step["counted_bytes"] if self.wrapped.handle else None,
            "kernel_bytes": a_step["kernel_bytes"] if interface() != "lo" else None,
            "wire_ms": 1000 * a_step["wire_seconds"] if self.wrapped.handle else None,
            "codec_ms": 1000 * a_step["codec_seconds"] if self.wrapped.handle else None,
            "idle_wire": 1 - a_step["wire_seconds"] / a_step["exchange_seconds"] if self.wrapped.handle else None,
            "chosen": self.chosen(),
            "explained": self.wrapped.handle.explain() if self.wrapped.handle else None,
        }


def interface() -> str:
    """The network interface that gloo uses; "lo" when it was left to find one."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def sent_by_kernel() -> int:
    """Bytes that the kernel sent on the interface so far."""
    counter = Path("/sys/class/net", interface(), "statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """On every rank of a process group: the measurements, and what they were made under."""
    rank, world = dist.get_rank(), dist.get_world_size()
    train, _ = load_text()
    stream = batches(train, SIZES[args.model].block_size, args.batch_size, rank=rank)
    subjects = [Subject(variant, args.model, args.bucket_cap_mb) for variant in args.variants]
    with Progress(console=Console(stderr=True), disable=rank != 0, auto_refresh=False) as progress:
        task = progress.add_task("warm-up", total=len(subjects) * (1 + args.rounds))
        for subject in subjects:
            for _ in range(subject.variant.warm_up):
                subject.step(*next(stream))
            progress.update(task, advance=1, description=f"warm-up: {subject.variant.spec}", refresh=True)
        for number in range(1, args.rounds + 1):
            for subject in subjects:
                subject.round(stream, args.steps)
                description = f"round {number} of {args.rounds}: {subject.variant.spec}"
                progress.update(task, advance=1, description=description, refresh=True)
    predicted = predictions(subjects)
    for subject in subjects:
        if subject.wrapped.handle:
            subject.wrapped.handle.close()
    references = [subject for subject in subjects if subject.variant.spec in REFERENCES]
    setup = {
        **results.conditions(),
        "rate": args.rate,
        "hosts": world,
        "model": args.model,
        "parameters": sum(parameter.numel() for parameter in references[0].model.parameters()),
        "bucket cap": f"{args.bucket_cap_mb:g} MB, one bucket for torch:powersgd",
        "batch": f"{args.batch_size} x {SIZES[args.model].block_size} tokens a rank",
        "rounds": args.rounds,
        "steps a round": args.steps,
    }
    summaries = [
        {**subject.summary(references), "predicted_ms": predicted.get(subject.variant.spec)} for subject in subjects
    ]
    return {"command": results.command("benchmarks.steptime"), "conditions": setup, "variants": summaries}


def predictions(subjects: Sequence[Subject]) -> dict[str, float]:
    """What the cost model expects of each variant of commopt, in ms, by what the first automatic one has measured."""
    pilots = [subject.wrapped.handle.pilot for subject in subjects if subject.wrapped.handle]
    pilot = next((pilot for pilot in pilots if pilot is not None), None)
    workload = pilot.workload() if pilot is not None else None
    if pilot is None or workload is None or pilot.network is None:
        return {}
    network = pilot.network.scaled(pilot.factor)
    plans = {s.variant.spec: s.wrapped.handle.engine.configured for s in subjects if s.wrapped.handle}
    compressors = [part.compressor for plan in (Plan.uncompressed(), *plans.values()) for part in plan.parts]
    machine = measure_codecs(compressors, torch.device("cpu"), Wire(None))
    return {spec: 1000 * predict(plan, workload, network, machine).step for spec, plan in plans.items()}


HEADERS = (
    *("variant", "ms a step", "quartiles", "predicted", "over nocomm", "range", "over ddp", "range"),
    *("wire idle", "wire ms", "codec ms", "MB formula", "MB counted", "MB kernel"),
)


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`. A megabyte is 10^6 bytes, sent by one rank in one step."""

    def known(value: float | None, digits: int, unit: float = 1.0) -> str:
        return "" if value is None else f"{value / unit:.{digits}f}"

    def ratio(over: dict[str, float]) -> tuple[str, str]:
        return f"{over['median']:.2f}", f"{over['min']:.2f}-{over['max']:.2f}"

    return [
        (
            entry["variant"],
            f"{entry['step_ms']['median']:.0f}",
            f"{entry['step_ms']['q25']:.0f}-{entry['step_ms']['q75']:.0f}",
            known(entry.get("predicted_ms"), 0),
            *(text for reference in REFERENCES for text in ratio(entry["over"][reference])),
            known(entry.get("idle_wire"), 2),
            *(known(entry[name], 0) for name in ("wire_ms", "codec_ms")),
            *(known(entry[name], 3, 1e6) for name in ("formula_bytes", "counted_bytes", "kernel_bytes")),
        )
        for entry in result["variants"]
    ]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steptime",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it; none; or loopback")
    parser.add_argument("--hosts", type=int, default=2, help="one rank on each")
    default = [Variant.parse(spec) for spec in DEFAULT]
    parser.add_argument("--variants", type=Variant.parse, nargs="+", default=default, help="beside nocomm and ddp")
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--batch-size", type=int, default=5, help="windows of text a rank")
    parser.add_argument("--bucket-cap-mb", type=float, default=CommOptDDPStrategy.bucket_cap_mb, help="of every DDP")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each variant in a round")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args(arguments)
    asked = [variant for variant in args.variants if variant.spec not in REFERENCES]
    args.variants = [*map(Variant.parse, REFERENCES), *asked]
    return args


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        try:
            return on_each_host("benchmarks.steptime", open_lab(args.hosts, args.rate))
        except CommOptError as error:
            print(f"steptime: {error}", file=sys.stderr)
            return 2
    dist.init_process_group("gloo", timeout=TIMEOUT)
    result = measure(args)
    if dist.get_rank() == 0:
        title = f"{result['conditions']['hosts']} hosts, {result['conditions']['rate']}"
        results.publish(title, HEADERS, rows(result), result, args.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
