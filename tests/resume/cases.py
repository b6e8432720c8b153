"""Trees to save: strategies that draw them, and what it means that two are the same."""

import struct
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)
SHAPES = ((), (0,), (1,), (3, 2), (2, 0, 3))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    torch.manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn(draw(st.sampled_from(SHAPES))).mul(3).to(draw(st.sampled_from(DTYPES)))
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
trees = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """The same types, the same order of keys, and the same bits of floats and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(one, float):
        return (one != one and other != other) or struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
