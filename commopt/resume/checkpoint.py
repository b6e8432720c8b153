"""What a rank needs to go on exactly, in a sidecar beside the trainer's checkpoint.

    <checkpoint>.commopt/<save_id>/rank-00000-of-00002.safetensors

A file holds one tree: its tensors, and all else as JSON in the metadata. Nothing in it is executed. The trainer's own
checkpoint carries ``reference(save_id)`` alone. On every rank, for a path that may hold an earlier checkpoint:

    saved = save_together(path, tree, group)        # returns when the sidecars of all ranks are on disk
    ...                                             # one rank writes ``path``, naming saved.save_id
    prune(saved.checkpoint, keep=saved.save_id)     # that rank, then: the sidecars of what was overwritten
    ...
    found = load_together(path, carried, group)     # what that checkpoint carries of us; None where it has nothing

Wherever this is killed, the checkpoint at ``path`` finds the sidecars that it names.
"""

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import safetensors.torch
import torch.distributed as dist
from torch import Tensor

from commopt.errors import CheckpointError
from commopt.resume.meeting import SHOWN, meet, some
from commopt.resume.trees import Tree, digest, pack, unpack

VERSION = 1
PathLike = str | os.PathLike[str]

_SAVE_ID = re.compile("[0-9a-f]{12}")
_RANK_FILE = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.safetensors")
_WRITING = 1800.0  # seconds that ranks which came are given to write


@dataclass(frozen=True)
class Sidecar:
    """What `load` found for this rank.

    Args:
        tree: what this rank goes on from; after a change of the world size, what an old rank had.
        parts: the trees whose residuals add up to those of this rank: over all ranks, each tree that was saved is in
            exactly one ``parts``. Residuals are in units of the mean gradient, so that no sum needs to be rescaled.
            Empty where there are more ranks than were saved: this rank owes nothing then, and ``tree`` lends the rest.
        world: the number of ranks that saved.
    """

    tree: Tree
    parts: list[Tree]
    world: int


@dataclass(frozen=True)
class Saved:
    """What all ranks agreed on: the id, and the path of the checkpoint, which is that of rank 0."""

    save_id: str
    checkpoint: str


def reference(save_id: str) -> dict[str, Any]:
    """What the trainer's checkpoint carries; ``torch.load(weights_only=True)`` reads it."""
    return {"version": VERSION, "save_id": save_id}


def save_id_of(carried: object) -> str:
    """The save_id in what a checkpoint carries.

    Raises:
        CheckpointError: it is not what `reference` makes, or by a newer version.
    """
    if not isinstance(carried, Mapping):
        raise CheckpointError(f"the checkpoint's reference to commopt's state is a {type(carried).__name__}.")
    _check_version(carried.get("version"), "the checkpoint")
    return _checked_id(carried.get("save_id"))


def save(checkpoint: PathLike, tree: Tree, *, rank: int, world: int, save_id: str) -> None:
    """Writes the sidecar file of this rank, whole or not at all.

    Raises:
        CheckpointError: the tree holds what cannot be saved, or the file cannot be written.
    """
    folder = _folder(checkpoint) / _checked_id(save_id)
    value, tensors = pack(tree)
    named = {str(index): tensor for index, tensor in enumerate(_apart(tensors))}
    head = {"version": VERSION, "save_id": save_id, "rank": rank, "world": world, "tree": value}
    path = folder / _file(rank, world)
    temporary = path.with_suffix(".tmp")
    try:
        text = json.dumps(head, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {"commopt": text, "sha256": digest(tensors, text.encode()).hex()}
        safetensors.torch.save_file(named, temporary, metadata)
        _sync(temporary)
        os.replace(temporary, path)
        for entry in (folder, folder.parent, folder.parent.parent):
            with suppress(OSError):  # not every file system can
                _sync(entry)
    except Exception as error:  # the library's own errors, those of the file system, and integers beyond JSON
        with suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"rank {rank} cannot write {path}: {type(error).__name__}: {error}") from error


def load(checkpoint: PathLike, save_id: str, *, rank: int, world: int) -> Sidecar | None:
    """What was saved for this rank, tensors on the CPU; None if this checkpoint has no sidecar on this host.

    With the world size that was saved, only this rank's file is read. With another, rank ``r`` takes the old ranks
    ``j`` with ``j % world == r``.

    Raises:
        CheckpointError: files are missing, damaged, foreign or of a newer version.
    """
    folder = _find(checkpoint, _checked_id(save_id))
    if folder is None:
        return None
    with _explained(folder):
        found = [(int(match[1]), int(match[2])) for name in os.listdir(folder) if (match := _RANK_FILE.fullmatch(name))]
    if (rank, world) in found:
        tree = _read(folder, save_id, rank, world)
        return Sidecar(tree, [tree], world)

    worlds = {of for _, of in found}
    if len(worlds) > 1:
        raise CheckpointError(f"{folder} holds files of {sorted(worlds)} ranks: keep those of one save.")
    saved = worlds.pop() if worlds else world
    ranks = {one for one, _ in found}
    missing = list(islice((one for one in range(saved) if one not in ranks), SHOWN + 1))
    if missing:
        raise CheckpointError(
            f"{folder} lacks the state of rank {some(missing)} of {saved}. Copy the files of all ranks into it, from "
            "the disks of all hosts if they share none; or remove it, to go on from the checkpoint alone."
        )
    parts = [_read(folder, save_id, old, saved) for old in range(saved) if old % world == rank]
    return Sidecar(parts[0] if parts else _read(folder, save_id, 0, saved), parts, saved)


def prune(checkpoint: PathLike, keep: str) -> None:
    """Removes the sidecars of earlier checkpoints at the same path. Call it on the rank that wrote the trainer's file,
    when that is in place, or on all after a barrier behind it. What cannot be removed stays."""
    folder = _folder(checkpoint)
    if folder.is_symlink() or not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name != keep and _SAVE_ID.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)  # follows no link


def remove(checkpoint: PathLike) -> None:
    """Removes all sidecars of a checkpoint that was removed. Call it on one rank or on all."""
    shutil.rmtree(_folder(checkpoint), ignore_errors=True)


def save_together(checkpoint: PathLike, tree: Tree, group: dist.ProcessGroup | None, *, seconds: float = 60.0) -> Saved:
    """Writes the sidecars of all ranks, and returns when all are on disk. Call it on every rank.

    Args:
        checkpoint: where the trainer's file will be. That of rank 0 counts, which writes it: trainers put metrics into
            names, and ranks may differ in them.
        seconds: how long to wait for ranks to come. For the writing of those that did, the wait is half an hour.

    Raises:
        CheckpointError: a rank did not come, or could not write; on every rank that did come.
    """
    saved = agree_on_save(checkpoint, group, seconds=seconds)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    failure = ""
    try:
        save(saved.checkpoint, tree, rank=rank, world=world, save_id=saved.save_id)
    except CheckpointError as error:
        failure = str(error)[:600]
    remedy = "The disk is too slow, or the rank died; the checkpoint before this one is whole."
    failures = [text for text in meet(group, failure, _WRITING, remedy) if text]
    if failures:
        raise CheckpointError(" | ".join(failures[:4]))
    return saved


def load_together(
    checkpoint: PathLike, carried: object, group: dist.ProcessGroup | None, *, seconds: float = 60.0
) -> Sidecar | None:
    """What was saved for this rank, see `load`; None on all ranks where one of them has nothing. Call it on every rank.

    Args:
        carried: what `reference` made, as the checkpoint carries it; None where it carries nothing.
        seconds: how long to wait for ranks to come.

    Raises:
        CheckpointError: a rank did not come, or cannot use its part; on every rank that did come.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found, failure = None, ""
    try:
        if carried is not None:
            found = load(checkpoint, save_id_of(carried), rank=rank, world=world)
    except CheckpointError as error:
        failure = f"rank {rank}: {error}"
    said = meet(group, failure or ("found" if found else "nothing"), seconds, "Load on every rank.")
    failures = [text for text in said if text not in ("found", "nothing")]
    if failures:
        raise CheckpointError(failure or failures[0])
    return None if "nothing" in said else found


def agree_on_save(checkpoint: PathLike, group: dist.ProcessGroup | None, *, seconds: float = 60.0) -> Saved:
    """Meets the other ranks, and gives all of them the same new save_id and the path of rank 0. Call it on every rank.

    Raises:
        CheckpointError: on the ranks that came, naming those that did not within ``seconds``.
    """
    remedy = "Call save on every rank, not only on the main process; nothing was saved."
    word = json.dumps([secrets.token_hex(6), os.fspath(checkpoint)])
    save_id, path = json.loads(meet(group, word, seconds, remedy)[0])
    return Saved(_checked_id(save_id), path)


def _folder(checkpoint: PathLike) -> Path:
    if "://" in os.fspath(checkpoint):
        raise CheckpointError(f"{os.fspath(checkpoint)} is not a local path: save to one, and copy the folder.")
    path = Path(checkpoint)
    return path.with_name(path.name + ".commopt")


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The format holds no shared memory: what overlaps is copied."""
    apart, end = list(tensors), 0
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr()):
        tensor = tensors[index]
        if tensor.data_ptr() < end:
            apart[index] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart


def _file(rank: int, world: int) -> str:
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def _find(checkpoint: PathLike, save_id: str) -> Path | None:
    """The folder of a save, beside the checkpoint or beside what it links to."""
    for folder in (_folder(checkpoint), _folder(os.path.realpath(checkpoint))):
        inside = folder / save_id
        if folder.is_symlink() or inside.is_symlink():
            raise CheckpointError(f"{inside} is a link: put the folder itself there.")
        if inside.is_dir():
            return inside
    return None


def _read(folder: Path, save_id: str, rank: int, world: int) -> Tree:
    path = folder / _file(rank, world)
    with _explained(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError("a link, or no file")
        data = path.read_bytes()  # not mapped: what is loaded must outlive the file
        named = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        text = metadata["commopt"]
        tensors = [named[str(index)] for index in range(len(named))]
        head = json.loads(text, parse_constant=_refuse)
        _check_version(head["version"], "it")
        if metadata["sha256"] != digest(tensors, text.encode()).hex():
            raise CheckpointError("its checksum does not fit")
        if (head["save_id"], head["rank"], head["world"]) != (save_id, rank, world):
            raise CheckpointError("it belongs to another save or rank")
        return unpack(head["tree"], tensors)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a foreign file becomes one error."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(
            f"{path} cannot be used: {reason}. Go on from another checkpoint, or remove {path.parent} to go on from "
            "this one without the state of commopt."
        ) from error


def _check_version(version: object, where: str) -> None:
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{where} was written by a newer commopt (version {version} of the state): update commopt"
        )
    if version != VERSION:
        raise CheckpointError(f"{where} carries no state that commopt knows")


def _checked_id(save_id: object) -> str:
    if isinstance(save_id, str) and _SAVE_ID.fullmatch(save_id):
        return save_id
    raise CheckpointError(f"{str(save_id)[:40]!r} is not the name of a save: 12 hexadecimal digits.")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
