"""Tensors in rows: each starts at a row of its own, and nothing is lost on the way."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from commopt.layout import Layout

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes=shapes, block=st.integers(1, 40), multiple=st.integers(1, 4))
def test_what_is_put_in_comes_out(shapes: list[tuple[int, ...]], block: int, multiple: int) -> None:
    layout = Layout([str(i) for i in range(len(shapes))], [torch.Size(shape) for shape in shapes], block, multiple)
    assert layout.rows % multiple == 0
    assert layout.numel == sum(math.prod(shape) for shape in shapes)
    assert layout.rows >= sum(math.ceil(math.prod(shape) / block) for shape in shapes)
    assert all(start % block == 0 for start in layout.starts)

    rows = torch.full((layout.rows, block), math.nan)
    for value, view in enumerate(layout.views(rows)):
        assert view.shape == shapes[value]
        view.fill_(value + 1.0)
    layout.zero_padding(rows)
    for value, view in enumerate(layout.views(rows)):
        assert bool((view == value + 1.0).all())
    assert int(torch.count_nonzero(rows)) == layout.numel  # all else was cleared
    assert layout.padded == (rows.numel() != layout.numel)


def test_rows_by_hand() -> None:
    layout = Layout(["a", "b", "c"], [torch.Size([5]), torch.Size([2, 2]), torch.Size([])], block=4, multiple=3)
    assert layout.starts == [0, 8, 12]  # two rows, one, one
    assert layout.rows == 6
    assert layout.padded
    assert not Layout(["a"], [torch.Size([3, 4])], block=4).padded
