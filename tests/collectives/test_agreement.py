"""Ranks agree before they send, or all raise the same error."""

import pytest
import torch

from commopt.collectives.agreement import check_agreement, share_text
from commopt.collectives.wire import Wire
from commopt.errors import MismatchError
from tests.workers import Workers

CPU = torch.device("cpu")


def agree(rank: int, world: int, facts: list[dict[str, str]]) -> tuple[str, float]:
    wire = Wire(None)
    try:
        check_agreement(wire, facts[rank], CPU)
    except MismatchError as error:
        return str(error), wire.bytes_sent
    return "", wire.bytes_sent


def test_a_hash_is_enough_where_ranks_agree(workers: Workers) -> None:
    facts = {"compressor": "int8", "parameter 0": "weight [3, 4] torch.float32"}
    assert workers.run(agree, 3, facts=[facts] * 3) == [("", 2 * 32)] * 3


def test_what_differs_is_named_on_every_rank(workers: Workers) -> None:
    facts = [{"compressor": "int8", "same": "x"}, {"compressor": "int4", "same": "x"}, {"same": "x", "more": "é"}]
    results = [text for text, _ in workers.run(agree, 3, facts=facts)]
    assert (
        results
        == [
            "ranks disagree. compressor: int8 on rank 0; int4 on rank 1; absent on rank 2 | "
            "more: absent on rank 0, 1; é on rank 2. Nothing was sent. Give every rank the same."
        ]
        * 3
    )


def test_a_long_list_is_cut(workers: Workers) -> None:
    facts = [{f"parameter {i}": f"{rank}" for i in range(20)} for rank in range(2)]
    (text, _), _ = workers.run(agree, 2, facts=facts)
    assert text.count("on rank 1") == 5
    assert "(and 15 more differences)" in text


def share(rank: int, world: int, texts: list[str]) -> list[str]:
    return share_text(Wire(None), texts[rank], CPU, limit=12)


def test_lines_are_shared_and_cut(workers: Workers) -> None:
    expected = ["", "short", "longer than "]
    assert workers.run(share, 3, texts=["", "short", "longer than twelve"]) == [expected] * 3


@pytest.mark.parametrize("world", [1])
def test_a_world_of_one_agrees(workers: Workers, world: int) -> None:
    assert workers.run(agree, world, facts=[{"compressor": "int8"}]) == [("", 0)]
