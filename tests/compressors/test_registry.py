"""Compressors by name, and those of others."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commopt
from commopt.compressors import Contraction, RowCompressor, available, create, option, register, registry
from commopt.compressors.blocks import Int8
from commopt.errors import ConfigError, UnsupportedError
from tests.workers import Workers


@dataclass(frozen=True)
class Halves(RowCompressor):
    """What a third party writes: halves of float32, the lower bits of which are lost."""

    payload_dtype = torch.int8
    block: int = option(32, 8, 64)
    power: float = option(1.0, 0.5, 2.0)

    @property
    def guarantee(self) -> Contraction:
        return Contraction(0.5)

    @property
    def width(self) -> int:
        return self.block

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        return rows.sign().to(torch.int8)

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        return payload.float()


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    name = Halves.name
    yield
    Halves.name = name


def test_what_comes_with_commopt() -> None:
    assert available() == (
        "bf16",
        "fp16",
        "fp8",
        "int2",
        "int3",
        "int4",
        "int8",
        "none",
        "onebit",
        "powersgd",
        "randomk",
        "threshold",
        "topk",
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int9", {}, "unknown compressor 'int9'; did you mean 'int8'?"),
        ("top_k", {}, "unknown compressor 'top_k'; did you mean 'topk'?"),
        ("PowerSGD", {}, "unknown compressor 'PowerSGD'; did you mean 'powersgd'?"),
        ("int8", {"blok": 32}, "unknown option of compressor 'int8': 'blok'; did you mean 'block'?"),
        ("none", {"block": 32}, "unknown option of compressor 'none': 'block'"),
        (
            "powersgd",
            {"rank": 0},
            "option 'rank' of compressor 'powersgd' must be a whole number from 1 to 1024, got 0.",
        ),
        (
            "powersgd",
            {"rank": 2.0},
            "option 'rank' of compressor 'powersgd' must be a whole number from 1 to 1024, got 2.0.",
        ),
        ("powersgd", {"rank": True}, "must be a whole number from 1 to 1024, got True."),
        ("powersgd", {"rank": "4"}, "must be a whole number from 1 to 1024, got '4'."),
        ("topk", {"density": 1.5}, "option 'density' of compressor 'topk' must be a number from 1e-05 to 1, got 1.5."),
        ("topk", {"density": math.nan}, "must be a number from 1e-05 to 1, got nan."),
        ("int8", {"block": 33}, "must be a whole number from 32 to 1024, a multiple of 4, got 33."),
        ("int8", {"stochastic": 1}, "option 'stochastic' of compressor 'int8' must be true or false, got 1."),
    ],
)
def test_a_mistake_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name, **options)
    assert message in str(caught.value)
    with pytest.raises(ConfigError):  # before any process group is made
        commopt.all_reduce(torch.ones(3), name, **options)


@pytest.mark.usefixtures("clean_registry")
def test_a_name_belongs_to_one_class() -> None:
    register("halves")(Halves)
    assert register("halves")(Halves) is Halves  # the same one again, as after a reload
    assert create("halves", power=2).power == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"compressor name 'int8' is taken by commopt\.compressors\.blocks\.Int8"):
        register("int8")(Halves)
    with pytest.raises(ConfigError, match="must be a dataclass that subclasses Compressor, got <class 'int'>"):
        register("number")(int)  # type: ignore[type-var]


@pytest.mark.usefixtures("clean_registry")
def test_an_entry_point_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("halves", f"{__name__}:Halves", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: EntryPoints([point]).select(**wanted))
    assert "halves" in available()
    assert isinstance(create("halves"), Halves)
    with pytest.raises(ConfigError, match="'halve'; did you mean 'halves'"):
        create("halve")


def use_from_end_to_end(rank: int, world: int) -> list[float]:
    register("halves")(Halves)
    try:
        tensor = torch.tensor([1.0, -1.0, 0.0, 4.0]) * (rank + 1)
        commopt.all_reduce(tensor, "halves", op="sum", power=1.5)

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
        handle = commopt.attach(model, "halves", block=16)
        for step in range(3):
            model(torch.full((2, 10), float(rank + step))).sum().backward()
        weight = model.module.weight.detach()
        weights = [torch.empty_like(weight) for _ in range(world)]
        dist.all_gather(weights, model.module.weight.grad)
        assert all(torch.equal(weights[0], other) for other in weights)
        handle.close()
        return tensor.tolist()
    finally:
        del registry._registry["halves"]


@pytest.mark.parametrize("world", [2, 3])
def test_a_compressor_of_ten_lines_works_everywhere(workers: Workers, world: int) -> None:
    results = workers.run(use_from_end_to_end, world)
    # Gathered at two ranks, one sign each; at three the sum of two signs and an exact value is compressed once more.
    assert results == [[2.0, -2.0, 0.0, 2.0] if world == 2 else [1.0, -1.0, 0.0, 1.0]] * world


@dataclass(frozen=True)
class Sloppy(Int8):
    """Returns something else than it declares."""

    method: ClassVar[str]
    change: ClassVar[Callable[[Tensor], Tensor]]

    def compress(self, rows: Tensor, seed: int) -> Tensor:
        payload = super().compress(rows, seed)
        return Sloppy.change(payload) if Sloppy.method == "compress" else payload

    def decompress(self, payload: Tensor, seed: int) -> Tensor:
        rows = super().decompress(payload, seed)
        return Sloppy.change(rows) if Sloppy.method == "decompress" else rows


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("compress", lambda payload: payload[:1]),
        ("compress", lambda payload: payload[:, :1]),
        ("compress", lambda payload: payload.float()),
        ("decompress", lambda rows: rows[:, :1]),
        ("decompress", lambda rows: rows.double()),
    ],
)
def test_what_does_not_fit_is_not_broadcast(method: str, change: Callable[[Tensor], Tensor]) -> None:
    Sloppy.method, Sloppy.change = method, change
    codec, rows = Sloppy(), torch.ones(3, Sloppy().block)
    payload = torch.zeros(3, codec.width, dtype=torch.uint8)
    act = codec.encode if method == "compress" else lambda out, payload, seed: codec.add_decoded(payload, out, seed)
    with pytest.raises(UnsupportedError, match=f"{method} of compressor .* must return"):
        act(rows, payload, 0)
