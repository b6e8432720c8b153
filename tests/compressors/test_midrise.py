"""Quantizers of 2 and 3 bits against a slow reference, element by element."""

import math

import pytest
import torch
from torch import Tensor

from commopt.compressors import create
from commopt.compressors.midrise import MidRise

both = pytest.mark.parametrize("name", ["int2", "int3"])


def made(name: str, **options: object) -> MidRise:
    compressor = create(name, **options)
    assert isinstance(compressor, MidRise)
    return compressor


def rows_of(block: int) -> Tensor:
    x = torch.randn(6, block, generator=torch.Generator().manual_seed(3))
    x[1] = 0.0
    x[2, ::2] = 0.0
    x[3] *= 1e-20
    x[4, 5] = 1000.0
    return x


def scale_of(payload: Tensor) -> float:
    return float(payload[:2].view(torch.bfloat16).float())


def reference(compressor: MidRise, row: Tensor, scale: float) -> list[tuple[int, int]]:
    """Sign and magnitude of each element's code; of a value on a threshold, the higher one."""
    codes = []
    for value in row.tolist():
        steps = math.floor(value / (scale * compressor.step)) if scale else 0
        magnitude = steps if steps >= 0 else -1 - steps
        codes.append((0 if steps >= 0 else 1, min(magnitude, len(compressor.levels) - 1)))
    return codes


def packed(codes: list[int], bits: int) -> list[int]:
    """Several codes a byte, the first one in the lowest bits."""
    a_byte = 8 // bits
    groups = [codes[start : start + a_byte] for start in range(0, len(codes), a_byte)]
    return [sum(code << bits * place for place, code in enumerate(group)) for group in groups]


@pytest.mark.parametrize(("name", "row_bytes"), [("int2", 2 + 32), ("int3", 2 + 32 + 16)])
def test_bytes_of_a_row(name: str, row_bytes: int) -> None:
    assert made(name).row_bytes == row_bytes


@both
def test_the_scale_follows_the_root_mean_square(name: str) -> None:
    compressor, x = made(name), rows_of(128)
    for row, payload in zip(x, compressor.compress(x, seed=0), strict=True):
        expected = math.sqrt(math.fsum(value * value for value in row.tolist()) / 128) * compressor.unit
        assert scale_of(payload) == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("block", [32, 128])
def test_int2_is_four_codes_a_byte(block: int) -> None:
    compressor, x = made("int2", block=block), rows_of(block)
    for row, payload in zip(x, compressor.compress(x, seed=0), strict=True):
        codes = [
            1 - magnitude if sign else 2 + magnitude
            for sign, magnitude in reference(compressor, row, scale_of(payload))
        ]
        assert payload[2:].tolist() == packed(codes, 2)


@pytest.mark.parametrize("block", [32, 128])
def test_int3_is_magnitudes_and_then_signs(block: int) -> None:
    compressor, x = made("int3", block=block), rows_of(block)
    for row, payload in zip(x, compressor.compress(x, seed=0), strict=True):
        codes = reference(compressor, row, scale_of(payload))
        magnitudes, signs = [magnitude for _, magnitude in codes], [sign for sign, _ in codes]
        assert payload[2:].tolist() == packed(magnitudes, 2) + packed(signs, 1)


@both
def test_each_element_comes_back_as_the_level_of_its_code(name: str) -> None:
    compressor, x = made(name), rows_of(128)
    payloads = compressor.compress(x, seed=0)
    for row, payload, back in zip(x, payloads, compressor.decompress(payloads, seed=0), strict=True):
        scale = scale_of(payload)
        codes = reference(compressor, row, scale)
        expected = [(-1) ** sign * compressor.levels[magnitude] * scale for sign, magnitude in codes]
        assert back.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "optimum"), [("int2", 0.1175), ("int3", 0.03454)])
def test_the_error_on_a_gaussian_is_close_to_the_optimum(name: str, optimum: float) -> None:
    """Max 1960, table I: what the best quantizer with 4 and with 8 levels loses of the energy."""
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(0))
    compressor = made(name)
    lost = float((compressor.decompress(compressor.compress(x, 0), 0) - x).square().mean())
    assert lost == pytest.approx(optimum, rel=0.03)


@both
@pytest.mark.parametrize("block", [32, 64, 128])
def test_the_worst_row_is_a_spike_and_attains_the_guarantee(name: str, block: int) -> None:
    compressor = made(name, block=block)
    x = torch.zeros(1, block)
    x[0, 3] = 1.0
    lost = float((compressor.decompress(compressor.compress(x, 0), 0) - x).square().sum())
    assert lost <= 1 - compressor.guarantee.delta <= lost + 0.01


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_spoils_its_row_and_no_other(name: str, bad: float) -> None:
    compressor, x = made(name), rows_of(128)
    x[2, 77] = bad
    back = compressor.decompress(compressor.compress(x, 0), 0)
    assert not torch.isfinite(back[2]).any()
    assert torch.isfinite(back[[0, 1, 3, 4, 5]]).all()
