"""Block quantizers against slow references, element by element."""

import math
import struct

import pytest
import torch
from torch import Tensor

from commopt.compressors import RowCompressor, create
from commopt.compressors.blocks import rotation
from commopt.errors import ConfigError


def rows_of(block: int, rows: int = 5) -> Tensor:
    x = torch.randn(rows, block, generator=torch.Generator().manual_seed(3))
    x[1] = 0.0
    x[2, ::2] = 0.0
    x[3] *= 1e-20
    return x


def made(name: str, **options: object) -> RowCompressor:
    compressor = create(name, **options)
    assert isinstance(compressor, RowCompressor)
    return compressor


def scale_of(payload: list[int]) -> float:
    return float(struct.unpack("f", bytes(payload[:4]))[0])


def rounded(value: float, scale: float) -> int:
    """To nearest, ties to even, as the product with the reciprocal in float32."""
    return round(float(torch.tensor(value) * torch.tensor(scale).reciprocal()))


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [("none", 4), ("fp16", 2), ("bf16", 2), ("fp8", 260), ("int8", 260), ("int4", 68), ("onebit", 36), ("randomk", 4)],
)
def test_bytes_of_a_row(name: str, row_bytes: int) -> None:
    assert made(name).row_bytes == row_bytes


def test_int8_is_one_code_a_byte() -> None:
    compressor, x = made("int8", block=32), rows_of(32)
    for row, payload in zip(x.tolist(), compressor.compress(x, seed=0).tolist(), strict=True):
        scale = max(*map(abs, row), 1e-35) / 127
        assert scale_of(payload) == pytest.approx(scale)
        assert payload[4:] == [rounded(value, scale_of(payload)) % 256 for value in row]


def test_int4_is_two_codes_a_byte() -> None:
    compressor, x = made("int4", block=16), rows_of(16)
    for row, payload in zip(x.tolist(), compressor.compress(x, seed=0).tolist(), strict=True):
        scale = max(*map(abs, row), 1e-35) / 7
        assert scale_of(payload) == pytest.approx(scale)
        codes = [rounded(value, scale_of(payload)) + 8 for value in row]
        assert payload[4:] == [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_comes_back_is_a_neighbour_on_the_grid(name: str, levels: int, stochastic: bool) -> None:
    compressor, x = made(name, stochastic=stochastic, block=32), rows_of(32)
    y = compressor.decompress(compressor.compress(x, seed=4), seed=4)
    step = x.abs().amax(1, keepdim=True) / levels
    assert ((y - x).abs() <= (1.0 if stochastic else 0.5) * step * (1 + 1e-4)).all()
    assert torch.equal(y[1], torch.zeros(32))
    assert torch.equal(y[2, ::2], torch.zeros(16))  # zeros among others stay zeros too


def test_onebit_is_eight_signs_a_byte() -> None:
    compressor, x = made("onebit", block=32), rows_of(32)
    payloads = compressor.compress(x, seed=0)
    decoded = compressor.decompress(payloads, seed=0)
    for row, payload, back in zip(x.tolist(), payloads.tolist(), decoded.tolist(), strict=True):
        scale = sum(map(abs, row)) / 32
        assert scale_of(payload) == pytest.approx(scale)
        bits = [0] * 4
        for position, value in enumerate(row):
            bits[position // 8] |= (value >= 0) << (position % 8)
        assert payload[4:] == bits
        assert back == pytest.approx([scale if value >= 0 else -scale for value in row])


def test_fp8_is_the_nearest_of_all_codes() -> None:
    compressor, x = made("fp8", block=32), rows_of(32)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = sorted({code for code in codes.tolist() if not math.isnan(code)})
    decoded = compressor.decompress(compressor.compress(x, seed=0), seed=0)
    for row, back in zip(x.tolist(), decoded.tolist(), strict=True):
        scale = max(*map(abs, row), 1e-35) / 448
        for value, got in zip(row, back, strict=True):
            nearest = min(abs(code * scale - value) for code in grid)
            assert abs(got - value) <= nearest * (1 + 1e-4) + 1e-6 * abs(value)


@pytest.mark.parametrize("size", [8, 64, 128])
def test_the_rotation_is_orthogonal_and_spreads_a_spike(size: int) -> None:
    matrix = rotation(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), 1 / math.sqrt(size)))
    for row in range(size):
        ratio = [float(value) for value in matrix[row] / matrix[row, 0]]
        walsh = [(-1.0) ** bin(row & column).count("1") for column in range(size)]
        assert ratio == pytest.approx(walsh)


def test_hadamard_needs_a_power_of_two() -> None:
    assert made("int4", block=24).block == 24
    with pytest.raises(ConfigError, match="option 'hadamard' of 'int4' needs a block that is a power of two, got 24"):
        create("int4", block=24, hadamard=True)


def test_hadamard_loses_less_of_rows_with_an_outlier() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 30.0

    def lost(hadamard: bool) -> float:
        compressor = made("int4", hadamard=hadamard, block=64)
        return float((compressor.decompress(compressor.compress(x, 0), 0) - x).square().sum())

    assert lost(True) < 0.5 * lost(False)
