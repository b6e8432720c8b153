"""A tree that is taken apart, carried by JSON and put together again is the same tree."""

import enum
import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.errors import CheckpointError
from commopt.resume.trees import DEEPEST, digest, pack, unpack
from tests.resume.cases import same, trees


class Colour(enum.IntEnum):
    RED = 3


@given(trees)
@settings(deadline=None)
def test_round_trip_is_exact(tree: Any) -> None:
    packed, tensors = pack(tree)
    assert same(unpack(json.loads(json.dumps(packed, allow_nan=False)), tensors), tree)


def test_subclasses_come_back_plain() -> None:
    packed, tensors = pack({"a": OrderedDict(b=np.float64(0.1)), "c": torch.Size([2]), "d": Colour.RED})
    assert same(unpack(json.loads(json.dumps(packed)), tensors), {"a": {"b": 0.1}, "c": (2,), "d": 3})


def test_tensors_are_made_dense_and_detached() -> None:
    tensor = torch.arange(6.0).view(2, 3).t().requires_grad_()
    _, (packed,) = pack([tensor])
    assert packed.is_contiguous()
    assert not packed.requires_grad
    assert packed.equal(tensor)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, lambda: None, np.zeros(2)])
def test_what_is_not_plain_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"\['a'\]\[1\] is a .*: only tensors"):
        pack({"a": [0, value]})


def test_keys_must_be_scalars() -> None:
    with pytest.raises(CheckpointError, match=r"a key at \['a'\] is a tuple"):
        pack({"a": {(1, 2): 3}})


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not dense"):
        pack([torch.eye(2).to_sparse()])


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="deeper than"):
        pack(tree)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dict", "tuple", "float", "tensor", "x"]), inner, max_size=2)
    ),
    max_leaves=10,
)


@given(json_values)
@settings(deadline=None)
def test_foreign_json_is_refused_or_a_tree(packed: Any) -> None:
    try:
        tree = unpack(packed, [torch.zeros(1)])
    except CheckpointError:
        return
    pack(tree)


@pytest.mark.parametrize(
    "packed",
    [
        {"tensor": 1},
        {"tensor": -1},
        {"tensor": True},
        {"float": "1e5"},
        {"dict": [["a"]]},
        {"dict": [[["list"], 1]]},
        {"dict": [], "tuple": []},
        {},
    ],
)
def test_malformed_json_is_refused(packed: Any) -> None:
    with pytest.raises(CheckpointError):
        unpack(packed, [torch.zeros(1)])


def test_deep_json_is_refused() -> None:
    packed: Any = 0
    for _ in range(DEEPEST + 2):
        packed = [packed]
    with pytest.raises(CheckpointError, match="deeper"):
        unpack(packed, [])


def test_digest_sees_dtype_shape_bits_and_order() -> None:
    zero = torch.zeros(2)
    others = [[-zero], [zero.view(1, 2)], [zero.int()], [zero, zero], []]
    digests = {digest(tensors) for tensors in [[zero], *others]}
    assert len(digests) == 6
    assert digest([zero.clone()]) == digest([zero])
