"""The sidecar: what is loaded is what was saved, and a file that is not what it should be is refused."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.errors import CheckpointError
from commopt.resume.checkpoint import load, prune, reference, remove, save, save_id_of
from commopt.resume.snapshot import RandomState
from commopt.resume.trees import digest
from tests.resume.cases import same, trees

ID, OTHER = "0123456789ab", "ba9876543210"
TREE = {
    "residuals": {"weight": torch.arange(6.0).view(2, 3)},
    "steps": 7,
    "losses": [0.1, float("nan")],
    3: ("a", None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "last.ckpt"


def file(checkpoint: Path, rank: int = 0, world: int = 1, save_id: str = ID) -> Path:
    return Path(f"{checkpoint}.commopt", save_id, f"rank-{rank:05d}-of-{world:05d}.safetensors")


def save_world(checkpoint: Path, world: int, save_id: str = ID) -> None:
    for rank in range(world):
        save(checkpoint, {"rank": rank}, rank=rank, world=world, save_id=save_id)


@given(tree=trees)
@settings(deadline=None)
def test_round_trip_is_exact(folder: Path, tree: Any) -> None:
    save(folder / "a.ckpt", tree, rank=0, world=1, save_id=ID)
    loaded = load(folder / "a.ckpt", ID, rank=0, world=1)
    assert loaded is not None
    assert same(loaded.tree, tree)
    assert loaded.world == 1


def test_shared_memory_and_views_are_saved(checkpoint: Path) -> None:
    buffer = torch.arange(8.0)
    tree = {"whole": buffer, "again": buffer, "front": buffer[:4], "back": buffer[4:], "wide": buffer[:1].expand(3)}
    save(checkpoint, tree, rank=0, world=1, save_id=ID)
    loaded = load(checkpoint, ID, rank=0, world=1)
    assert loaded is not None
    assert same(loaded.tree, tree)
    loaded.tree["whole"].zero_()
    assert loaded.tree["again"].equal(buffer)


def test_random_state_goes_through(checkpoint: Path) -> None:
    state = RandomState().state_dict()
    save(checkpoint, state, rank=0, world=1, save_id=ID)
    loaded = load(checkpoint, ID, rank=0, world=1)
    assert loaded is not None
    RandomState().load_state_dict(loaded.tree)
    assert same(RandomState().state_dict(), state)
    assert same(copy.deepcopy(loaded).tree, state)


def test_loaded_tensors_outlive_their_file(checkpoint: Path) -> None:
    save(checkpoint, TREE, rank=0, world=1, save_id=ID)
    loaded = load(checkpoint, ID, rank=0, world=1)
    file(checkpoint).write_bytes(b"")
    assert loaded is not None
    assert same(loaded.tree, TREE)
    loaded.tree["residuals"]["weight"].add_(1)


def test_the_reference_is_loaded_as_weights_only(tmp_path: Path) -> None:
    torch.save({"commopt": reference(ID)}, tmp_path / "a.ckpt")
    assert save_id_of(torch.load(tmp_path / "a.ckpt", weights_only=True)["commopt"]) == ID


@pytest.mark.parametrize(
    ("carried", "said"),
    [
        ({"version": 2, "save_id": ID}, "newer commopt"),
        ({"version": True, "save_id": 0}, "12 hexadecimal"),
        ({"version": "1"}, "knows"),
        ({"version": 1}, "12 hexadecimal"),
        ({"version": 1, "save_id": "../../etc/pwd"}, "12 hexadecimal"),
        ({"version": 1, "save_id": ID + "\n"}, "12 hexadecimal"),
        ([ID], "is a list"),
    ],
)
def test_a_foreign_reference_is_refused(carried: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        save_id_of(carried)


def test_a_save_id_is_no_path(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="12 hexadecimal"):
        save(checkpoint, TREE, rank=0, world=1, save_id="../0123456789")
    with pytest.raises(CheckpointError, match="12 hexadecimal"):
        load(checkpoint, "..", rank=0, world=1)


def test_a_checkpoint_elsewhere_than_on_disk_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a local path"):
        save("s3://bucket/last.ckpt", TREE, rank=0, world=1, save_id=ID)


def test_without_a_sidecar_there_is_none(checkpoint: Path) -> None:
    assert load(checkpoint, ID, rank=0, world=2) is None
    save_world(checkpoint, 2, OTHER)
    assert load(checkpoint, ID, rank=0, world=2) is None


def test_a_link_to_a_checkpoint_finds_its_sidecar(checkpoint: Path) -> None:
    save(checkpoint, TREE, rank=0, world=1, save_id=ID)
    checkpoint.touch()
    link = checkpoint.with_name("link.ckpt")
    link.symlink_to(checkpoint)
    loaded = load(link, ID, rank=0, world=1)
    assert loaded is not None
    assert same(loaded.tree, TREE)


def test_prune_and_remove(checkpoint: Path) -> None:
    for save_id in (ID, OTHER):
        save_world(checkpoint, 2, save_id)
    folder = file(checkpoint).parent.parent
    (folder / "notes").mkdir()
    prune(checkpoint, keep=OTHER)
    assert sorted(os.listdir(folder)) == sorted([OTHER, "notes"])
    remove(checkpoint)
    assert not folder.exists()
    prune(checkpoint, keep=OTHER)
    remove(checkpoint)


def test_prune_and_remove_follow_no_link(checkpoint: Path, tmp_path: Path) -> None:
    save_world(checkpoint, 1)
    precious = tmp_path / "precious"
    (precious / OTHER).mkdir(parents=True)
    folder = file(checkpoint).parent.parent
    (folder / OTHER).symlink_to(precious)
    prune(checkpoint, keep=ID)
    other = tmp_path / "b.ckpt"
    Path(f"{other}.commopt").symlink_to(precious)
    prune(other, keep=ID)
    remove(other)
    assert (precious / OTHER).is_dir()


# Another world size


@pytest.mark.parametrize(("saved", "now"), [(4, 2), (3, 2), (2, 3), (1, 4), (4, 1)])
def test_resize_deals_each_old_rank_to_one_new_rank(checkpoint: Path, saved: int, now: int) -> None:
    save_world(checkpoint, saved)
    dealt = []
    for rank in range(now):
        loaded = load(checkpoint, ID, rank=rank, world=now)
        assert loaded is not None
        assert loaded.world == saved
        mine = [part["rank"] for part in loaded.parts]
        assert mine == [old for old in range(saved) if old % now == rank]
        assert loaded.tree["rank"] == (mine[0] if mine else 0)
        dealt += mine
    assert sorted(dealt) == list(range(saved))


def test_the_same_world_needs_its_own_file_only(checkpoint: Path) -> None:
    save(checkpoint, {"rank": 1}, rank=1, world=2, save_id=ID)  # as on a host with a disk of its own
    loaded = load(checkpoint, ID, rank=1, world=2)
    assert loaded is not None
    assert loaded.parts == [{"rank": 1}]
    with pytest.raises(CheckpointError, match="lacks the state of rank 0 of 2"):
        load(checkpoint, ID, rank=0, world=2)
    with pytest.raises(CheckpointError, match="lacks the state of rank 0 of 2"):
        load(checkpoint, ID, rank=0, world=1)


def test_missing_files_are_named(checkpoint: Path) -> None:
    save_world(checkpoint, 3)
    file(checkpoint, 1, 3).unlink()
    with pytest.raises(CheckpointError, match="rank 1 of 3"):
        load(checkpoint, ID, rank=1, world=2)
    file(checkpoint, 7, 3).write_bytes(b"")
    with pytest.raises(CheckpointError, match="rank 1 of 3"):
        load(checkpoint, ID, rank=0, world=2)
    file(checkpoint, 0, 10**20).write_bytes(b"")
    with pytest.raises(CheckpointError, match="files of"):
        load(checkpoint, ID, rank=0, world=2)


def test_a_name_that_promises_many_ranks_costs_nothing(checkpoint: Path) -> None:
    file(checkpoint).parent.mkdir(parents=True)
    file(checkpoint, 0, 10**20).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank 1, 2, 3, 4, 5, 6, 7, 8 \.\.\. of 1000"):
        load(checkpoint, ID, rank=0, world=2)


# Files that are not what they should be


def test_trees_that_cannot_be_saved_leave_nothing(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="is a object"):
        save(checkpoint, {"a": object()}, rank=0, world=1, save_id=ID)
    with pytest.raises(CheckpointError, match="complex128"):
        save(checkpoint, torch.zeros(2, dtype=torch.complex128), rank=0, world=1, save_id=ID)
    with pytest.raises(CheckpointError, match="cannot write"):
        save(checkpoint, 10**5000, rank=0, world=1, save_id=ID)
    assert load(checkpoint, OTHER, rank=0, world=1) is None
    assert not list(checkpoint.parent.rglob("rank-*"))


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt.commopt").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"rank 3 cannot write .*a\.ckpt\.commopt"):
        save(tmp_path / "a.ckpt", TREE, rank=3, world=4, save_id=ID)


def write(path: Path, head: Any, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """A file with a checksum that fits."""
    text = head if isinstance(head, str) else json.dumps(head)
    tensors = tensors or {}
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"commopt": text, "sha256": digest(tensors.values(), text.encode()).hex()}
    safetensors.torch.save_file(tensors, path, metadata)


HEAD = {"version": 1, "save_id": ID, "rank": 0, "world": 1, "tree": None}


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({**HEAD, "version": 2}, "newer commopt"),
        ({**HEAD, "version": "1"}, "no state that commopt knows"),
        ({**HEAD, "save_id": OTHER}, "another save or rank"),
        ({**HEAD, "rank": 1}, "another save or rank"),
        ({**HEAD, "world": 2}, "another save or rank"),
        ({**HEAD, "tree": {"tensor": 0}}, "no part of a state"),
        ({**HEAD, "tree": {"__reduce__": ["os.system", "echo"]}}, "no part of a state"),
        ({}, "KeyError"),
        ([HEAD], "TypeError"),
        ("{", "JSONDecodeError"),
        ("NaN", "not JSON"),
        ("[" * 100_000, "RecursionError"),
        ('{"version": 1' + "0" * 5000 + "}", "ValueError"),
    ],
)
def test_foreign_heads_are_refused(checkpoint: Path, head: Any, said: str) -> None:
    write(file(checkpoint), head)
    with pytest.raises(CheckpointError, match=f"cannot be used: .*{said}.* Go on from another checkpoint"):
        load(checkpoint, ID, rank=0, world=1)


def test_tensors_of_foreign_names_are_refused(checkpoint: Path) -> None:
    write(file(checkpoint), HEAD, {"../x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="KeyError"):
        load(checkpoint, ID, rank=0, world=1)


def test_dtypes_that_torch_lacks_are_refused(checkpoint: Path) -> None:
    header = {"0": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, "__metadata__": {"commopt": "", "sha256": ""}}
    text = json.dumps(header).encode()
    file(checkpoint).parent.mkdir(parents=True)
    file(checkpoint).write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(CheckpointError, match="cannot be used"):
        load(checkpoint, ID, rank=0, world=1)


def test_safetensors_of_others_are_refused(checkpoint: Path) -> None:
    file(checkpoint).parent.mkdir(parents=True)
    safetensors.torch.save_file({"0": torch.zeros(1)}, file(checkpoint))
    with pytest.raises(CheckpointError, match="cannot be used"):
        load(checkpoint, ID, rank=0, world=1)


def test_pickles_are_not_executed(checkpoint: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return Path.touch, (tmp_path / "executed",)

    file(checkpoint).parent.mkdir(parents=True)
    torch.save(Hostile(), file(checkpoint))
    with pytest.raises(CheckpointError, match="cannot be used"):
        load(checkpoint, ID, rank=0, world=1)
    assert not (tmp_path / "executed").exists()


def test_a_huge_header_is_refused(checkpoint: Path) -> None:
    file(checkpoint).parent.mkdir(parents=True)
    file(checkpoint).write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="cannot be used"):
        load(checkpoint, ID, rank=0, world=1)


def test_links_and_pipes_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    save(checkpoint, TREE, rank=0, world=1, save_id=ID)
    file(checkpoint).rename(tmp_path / "elsewhere")
    file(checkpoint).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="a link"):
        load(checkpoint, ID, rank=0, world=1)
    file(checkpoint).unlink()
    os.mkfifo(file(checkpoint))  # opening it would wait for ever
    with pytest.raises(CheckpointError, match="no file"):
        load(checkpoint, ID, rank=0, world=1)
    file(checkpoint).unlink()
    file(checkpoint).parent.rename(tmp_path / "folder")
    file(checkpoint).parent.symlink_to(tmp_path / "folder")
    with pytest.raises(CheckpointError, match="is a link"):
        load(checkpoint, ID, rank=0, world=1)


@pytest.fixture(scope="module")
def valid(folder: Path) -> tuple[Path, bytes]:
    checkpoint = folder / "valid.ckpt"
    save(checkpoint, TREE, rank=0, world=1, save_id=ID)
    return checkpoint, file(checkpoint).read_bytes()


def test_every_truncation_is_refused(valid: tuple[Path, bytes]) -> None:
    checkpoint, data = valid
    for size in range(len(data)):
        file(checkpoint).write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            load(checkpoint, ID, rank=0, world=1)


@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=500)
def test_changed_bytes_are_refused_or_change_nothing(
    valid: tuple[Path, bytes], changes: list[tuple[float, int]]
) -> None:
    checkpoint, data = valid
    changed = bytearray(data)
    for place, byte in changes:
        changed[int(place * len(data))] = byte
    file(checkpoint).write_bytes(changed)
    try:
        loaded = load(checkpoint, ID, rank=0, world=1)
    except CheckpointError:
        return
    assert loaded is not None
    assert same(loaded.tree, TREE)


@given(insert=st.binary(min_size=1, max_size=40), place=st.floats(0, 1))
@settings(deadline=None)
def test_inserted_bytes_are_refused_or_change_nothing(valid: tuple[Path, bytes], insert: bytes, place: float) -> None:
    checkpoint, data = valid
    at = int(place * len(data))
    file(checkpoint).write_bytes(data[:at] + insert + data[at:])
    try:
        loaded = load(checkpoint, ID, rank=0, world=1)
    except CheckpointError:
        return
    assert loaded is not None
    assert same(loaded.tree, TREE)
