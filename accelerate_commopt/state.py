"""The state of commopt inside the folder of a checkpoint: a file a rank, and one that names the save.

    <folder>/commopt.json                              which save belongs to this checkpoint
    <folder>/exchange.commopt/<save_id>/rank-...       see `commopt.resume.checkpoint`

Inside, since both Accelerate and transformers rotate checkpoints by the names of folders.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commopt import CheckpointError
from commopt.resume import checkpoint as sidecar
from commopt.resume.meeting import meet

REFERENCE = "commopt.json"
PATIENCE = 60.0  # seconds that ranks wait for each other
_NAME = "exchange"
_REMEDY = "Save and load on every rank, not only on the main process."


class Loaded(NamedTuple):
    """What this rank goes on from: a state a model; and of each, what other ranks had, where their number changed."""

    models: Sequence[Mapping[str, Any]]
    parts: Sequence[Sequence[Mapping[str, Any]] | None]


def come_together(rank: int) -> None:
    """Waits until all ranks are here, for what only all of them can do.

    Raises:
        CheckpointError: on the ranks that came, naming those that did not within a minute.
    """
    meet(None, f"{rank}", PATIENCE, _REMEDY)


def save(folder: str, models: Sequence[Mapping[str, Any]], rank: int, seconds: float) -> None:
    """Writes the states of this rank into ``folder``. Call it on all ranks.

    Raises:
        CheckpointError: a rank did not come, or could not write its file; on all ranks that came.
    """
    saved = sidecar.save_together(os.path.join(folder, _NAME), {"models": list(models)}, None, seconds=seconds)
    problem = ""
    if rank == 0:
        try:
            path = Path(folder) / REFERENCE
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(sidecar.reference(saved.save_id)))
            os.replace(temporary, path)
        except OSError as error:
            problem = f"{folder}: {error}"
    said = meet(None, problem, PATIENCE, _REMEDY)
    if said[0]:
        raise CheckpointError(f"the state of commopt cannot be saved: {said[0]}")
    sidecar.prune(saved.checkpoint, keep=saved.save_id)


def load(folder: str, models: int, world: int) -> Loaded | None:
    """What this rank goes on from; None where the checkpoint has nothing, on all ranks alike. Call it on all ranks.

    Raises:
        CheckpointError: some rank's part cannot be used; raised on every rank.
    """
    carried: object = None
    try:
        carried = json.loads((Path(folder) / REFERENCE).read_text())
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        carried = error  # refused there, on all ranks
    found = sidecar.load_together(os.path.join(folder, _NAME), carried, None, seconds=PATIENCE)
    if found is None:
        return None
    saved = len(found.tree["models"])
    if saved != models:
        raise CheckpointError(f"{folder} holds the state of {saved} models, and {models} are prepared.")
    if found.world == world:
        return Loaded(found.tree["models"], [None] * models)
    return Loaded(found.tree["models"], [[part["models"][index] for part in found.parts] for index in range(models)])
