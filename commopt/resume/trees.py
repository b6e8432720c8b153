"""Trees of state: nested dicts, lists and tuples of tensors and plain values, as ``state_dict()`` gives them.

`pack` takes a tree apart into a value that JSON can carry and a list of its tensors, `unpack` puts it together again.
What JSON has no word for is tagged, by a dict with one key:

    {"dict": [[key, value], ...]}   {"tuple": [...]}   {"float": "nan"}   {"tensor": position in the list}
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, uint8

from commopt.errors import CheckpointError

Tree: TypeAlias = Any  # dict | list | tuple of trees, Tensor, str, int, float, bool, None

DEEPEST = 64  # levels of containers: far more than any state has, far fewer than Python's stack


def pack(tree: Tree) -> tuple[Any, list[Tensor]]:
    """A value for JSON, and the tensors in the order of their positions: on the CPU, contiguous, copied where they are
    not so already, detached.

    Subclasses of plain types (``OrderedDict``, ``numpy.float64``, ``torch.Size``) come back as the plain type.

    Raises:
        CheckpointError: a value that is neither a tensor nor plain, or a tree that is too deep.
    """
    tensors: list[Tensor] = []
    return _pack(tree, tensors, "", 0), tensors


def unpack(packed: Any, tensors: Sequence[Tensor]) -> Tree:
    """The tree that `pack` took apart; tensors are not copied. ``packed`` may be anything.

    Raises:
        CheckpointError: ``packed`` is not what `pack` makes.
    """
    return _unpack(packed, tensors, 0)


def digest(tensors: Iterable[Tensor], begin: bytes = b"") -> bytes:
    """SHA-256 of ``begin`` and of the dtype, shape and bytes of each tensor."""
    hasher = hashlib.sha256(begin)
    for tensor in tensors:
        hasher.update(f";{tensor.dtype}{list(tensor.shape)};".encode())
        hasher.update(_plain(tensor).view(-1).view(uint8).numpy().data)
    return hasher.digest()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _pack(value: Any, tensors: list[Tensor], where: str, depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"the state at {where[:60]} ... is nested deeper than {DEEPEST} levels: flatten it.")
    if isinstance(value, Tensor):
        if value.is_sparse or value.is_quantized or value.is_meta:
            raise CheckpointError(f"the tensor at {where or 'the top'} is not dense: {value.layout}, {value.device}.")
        tensors.append(_plain(value))
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, (str, int, float, type(None))):
                raise CheckpointError(f"a key at {where or 'the top'} is a {type(key).__name__}: use str or int.")
            pairs.append([_pack(key, tensors, where, depth), _pack(item, tensors, f"{where}[{key!r}]", depth + 1)])
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, tensors, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    raise CheckpointError(
        f"the state at {where or 'the top'} is a {type(value).__name__}: only tensors, dicts, lists, tuples and plain "
        "values can be saved. Turn it into those in state_dict()."
    )


def _unpack(packed: Any, tensors: Sequence[Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"nested deeper than {DEEPEST} levels.")
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    if isinstance(packed, list):
        return [_unpack(item, tensors, depth + 1) for item in packed]
    match packed:
        case {"dict": list(pairs)} if len(packed) == 1:
            return dict(_pair(pair, tensors, depth) for pair in pairs)
        case {"tuple": list(items)} if len(packed) == 1:
            return tuple(_unpack(item, tensors, depth + 1) for item in items)
        case {"float": "nan" | "inf" | "-inf" as text} if len(packed) == 1:
            return float(text)
        case {"tensor": int(index)} if len(packed) == 1 and type(index) is int and 0 <= index < len(tensors):
            return tensors[index]
    raise CheckpointError(f"{str(packed)[:60]!r} is no part of a state.")


def _pair(pair: Any, tensors: Sequence[Tensor], depth: int) -> tuple[Any, Any]:
    if isinstance(pair, list) and len(pair) == 2:
        key = _unpack(pair[0], tensors, depth)
        if key is None or isinstance(key, (str, int, float)):
            return key, _unpack(pair[1], tensors, depth + 1)
    raise CheckpointError(f"{str(pair)[:60]!r} is no pair of key and value.")
