import argparse

import pytest
import torch

from benchmarks.variants import Variant

SHAPES = [torch.Size([1024, 512]), torch.Size([512])]  # 524288 + 512 elements


@pytest.mark.parametrize(
    ("spec", "world", "expected"),
    [
        ("nocomm", 2, 0),
        ("ddp", 2, 4 * 524_800),
        ("ddp", 4, 1.5 * 4 * 524_800),
        ("none", 3, 4 / 3 * 4 * 524_800),
        ("torch:fp16", 2, 2 * 524_800),
        ("bf16", 2, 2 * 524_800),
        ("int8:block=256", 2, 524_800 + 4 * 2050),  # a scale each 256 elements
        ("int4:block=64", 4, 1.5 * (262_400 + 4 * 8200)),
        ("onebit:block=256", 2, 65_600 + 4 * 2050),
        ("topk:density=0.01,block=4096", 2, 129 * 6 * 40.96),  # 128 rows, and one that the 512 elements do not fill
        ("topk:density=0.01,block=4096", 4, 3 * 129 * 6 * 40.96),  # gathered: each of three peers gets all
        ("topk:density=0.05,block=4096", 4, 1.5 * 129 * 6 * 204.8),  # dense enough for two shots
        ("randomk:density=0.01", 2, 4 * (5243 + 6)),
        ("powersgd:rank=4", 2, 4 * (4 * 1536 + 512)),
        ("torch:powersgd", 4, 1.5 * 4 * (4 * 1536 + 512)),
    ],
)
def test_bytes_on_the_wire(spec: str, world: int, expected: float) -> None:
    assert Variant.parse(spec).wire_bytes(SHAPES, world) == pytest.approx(expected)


def test_options_reach_the_configuration() -> None:
    config = Variant.parse("topk:density=0.02,error_feedback=false").config
    assert config is not None
    assert (config.compressor, dict(config.options), config.error_feedback) == ("topk", {"density": 0.02}, False)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("int9", "did you mean 'int8'"),
        ("int8:blok=32", "did you mean 'block'"),
        ("powersgd:rank=0", "'rank'"),
        ("topk:density", "name=value"),
        ("torch:int8", "torch:fp16"),
        ("int8:error_feedback=maybe", "error_feedback"),
    ],
)
def test_what_does_not_exist_is_said_on_the_command_line(spec: str, hint: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=hint):
        Variant.parse(spec)
