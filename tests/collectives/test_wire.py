"""The only module that talks: right values, bytes counted, failures of one kind."""

import pytest
import torch
import torch.distributed as dist

from commopt.collectives.wire import Wire, WireError
from commopt.transfers import Transfer
from tests.workers import Workers


@pytest.mark.parametrize(
    ("op", "world", "sent"),
    [
        ("all_reduce", 2, 400.0),
        ("all_reduce", 4, 600.0),
        ("all_gather", 2, 400.0),
        ("all_gather", 4, 1200.0),
        ("all_to_all", 2, 200.0),
        ("all_to_all", 4, 300.0),
    ],
)
def test_bytes_of_a_transfer(op: str, world: int, sent: float) -> None:
    assert Transfer(op, 100, torch.float32).sent(world) == sent  # type: ignore[arg-type]
    assert Transfer(op, 100, torch.uint8).sent(world) == sent / 4  # type: ignore[arg-type]


def talk(rank: int, world: int) -> tuple[float, int, float]:
    wire = Wire(None)
    assert (wire.rank, wire.world) == (rank, world)
    assert wire.all_reduce(torch.full((6,), rank + 1.0)).tolist() == [sum(range(1, world + 1))] * 6
    out = torch.empty(world, 2, dtype=torch.uint8)
    wire.all_gather(out, torch.tensor([rank, 7], dtype=torch.uint8))
    assert out.tolist() == [[other, 7] for other in range(world)]
    out = torch.empty(world, 2, dtype=torch.uint8)
    wire.all_to_all(out, torch.tensor([[rank, to] for to in range(world)], dtype=torch.uint8))
    assert out.tolist() == [[other, rank] for other in range(world)]
    return wire.bytes_sent, wire.finished, wire.seconds


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_rank_gets_its_part(workers: Workers, world: int) -> None:
    for sent, finished, seconds in workers.run(talk, world):
        assert sent == pytest.approx(2 * (world - 1) / world * 24 + (world - 1) * 2 + (world - 1) * 2)
        assert finished == (3 if world > 1 else 0)
        assert (seconds > 0) == (world > 1)


def lose_a_peer(rank: int, world: int) -> str:
    wire = Wire(None)
    if rank == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(WireError) as caught:
        wire.all_reduce(torch.ones(3))
    return str(caught.value)


def test_a_lost_peer_is_a_wire_error(workers: Workers) -> None:
    assert "peer" in workers.run(lose_a_peer)[0]


def stand_in(rank: int, world: int) -> None:
    wire = Wire(None)
    for op in ("all_reduce", "all_gather", "all_to_all"):
        transfer = Transfer(op, 4 * world, torch.int64)
        if rank == 0:
            wire.blank(transfer, torch.device("cpu"))
            continue
        tensor = torch.ones(4 * world, dtype=torch.int64)
        if op == "all_reduce":
            assert wire.all_reduce(tensor).tolist() == [world - 1] * 4 * world
        else:
            out = torch.empty(world, 4 * (world if op == "all_gather" else 1), dtype=torch.int64)
            wire.all_gather(out, tensor) if op == "all_gather" else wire.all_to_all(out, tensor)
            assert not out[0].any()
            assert out[1:].all()


@pytest.mark.parametrize("world", [2, 3])
def test_zeros_stand_in_for_a_rank_that_failed(workers: Workers, world: int) -> None:
    workers.run(stand_in, world)
