"""What the engine resumes from, checked before anything is changed: it may come from outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.errors import CheckpointError

KINDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "plan": str,
    "scale": (int, float),
    "disabled": bool,
    "owed": bool,
    "layout": list,
    "residuals": dict,
    "warm": dict,
    "fidelity": dict,
}


@dataclass
class LoadedState:
    """Tensors of a checked state, by name."""

    residuals: dict[str, Tensor]
    warm: dict[str, Tensor]


def check_state(
    state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], shapes: Mapping[str, torch.Size]
) -> LoadedState:
    """Warm starts of ``state`` and the sum of the residuals of ``parts``.

    Raises:
        CheckpointError: one is not the state of a model with parameters of these shapes.
    """
    for each in (state, *parts):
        for key, kind in KINDS.items():
            if not isinstance(each.get(key), kind):
                raise _foreign(f"{key!r} is missing or of another type")
        for name, residual in each["residuals"].items():
            _check_residual(name, residual, shapes)
    if not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in state["layout"]):
        raise _foreign("'layout' does not list parameter names")
    if not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in state["warm"].items()):
        raise _foreign("'warm' does not hold tensors by name")
    _check_fidelity(state["fidelity"])
    residuals: dict[str, Tensor] = {}
    for part in parts:
        for name, residual in part["residuals"].items():
            residuals[name] = residuals[name] + residual if name in residuals else residual
    return LoadedState(residuals, dict(state["warm"]))


def _foreign(reason: str) -> CheckpointError:
    return CheckpointError(f"this is no state of an exchange: {reason}. Use another checkpoint.")


def _check_fidelity(state: Mapping[str, Any]) -> None:
    if not isinstance(state.get("steps"), int) or not isinstance(state.get("sums"), list):
        raise _foreign("'fidelity' holds no sums")
    for entry in state["sums"]:
        names, pair = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        right = isinstance(pair, Tensor) and pair.dtype == torch.float32 and pair.ndim == 2 and len(pair) == 2
        if not right or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _foreign("'fidelity' does not hold pairs of sums by parameter names")


def _check_residual(name: object, residual: object, shapes: Mapping[str, torch.Size]) -> None:
    if name not in shapes:
        raise CheckpointError(f"the checkpoint holds a residual of {name!r}, which is no parameter of this model.")
    if not isinstance(residual, Tensor) or residual.dtype != torch.float32 or residual.shape != shapes[str(name)]:
        raise CheckpointError(
            f"the residual of {name!r} in the checkpoint is not float32 {list(shapes[str(name)])}: another model's."
        )
    if not bool(residual.isfinite().all()):
        raise CheckpointError(f"the residual of {name!r} in the checkpoint is not finite: use an earlier checkpoint.")
