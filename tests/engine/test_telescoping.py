"""The sum of all that was delivered differs from the sum of all gradients by the last residual alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from commopt.compressors import available, create
from commopt.plan import Plan
from tests.engine.steps import exchange, gradients, make_engine, same_on_all_ranks, summed
from tests.workers import Workers

SHAPES = {"matrix": (30, 24), "vector": (77,), "tensor": (3, 5, 2, 4), "scalar": ()}
LONG = {"bf16", "int4", "topk", "powersgd"}  # one of each kind; and sums in bf16, whose rounding is lost for good


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in SHAPES])


def telescope(
    rank: int, world: int, name: str, options: dict[str, Any], steps: int, scales: tuple[float, ...] = (1.0,)
) -> float:
    """The relative error of the identity after ``steps``; the loss scale changes as told, by turns."""
    scale = scales[0]
    plan = Plan(create(name, **options), feedback=True)
    engine = make_engine(plan, SHAPES, (lambda: scale) if len(scales) > 1 else None)
    seen = torch.zeros_like(joined(gradients(rank, 0, SHAPES)))
    delivered = torch.zeros_like(seen)
    for step in range(steps):
        scale = scales[step // 10 % len(scales)]
        local = gradients(rank, step, SHAPES)
        seen += joined(local)
        # DDP regathers its buckets after the first step.
        buckets = [["tensor", "vector"], ["scalar", "matrix"]] if step == 0 else [list(SHAPES)]
        mean, usable = exchange(engine, {key: value * scale for key, value in local.items()}, buckets)
        assert usable
        delivered += joined(mean) / scale
    assert same_on_all_ranks([delivered])
    engine.settle()
    kept = summed(joined(engine.residuals.final())) / scale
    target = summed(seen) / world
    engine.close()
    return float((delivered + kept - target).norm() / target.norm())


@pytest.mark.parametrize("name", available())
def test_sums_telescope(workers: Workers, name: str) -> None:
    steps = 1000 if name in LONG else 200
    assert max(workers.run(telescope, 2, name=name, options={}, steps=steps)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("int8", {"stochastic": True}),
        ("onebit", {}),
        ("topk", {"density": 0.1}),
    ],
)
def test_sums_telescope_over_two_shots(workers: Workers, name: str, options: dict[str, Any]) -> None:
    assert Plan(create(name, **options), True).route(3) == "two_shot"
    assert max(workers.run(telescope, 3, name=name, options=options, steps=200)) <= 1e-4


@pytest.mark.parametrize("name", ["int4", "topk", "powersgd"])
def test_residuals_follow_a_loss_scale(workers: Workers, name: str) -> None:
    scales = (2.0**16, 2.0**15, 2.0**14, 2.0**17)
    assert max(workers.run(telescope, 2, name=name, options={}, steps=100, scales=scales)) <= 1e-5
