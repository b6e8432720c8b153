"""Sparsifiers against slow references."""

import struct

import pytest
import torch
from torch import Tensor

from commopt.compressors import create
from commopt.compressors.sparse import RandomK, Sparse, Threshold, TopK


def made(name: str, **options: object) -> Sparse:
    compressor = create(name, **options)
    assert isinstance(compressor, Sparse)
    return compressor


def rows_of(block: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, block, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "options", "kept", "row_bytes"),
    [
        ("topk", {}, 41, 4 * 41 + 4 * 21),  # 41 positions take 82 bytes, and two more to fill a word
        ("topk", {"density": 0.5, "block": 64}, 32, 4 * 32 + 2 * 32),
        ("topk", {"density": 1e-5}, 1, 8),
        ("topk", {"density": 1.0, "block": 65536}, 65536, 6 * 65536),
        ("threshold", {}, 655, 4 * 655 + 4 * 328),
    ],
)
def test_bytes_of_a_row(name: str, options: dict[str, float], kept: int, row_bytes: int) -> None:
    compressor = made(name, **options)
    assert (compressor.kept, compressor.row_bytes) == (kept, row_bytes)


def test_topk_keeps_the_largest() -> None:
    compressor, x = made("topk", density=0.1, block=70), rows_of(70)
    decoded = compressor.decompress(compressor.compress(x, seed=0), seed=0)
    for row, back in zip(x.tolist(), decoded.tolist(), strict=True):
        largest = sorted(range(70), key=lambda position: -abs(row[position]))[:7]
        assert back == [value if position in largest else 0.0 for position, value in enumerate(row)]


def test_values_come_first_and_then_their_positions() -> None:
    compressor = made("topk", density=0.03, block=65536)
    x = torch.zeros(1, 65536)
    places = [0, 1, 32767, 32768, 65535]
    x[0, places] = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    payload = bytes(compressor.compress(x, seed=0)[0].tolist())
    kept = compressor.kept
    values = struct.unpack(f"{kept}f", payload[: 4 * kept])
    positions = struct.unpack(f"{kept}H", payload[4 * kept : 6 * kept])
    found = {position: value for position, value in zip(positions, values, strict=True) if value}
    assert found == {0: 1.0, 1: -2.0, 32767: 3.0, 32768: -4.0, 65535: 5.0}
    assert torch.equal(compressor.decompress(compressor.compress(x, seed=0), seed=0), x)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("kind", ["gaussian", "constant", "few", "trend"])
def test_threshold_sends_none_but_the_largest(density: float, kind: str) -> None:
    compressor = made("threshold", density=density, block=4096)
    assert isinstance(compressor, Threshold)
    x = rows_of(4096)
    if kind == "constant":
        x = torch.full_like(x, -0.3)
    elif kind == "few":
        x[:, 7:] = 0.0
    elif kind == "trend":  # large where no sample is taken
        x = x * 1e-3
        x[:, 1::16] += 5.0
    decoded = compressor.decompress(compressor.compress(x, seed=0), seed=0)
    sent = decoded != 0
    assert torch.equal(decoded[sent], x[sent])
    counts = sent.sum(1)
    assert (counts <= compressor.kept).all()
    assert (counts >= (x != 0).sum(1).clamp_max(compressor.kept // 32)).all()
    for row, here in zip(x.abs(), sent, strict=True):
        if here.any() and not here.all():
            assert row[here].min() >= row[~here].max()


def test_threshold_sends_most_of_what_it_may() -> None:
    compressor = made("threshold")
    x = rows_of(65536, rows=8)
    sent = (compressor.decompress(compressor.compress(x, seed=0), seed=0) != 0).sum(1).double().mean()
    assert 0.6 * compressor.kept < float(sent) <= compressor.kept


def test_random_k_takes_one_element_a_row_the_same_on_all_ranks() -> None:
    compressor = create("randomk", density=0.1)
    assert isinstance(compressor, RandomK)
    a, b = rows_of(10, rows=300), 1 + rows_of(10, rows=300)
    both = compressor.decompress(compressor.compress(a, seed=9) + compressor.compress(b, seed=9), seed=9)
    chosen = both != 0
    assert (chosen.sum(1) == 1).all()
    torch.testing.assert_close(both, 10 * (a + b) * chosen)
    assert len(set(chosen.nonzero()[:, 1].tolist())) == 10
    assert not torch.equal(chosen, compressor.decompress(compressor.compress(a, seed=10), seed=10) != 0)


def test_the_density_is_of_a_row() -> None:
    assert isinstance(create("topk", density=0.5, block=64), TopK)
    assert [create("randomk", density=d).block for d in (1.0, 0.5, 0.01, 1e-5)] == [1, 2, 100, 100_000]  # type: ignore[attr-defined]
