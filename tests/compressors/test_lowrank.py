"""PowerSGD against the singular value decomposition."""

import pytest
import torch
from torch import Tensor

from commopt.compressors import create
from commopt.compressors.lowrank import PowerSGD
from commopt.layout import Layout


def low_rank(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=numbers) @ torch.randn(rank, columns, generator=numbers)


def reduced(compressor: PowerSGD, tensors: list[Tensor], warm: dict[str, Tensor], seed: int = 0) -> list[Tensor]:
    layout = Layout([str(i) for i in range(len(tensors))], [tensor.shape for tensor in tensors], 1)
    x, out = torch.zeros(layout.rows, 1), torch.empty(layout.rows, 1)
    for view, tensor in zip(layout.views(x), tensors, strict=True):
        view.copy_(tensor)
    sent: list[int] = []

    def all_reduce(vector: Tensor) -> Tensor:
        sent.append(vector.numel())
        return vector

    compressor.reduce(x, out, layout, warm, seed, all_reduce)
    assert tuple(sent) == compressor.payload_sizes(layout)
    return layout.views(out)


def powersgd(rank: int) -> PowerSGD:
    compressor = create("powersgd", rank=rank)
    assert isinstance(compressor, PowerSGD)
    return compressor


def test_a_matrix_of_low_rank_comes_back() -> None:
    matrix = low_rank(60, 90, rank=3)
    (back,) = reduced(powersgd(4), [matrix], {})
    torch.testing.assert_close(back, matrix, rtol=1e-4, atol=1e-4)


def test_warm_starts_approach_the_best_approximation() -> None:
    matrix = torch.randn(80, 120, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    best = float((matrix - u[:, :4] @ torch.diag(s[:4]) @ vh[:4]).norm())
    warm: dict[str, Tensor] = {}
    errors = [float((matrix - reduced(powersgd(4), [matrix], warm)[0]).norm()) for _ in range(60)]
    assert errors[0] > errors[5] > errors[-1]
    assert best * (1 - 1e-5) <= errors[-1] < best * 1.01


def test_sizes_of_its_rounds() -> None:
    # A matrix of 60 x 90 in two factors of rank 4; a tensor of 4 x 2 x 3 x 50 as a matrix of 4 x 300 would not shrink
    # by half, nor do vectors, scalars and small matrices: they travel whole, beside the first factor.
    shapes = [(60, 90), (100,), (), (4, 2, 3, 50), (6, 6), (0, 5), (40, 30, 2, 2)]
    layout = Layout([str(shape) for shape in shapes], [torch.Size(shape) for shape in shapes], 1)
    whole = 100 + 1 + 1200 + 36
    assert powersgd(4).payload_sizes(layout) == (4 * 60 + 4 * 40 + whole, 4 * 90 + 4 * 120)


def test_what_is_not_factored_is_exact() -> None:
    tensors = [torch.randn(100), torch.randn(()), torch.randn(6, 6), torch.randn(0, 5), low_rank(64, 64, 1)]
    back = reduced(powersgd(2), tensors, {})
    for tensor, same in zip(tensors[:4], back[:4], strict=True):
        assert torch.equal(tensor, same)


@pytest.mark.parametrize("rank", [1, 4])
def test_zeros_give_zeros_and_leave_the_warm_start(rank: int) -> None:
    matrix, zeros = torch.randn(50, 70), torch.zeros(50, 70)
    warm: dict[str, Tensor] = {}
    reduced(powersgd(rank), [matrix], warm)
    learned = warm["0"]
    (back,) = reduced(powersgd(rank), [zeros], warm)
    assert torch.equal(back, zeros)
    assert torch.equal(warm["0"], learned)
    assert torch.isfinite(learned).all()


def test_a_rank_below_that_of_the_factors_is_no_trouble() -> None:
    matrix = low_rank(50, 70, rank=1).bfloat16().float()
    warm: dict[str, Tensor] = {}
    for seed in range(20):
        (back,) = reduced(powersgd(8), [matrix], warm, seed)
        assert torch.isfinite(back).all()
    torch.testing.assert_close(back, matrix, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_warm_starts_do_not_depend_on_the_scale(scale: float) -> None:
    matrix = torch.randn(80, 120, generator=torch.Generator().manual_seed(1))
    warm: dict[str, Tensor] = {}
    warm_there: dict[str, Tensor] = {}
    for _ in range(5):
        (back,) = reduced(powersgd(4), [matrix], warm)
        (back_there,) = reduced(powersgd(4), [matrix * scale], warm_there)
        torch.testing.assert_close(back_there / scale, back, rtol=1e-3, atol=1e-3)
