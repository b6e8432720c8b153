"""False alarms and detection delays of the guard, on simulated training curves.

python -m benchmarks.guard       # writes docs/figures/guard.json, a few minutes on two cores
"""

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks import results
from commopt.guard import Guard, GuardConfig
from commopt.records import StepRecord

STEPS = 10_000
JUMP, JUMP_WITHIN = 0.15, 20
SLOPE, SLOPE_WITHIN = 0.0005, 150
ONSETS = (500, 2000, 8000)
HEADERS = (
    "noise of the loss",
    "spike",
    "drift",
    "all",
    "worst curve",
    "jump: steps",
    "in time",
    *(f"{header}{onset}" for onset in ONSETS for header in ("drift from ", "in time, ")),
    "onset held",
)


def power(steps: int) -> Tensor:
    """Falls as a language model's loss does."""
    return 1.7 + 9 / (1 + torch.arange(steps, dtype=torch.float64) / 10).sqrt()


def cosine(steps: int) -> Tensor:
    """A part of the loss goes with a learning rate of 200 steps of warm-up and a cosine."""
    t = torch.arange(steps, dtype=torch.float64)
    rate = (t / 200).clamp(max=1) * (1 + torch.cos(math.pi * t / steps)) / 2
    return 2.5 + 8 / (1 + t / 20).sqrt() + 0.15 * rate


def flat(steps: int) -> Tensor:
    """Has converged."""
    return torch.full((steps,), 3.0, dtype=torch.float64)


def sawtooth(steps: int) -> Tensor:
    """Rises by 2 % within an epoch of 1000 steps and falls by 6 % between two."""
    t = torch.arange(steps)
    epoch, part = t // 1000, (t % 1000).double() / 1000
    fallen: Tensor = 0.96 ** epoch.double()
    return fallen * (1 + 0.02 * part) * 3


CURVES: dict[str, Callable[[int], Tensor]] = {"power": power, "cosine": cosine, "flat": flat, "sawtooth": sawtooth}


def _gauss(size: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def gaussian(steps: int, generator: torch.Generator) -> Tensor:
    """Standard deviation 1."""
    return _gauss((steps,), generator)


def laplace(steps: int, generator: torch.Generator) -> Tensor:
    """Standard deviation 1."""
    return _gauss((2, 2, steps), generator).prod(0).sum(0) / math.sqrt(2)  # two products of Gaussians


def student(freedom: int) -> Callable[[int, torch.Generator], Tensor]:
    """Scale 1; the standard deviation is larger, 1.7 for 3 degrees of freedom."""

    def noise(steps: int, generator: torch.Generator) -> Tensor:
        values = _gauss((freedom + 1, steps), generator)
        return values[0] / values[1:].square().mean(0).sqrt()

    return noise


def correlated(coefficient: float) -> Callable[[int, torch.Generator], Tensor]:
    """First-order autoregressive, standard deviation 1."""

    def noise(steps: int, generator: torch.Generator) -> Tensor:
        values = _gauss((steps,), generator).tolist()
        for i in range(1, steps):
            values[i] = coefficient * values[i - 1] + math.sqrt(1 - coefficient**2) * values[i]
        return torch.tensor(values, dtype=torch.float64)

    return noise


@dataclass(frozen=True)
class Noise:
    """Relative noise of the loss."""

    make: Callable[[int, torch.Generator], Tensor]
    scale: float


NOISES = {
    "Gaussian 1 %": Noise(gaussian, 0.01),
    "Gaussian 2 %": Noise(gaussian, 0.02),
    "Gaussian 3 %": Noise(gaussian, 0.03),
    "Gaussian 5 %": Noise(gaussian, 0.05),
    "Gaussian 10 %": Noise(gaussian, 0.10),
    "Laplace 3 %": Noise(laplace, 0.03),
    "Laplace 5 %": Noise(laplace, 0.05),
    "Student t3 2 %": Noise(student(3), 0.02),
    "Student t3 3 %": Noise(student(3), 0.03),
    "AR(1) 0.5, 2 %": Noise(correlated(0.5), 0.02),
    "AR(1) 0.5, 3 %": Noise(correlated(0.5), 0.03),
    "AR(1) 0.8, 2 %": Noise(correlated(0.8), 0.02),
    "AR(1) 0.9, 2 %": Noise(correlated(0.9), 0.02),
}


def clean(curve: str, noise: str, seed: int, steps: int = STEPS) -> Counter[str]:
    """False alarms by detector in a run that goes well."""
    return Counter(cause for _, cause, _ in _judge(CURVES[curve](steps).log(), noise, seed))


def found(trouble: str, start: int, noise: str, seed: int, wait: int = 400) -> tuple[int, bool]:
    """Steps from the beginning of a trouble until the guard falls or rolls back, at most ``wait``; and whether the
    onset that it names is no later than that beginning.

    Args:
        trouble: ``"jump"`` by ``JUMP``, or ``"drift"`` by ``SLOPE`` a step from the level at ``start``.
        start: the step before the first that is in trouble.
    """
    levels = power(start + wait).log()
    after = torch.arange(1, wait, dtype=torch.float64)
    levels[start + 1 :] = levels[start] + (math.log(1 + JUMP) if trouble == "jump" else SLOPE * after)
    for step, _, onset in _judge(levels, noise, seed, skips=False):
        if step > start:
            return step - start, onset is not None and onset <= start + 1
    return wait, False


def _judge(levels: Tensor, noise: str, seed: int, skips: bool = True) -> Iterable[tuple[int, str, int | None]]:
    """Step, detector and onset of each alarm. Cool-downs are as short as can be, so that alarms do not hide others."""
    generator = torch.Generator().manual_seed(seed)
    steps, kind = len(levels), NOISES[noise]
    losses = (levels + kind.scale * kind.make(steps, generator)).exp().tolist()
    # Gradient norms are log-normal, and more: heavy tails, with outliers to several times the median.
    norms = (0.15 * student(5)(steps, generator) - 0.1 * torch.arange(1, steps + 1).log()).exp().tolist()
    guard = Guard(GuardConfig(cool_down=1, roll_backs=1000))
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        verdict = guard.step(record(step, loss, norm), compressed=guard.mode == "armed")
        if verdict.action in ("fall_back", "roll_back", "stop") or (skips and verdict.action == "skip"):
            yield step, verdict.reason.partition(":")[0], verdict.onset


def record(step: int, loss: float, norm: float) -> StepRecord:
    return StepRecord(step, "topk", True, False, loss, norm, 0.1, 0.0, 0.0, 0.0, 1.0, 1.0)


def _measure(task: tuple[str, tuple[Any, ...]]) -> Any:
    kind, arguments = task
    return clean(*arguments) if kind == "clean" else found(kind, *arguments)


def measure(noise: str, seeds: int, pool: Pool) -> dict[str, Any]:
    """What a line of the table shows."""
    entry: dict[str, Any] = {"noise": noise, "false": {}, "jump": {}, "drift": {}}
    for curve in CURVES:
        alarms: Counter[str] = sum(pool.map(_measure, _tasks("clean", curve, noise, seeds=seeds)), Counter())
        entry["false"][curve] = {cause: alarms[cause] / seeds for cause in ("spike", "drift")}
    for trouble, limit in (("jump", JUMP_WITHIN), ("drift", SLOPE_WITHIN)):
        for start in ONSETS:
            finds = pool.map(_measure, _tasks(trouble, start, noise, seeds=2 * seeds))
            delays = [delay for delay, _ in finds]
            middle, late = results.quantiles(delays, 0.5, 0.95)
            entry[trouble][str(start)] = {
                "median": middle,
                "q95": late,
                "in_time": sum(delay <= limit for delay in delays) / len(delays),
                "onset_held": sum(held for _, held in finds) / len(finds),
            }
    return entry


def _tasks(kind: str, *arguments: Any, seeds: int) -> list[tuple[str, tuple[Any, ...]]]:
    return [(kind, (*arguments, seed)) for seed in range(seeds)]


def microseconds() -> float:
    """What one step of the guard takes, of a processor."""
    guard = Guard(GuardConfig())
    generator = torch.Generator().manual_seed(0)
    losses = (0.02 * gaussian(STEPS, generator)).exp().tolist()
    records = [record(step, loss, loss) for step, loss in enumerate(losses)]
    start = time.process_time()
    for entry in records:
        guard.step(entry, compressed=True)
    return 1e6 * (time.process_time() - start) / STEPS


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table."""
    return [_row(entry) for entry in result["noises"]]


def _row(entry: dict[str, Any]) -> list[str]:
    curves = entry["false"]
    causes = {cause: sum(counts[cause] for counts in curves.values()) / len(curves) for cause in ("spike", "drift")}
    worst = max(curves, key=lambda curve: float(sum(curves[curve].values())))
    jumps = entry["jump"].values()
    return [
        entry["noise"],
        *(f"{value:.2f}" for value in (causes["spike"], causes["drift"], sum(causes.values()))),
        f"{sum(curves[worst].values()):.2f} {worst}",
        f"{max(jump['median'] for jump in jumps):.0f} ({max(jump['q95'] for jump in jumps):.0f})",
        f"{min(jump['in_time'] for jump in jumps):.0%}",
        *(cell for drift in entry["drift"].values() for cell in (_delay(drift), f"{drift['in_time']:.0%}")),
        f"{min(find['onset_held'] for kind in ('jump', 'drift') for find in entry[kind].values()):.0%}",
    ]


def _delay(find: dict[str, float]) -> str:
    return f"{find['median']:.0f} ({find['q95']:.0f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=list(NOISES))
    parser.add_argument("--seeds", type=int, default=20, help="runs a curve and noise; twice as many for detection")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=Path("docs/figures/guard.json"))
    args = parser.parse_args()
    conditions = results.conditions() | {
        "steps a run": STEPS,
        "runs": f"{args.seeds} a curve and noise, {2 * args.seeds} a start of trouble and noise",
        "microseconds a step": round(microseconds(), 1),
    }
    result: dict[str, Any] = {"command": results.command("benchmarks.guard"), "conditions": conditions, "noises": []}
    with get_context("spawn").Pool(args.processes) as pool:
        for noise in track(args.noises, "simulating"):
            result["noises"].append(measure(noise, args.seeds, pool))
            results.write(args.json, result)
    results.show("Guard", HEADERS, rows(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
