"""All ranks save, or those that tried are told."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from commopt.errors import CheckpointError
from commopt.resume import checkpoint
from commopt.resume.checkpoint import agree_on_save, load, load_together, reference, save_together
from tests.workers import Workers


def agree_often(rank: int, world: int, times: int) -> list[str]:
    group = dist.new_group()
    return [agree_on_save("x", group).save_id for _ in range(times)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_get_the_same_new_name(workers: Workers, world: int) -> None:
    first, *others = workers.run(agree_often, world=world, times=5)
    assert len(set(first)) == 5
    assert all(other == first for other in others)


def save_on_one_rank(rank: int, world: int, alone: int) -> tuple[str, float, float, str]:
    group = dist.new_group()
    text, spent = "", 0.0
    if rank == alone:
        begin = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            agree_on_save("x", group, seconds=0.5)
        text, spent = str(caught.value), time.monotonic() - begin
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return text, spent, total.item(), agree_on_save("x", group).save_id


@pytest.mark.parametrize(("alone", "absent"), [(0, "rank 1, 2 of 3"), (2, "rank 0, 1 of 3")])
def test_a_rank_that_saves_alone_is_told(workers: Workers, alone: int, absent: str) -> None:
    results = workers.run(save_on_one_rank, world=3, alone=alone)
    text, spent, _, _ = results[alone]
    assert f"{absent} did not come within 0.5 s" in text
    assert "Call save on every rank, not only on the main process" in text
    assert 0.5 <= spent < 5
    assert {total for _, _, total, _ in results} == {3.0}
    assert len({save_id for _, _, _, save_id in results}) == 1


def all_but_one(rank: int, world: int) -> str:
    text = ""
    if rank != 1:
        with pytest.raises(CheckpointError) as caught:
            # Of those that came, the first one whose patience ends speaks for all.
            agree_on_save("x", None, seconds=0.5 if rank == 0 else 60.0)
        text = str(caught.value)
    dist.barrier()
    return text


def test_all_that_came_are_told(workers: Workers) -> None:
    first, second, third = workers.run(all_but_one, world=3)
    assert "rank 1 of 3 did not come" in first
    assert second == ""
    assert "rank 1 of 3 did not come" in third


def amid_collectives(rank: int, world: int) -> tuple[str, float]:
    total = torch.ones(1)
    work = dist.all_reduce(total, async_op=True) if rank == 1 else None  # rank 0 comes to it after it has saved
    save_id = agree_on_save("x", None).save_id
    work = work or dist.all_reduce(total, async_op=True)
    assert work is not None
    work.wait()
    return save_id, total.item()


def test_collectives_may_be_under_way(workers: Workers) -> None:
    (save_id, total), other = workers.run(amid_collectives, world=2)
    assert (save_id, total) == other
    assert total == 2.0


def keys_left(rank: int, world: int) -> int:
    group = dist.group.WORLD
    assert group is not None
    agree_on_save("x", group)
    dist.barrier()
    before = group.get_group_store().num_keys()
    for _ in range(5):
        agree_on_save("x", group)
    dist.barrier()
    return int(group.get_group_store().num_keys() - before)


def test_meetings_leave_no_keys(workers: Workers) -> None:
    assert max(workers.run(keys_left, world=2)) <= 0


def over_tcp(rank: int, world: int) -> tuple[str, str]:
    """torchrun's kind of store, in place of the file of these tests."""
    dist.barrier()
    port = torch.zeros(1, dtype=torch.int64)
    server = TCPStore("localhost", 0, world, True, wait_for_workers=False) if rank == 0 else None
    if server is not None:
        port[0] = server.port
    dist.broadcast(port, 0)
    store = server or TCPStore("localhost", int(port), world, False, wait_for_workers=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    text = ""
    if rank == 0:
        with pytest.raises(CheckpointError) as caught:
            agree_on_save("x", None, seconds=0.2)
        text = str(caught.value)
    dist.barrier()
    save_id = agree_on_save("x", None).save_id
    dist.barrier()
    return text, save_id


def test_over_tcp(workers: Workers) -> None:
    (text, save_id), (_, other) = workers.run(over_tcp, world=2)
    assert "rank 1 of 2 did not come" in text
    assert save_id == other


def save_and_load(rank: int, world: int, path: str) -> tuple[str, Any]:
    save_id = save_together(path, {"rank": rank, "tensor": torch.full((2,), float(rank))}, None).save_id
    others = [load(path, save_id, rank=other, world=world) for other in range(world)]  # all are there by now
    return save_id, [other.tree["rank"] for other in others if other]


def test_save_together(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(save_and_load, world=3, path=str(tmp_path / "last.ckpt"))
    assert len({save_id for save_id, _ in results}) == 1
    assert all(ranks == [0, 1, 2] for _, ranks in results)


def one_is_lost(rank: int, world: int, path: str) -> str:
    text = ""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_WRITING", 0.2)
            with pytest.raises(CheckpointError) as caught:
                save_together(path, {}, None)
        text = str(caught.value)
    else:
        agree_on_save("x", None)
    dist.barrier()
    return text


def test_a_rank_that_is_lost_while_it_writes_is_named(workers: Workers, tmp_path: Path) -> None:
    text, _ = workers.run(one_is_lost, world=2, path=str(tmp_path / "last.ckpt"))
    assert "rank 1 of 2 did not come" in text
    assert "the checkpoint before this one is whole" in text


def one_cannot_write(rank: int, world: int, path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save_together(path, object() if rank == 1 else {}, None)
    return str(caught.value)


def test_what_one_rank_cannot_write_is_told_to_all(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(one_cannot_write, world=2, path=str(tmp_path / "last.ckpt")):
        assert "is a object" in text


def load_what_was_saved(rank: int, world: int, path: str) -> list[str]:
    """What `load_together` says to a reference that one rank lacks or cannot use, or that all have."""
    carried = reference(save_together(path, {"rank": rank}, None).save_id)
    found = load_together(path, carried, None)
    assert found is not None
    assert found.tree == {"rank": rank}
    assert load_together(path, None if rank == 1 else carried, None) is None
    said = []
    for foreign in ({"version": 99}, ValueError()):
        with pytest.raises(CheckpointError) as caught:
            load_together(path, foreign if rank == 1 else carried, None)
        said.append(str(caught.value))
    if rank == 0:
        with pytest.raises(CheckpointError, match=r"rank 1 of 2 did not come .* Load on every rank"):
            load_together(path, carried, None, seconds=0.2)
    dist.barrier()
    return said


def test_what_one_rank_cannot_load_is_told_to_all(workers: Workers, tmp_path: Path) -> None:
    mine, theirs = workers.run(load_what_was_saved, world=2, path=str(tmp_path / "last.ckpt"))
    assert mine == theirs
    assert mine[0].startswith("rank 1: the checkpoint was written by a newer commopt")
    assert mine[1].startswith("rank 1: the checkpoint's reference to commopt's state is a ValueError")
