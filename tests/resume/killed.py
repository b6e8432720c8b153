"""A program that overwrites a checkpoint and is killed on the way: once before each call that changes the disk.

python killed.py FOLDER     writes FOLDER/<n>/last.ckpt for every place n, and prints the number of places
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from commopt.resume.checkpoint import prune, reference, save

OLD, NEW, WORLD = "0" * 12, "1" * 12, 2


def write(checkpoint: Path, save_id: str) -> None:
    """What all ranks do, one after the other."""
    for rank in range(WORLD):
        save(checkpoint, {"of": save_id, "rank": torch.tensor(rank)}, rank=rank, world=WORLD, save_id=save_id)
    checkpoint.with_suffix(".part").write_text(json.dumps(reference(save_id)))
    os.replace(checkpoint.with_suffix(".part"), checkpoint)
    prune(checkpoint, keep=save_id)


def die_before(place: int) -> None:
    """Ends this process before the call number ``place`` that changes the disk, counted from 0."""
    calls = 0

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == place:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*args, **kwargs)

        return wrapper

    for name in ("mkdir", "replace", "fsync", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    safetensors.torch.save_file = deadly(safetensors.torch.save_file)


def main(folder: Path) -> int:
    place = 0
    while True:
        checkpoint = folder / str(place) / "last.ckpt"
        checkpoint.parent.mkdir()
        write(checkpoint, OLD)
        child = os.fork()
        if child == 0:
            die_before(place)
            write(checkpoint, NEW)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status) or place
        place += 1


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
