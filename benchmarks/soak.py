"""A training full of faults ends where the same training without faults does, and its ranks stay together.

    python -m benchmarks.soak --json docs/figures/soak.json

A small GPT is trained on real text, with compressed gradients and in checked mode, twice from the same weights on the
same batches: once undisturbed, and once with faults at random steps on random ranks. A step that was skipped is done
again, so that both take as many steps. All ranks compare a fingerprint of their parameters every few steps. Faults are:

    nan, inf     one element of a rank's gradient
    flip         one bit of what a rank receives
    scale        a rank's contribution times 100
    burst        the same three times in a row, for which the guard rolls back
    oom          a codec without memory, which a step without compression does not have
    disable, enable      a rank switches compression off or on, for all
"""

import argparse
import os
import random
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commopt
from benchmarks import results
from benchmarks.parity import LR_WARM_UP, evaluate
from benchmarks.variants import TIMEOUT, Variant
from commopt.guard import GuardConfig
from commopt.lab import on_each_rank
from commopt.resume.snapshot import RandomState, Stateful, fingerprint
from commopt.supervisor import Supervisor
from recipes.gpt.train import GPT, GPTConfig, batches, load_text, next_token_loss, warmup_cosine
from tests.faults.injector import At, Faults

MODEL = GPTConfig(block_size=64, n_layer=2, n_embd=64)
BUCKET_MB = 0.1  # several buckets
LIMIT = 0.005  # of the relative difference of the validation losses
SWITCHES = ("disable", "enable")
KINDS = ("nan", "inf", "flip", "scale", "oom", *SWITCHES)
BURST = 3  # spikes in a row that the guard takes for more than a spike
FACTOR = 100.0
CHECK_EVERY = 5  # steps
QUIET = 16  # steps without faults, after the guard knows enough to see a spike


@dataclass(frozen=True)
class Planned:
    """A fault, and the rank and the exchange that it strikes."""

    kind: str
    rank: int
    step: int
    bit: int  # that a flip damages

    def arm(self, at: At) -> None:
        """Does nothing for switches, which are no faults."""
        arms: dict[str, Callable[[], object]] = {
            "nan": at.nan_gradient,
            "inf": at.inf_gradient,
            "flip": lambda: at.flip_bit(self.bit),
            "scale": lambda: at.scale_payload(FACTOR),
            "burst": lambda: at.scale_payload(FACTOR),
            "oom": at.oom_in_compress,
        }
        arms.get(self.kind, lambda: None)()


def schedule(seed: int, world: int, steps: int, faults: int, first: int) -> list[Planned]:
    """Random faults, of all kinds about as many, a burst in 25; the same on all ranks. None before step ``first``."""
    numbers = random.Random(seed)
    bursts = -(-faults // 25)
    kinds = ["burst"] * bursts + [KINDS[index % len(KINDS)] for index in range(faults - bursts)]
    numbers.shuffle(kinds)
    places = sorted(numbers.sample(range(first, steps - BURST, BURST), faults))
    planned = []
    for kind, place in zip(kinds, places, strict=True):
        rank, bit = numbers.randrange(world), numbers.randrange(1 << 20)
        last = place + (BURST if kind == "burst" else 1)
        planned += [Planned(kind, rank, step, bit) for step in range(place, last)]
    return planned


def train(
    args: argparse.Namespace, seed: int, planned: Sequence[Planned], tokens: Tensor
) -> tuple[nn.Module, dict[str, Any]]:
    """The model after its training, and what was counted, the same on all ranks."""
    rank, config = dist.get_rank(), args.variant.config
    torch.manual_seed(seed)
    model = GPT(MODEL)
    ddp = DDP(model, bucket_cap_mb=BUCKET_MB)
    options = {"error_feedback": config.error_feedback, "timeout": config.timeout, **config.options}
    handle = commopt.attach(ddp, config.compressor, checked=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, LR_WARM_UP, args.steps))
    states: dict[str, Stateful] = {"model": ddp, "optimizer": optimizer, "rate": rate, "random": RandomState()}
    guard = GuardConfig(window=args.window, cool_down=args.cool_down)
    supervisor = Supervisor(handle, states, guard=guard)
    due = {fault.step: fault for fault in planned}
    struck, seen, skipped, actions = (Counter[str]() for _ in range(4))
    exchanges = divergences = history = position = noted = 0
    switch: tuple[str, str] | None = None  # a kind, and the plan before it takes effect
    with Faults(handle.engine) as faults:
        for fault in planned:
            fault.arm(faults.at(fault.rank, fault.step))
        while position < args.steps:
            now = due.pop(handle.engine.step + 1, None)
            strikes = faults.struck.total()
            if now is not None and now.kind in SWITCHES and now.rank == rank:
                handle.disable() if now.kind == "disable" else handle.enable()
                struck[now.kind] += 1
            batch_seed = 1_000_000 * seed + position
            inputs, targets = next(batches(tokens, MODEL.block_size, args.batch_size, batch_seed, rank))
            loss = next_token_loss(ddp(inputs), targets)
            supervisor.observe(loss)
            optimizer.zero_grad()
            loss.backward()
            taken = any(parameter.grad is not None for parameter in model.parameters())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if taken:
                rate.step()
            position = supervisor.end_step(position if taken else position - 1)

            record, events = handle.engine.record, supervisor.monitor.summary().events
            assert record is not None
            exchanges += 1
            if switch is not None:
                seen[switch[0]] += record.plan != switch[1]
                switch = None
            if now is not None and now.kind in SWITCHES:
                switch = (now.kind, record.plan)
            elif now is not None:
                struck[now.kind] += faults.struck.total() - strikes
                shown = not record.finite or record.corrupt or record.out_of_memory or len(events) > noted
                seen[now.kind] += shown
                skipped[now.kind] += not taken
            actions.update(event.action for event in events[noted:])
            noted = len(events)
            history = zlib.crc32(record.plan.encode(), history)
            if exchanges % CHECK_EVERY == 0 or position >= args.steps:
                divergences += not same_on_all_ranks([fingerprint(model.parameters()), history])
    counts = {
        kind: {"steps": _sum(struck[kind]), "seen": seen[kind], "skipped": skipped[kind]} for kind in (*KINDS, "burst")
    }
    stats = handle.stats()
    supervisor.close()
    handle.close()
    return model, {
        "exchanges": exchanges,
        "skipped": stats.skipped_steps,
        "compression": stats.compression_ratio,
        "actions": dict(actions),
        "divergences": divergences,
        "faults": counts,
    }


def same_on_all_ranks(values: Sequence[int]) -> bool:
    """Whether all ranks hold the same whole numbers."""
    both = torch.tensor([*values, *(-value for value in values)])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    high, low = both.chunk(2)
    return torch.equal(high, -low)


def _sum(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """On every rank: adds the runs to ``result``, and keeps the file up to date."""
    tokens, validation = load_text()
    for seed in args.seeds:
        start = time.perf_counter()
        planned = schedule(seed, dist.get_world_size(), args.steps, args.faults, args.window + QUIET)
        clean, undisturbed = train(args, seed, [], tokens)
        disturbed, run = train(args, seed, planned, tokens)
        reference, loss = (evaluate(model, validation, MODEL.block_size) for model in (clean, disturbed))
        run |= {"seed": seed, "val_loss": loss, "val_loss_without": reference, "difference": loss / reference - 1}
        run |= {"false_alarms": undisturbed["actions"], "seconds": time.perf_counter() - start}
        run["divergences"] += undisturbed["divergences"]
        result["runs"].append(run)
        if args.json and dist.get_rank() == 0:
            results.write(args.json, result)


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """A result without runs."""
    setup = {
        "ranks": args.ranks,
        "parameters": sum(parameter.numel() for parameter in GPT(MODEL).parameters()),
        "batch": f"{args.batch_size} x {MODEL.block_size} tokens a rank",
        "steps": args.steps,
        "faults": args.faults,
        "variant": args.variant.spec,
        "optimizer": f"AdamW, {args.lr:g} after {LR_WARM_UP} steps, cosine to a tenth, gradients clipped to 1",
        "guard": f"window of {args.window} steps, cool-down of {args.cool_down}",
    }
    conditions = {**results.conditions(), **setup}
    return {"command": results.command("benchmarks.soak"), "conditions": conditions, "runs": []}


HEADERS = ("seed", "validation loss", "without faults", "difference", "ranks apart", "verdict", "skipped", "actions")
FAULT_HEADERS = ("seed", "fault", "steps", "seen", "skipped")


def passed(run: dict[str, Any]) -> bool:
    """Whether ranks stayed together and the loss is near enough."""
    return bool(run["divergences"] == 0 and abs(run["difference"]) <= LIMIT)


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table of a result, under `HEADERS`."""
    return [
        (
            str(run["seed"]),
            f"{run['val_loss']:.4f}",
            f"{run['val_loss_without']:.4f}",
            f"{100 * run['difference']:+.2f} %",
            str(run["divergences"]),
            "pass" if passed(run) else "FAIL",
            f"{run['skipped']} of {run['exchanges']}",
            ", ".join(f"{count} {action}" for action, count in run["actions"].items()),
        )
        for run in result["runs"]
    ]


def fault_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What became of the faults, under `FAULT_HEADERS`."""
    return [
        (str(run["seed"]), kind, *(str(counts[column]) for column in ("steps", "seen", "skipped")))
        for run in result["runs"]
        for kind, counts in run["faults"].items()
    ]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--variant", type=Variant.parse, default="int4", help="a compressor of commopt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of text a rank")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--window", type=int, default=128, help="steps that the guard knows before it sees a spike")
    parser.add_argument("--cool-down", type=int, default=50, help="steps without compression after an alarm")
    parser.add_argument("--json", type=Path, help="where to write the result, after each seed")
    args = parser.parse_args(arguments)
    if args.variant.config is None:
        parser.error("--variant takes a compressor of commopt")
    if (args.steps - args.window - QUIET - BURST) // BURST < args.faults:
        parser.error("too many faults for so few steps")
    return args


def main() -> int:
    args = parse_args()
    if "RANK" not in os.environ:
        return on_each_rank("benchmarks.soak", args.ranks)
    warnings.simplefilter("ignore", commopt.CommOptWarning)  # of which there is one for each kind of fault
    dist.init_process_group("gloo", timeout=TIMEOUT)
    result = begin(args)
    measure(args, result)
    if dist.get_rank() == 0:
        results.show("", HEADERS, rows(result))
        results.show("", FAULT_HEADERS, fault_rows(result))
    dist.destroy_process_group()
    return 0 if all(map(passed, result["runs"])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
