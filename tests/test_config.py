"""The one configuration: what it takes, and what it says to a mistake."""

import dataclasses
from typing import Any

import pytest

from commopt import CommOptConfig, ConfigError
from commopt.compressors import create
from commopt.plan import Plan


def test_defaults() -> None:
    assert CommOptConfig() == CommOptConfig("auto", options={}, error_feedback=None, timeout=1800.0, quality="safe")
    assert Plan.from_config(CommOptConfig()) == Plan.uncompressed()  # until something was measured
    assert Plan.from_config(CommOptConfig("int8")) == Plan(create("int8"), feedback=False)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommOptConfig().compressor = "int4"  # type: ignore[misc]


def test_plain_data_is_enough() -> None:
    values = {"compressor": "topk", "options": {"density": 0.02}, "error_feedback": False, "timeout": 60}
    assert CommOptConfig.from_dict(values) == CommOptConfig("topk", {"density": 0.02}, False, 60)
    assert Plan.from_config(CommOptConfig.from_dict(values)) == Plan(create("topk", density=0.02), feedback=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compresor": "int8"}, "unknown configuration key 'compresor'; did you mean 'compressor'?"),
        ({"feedback": True}, "unknown configuration key 'feedback'; did you mean 'error_feedback'?"),
        ({"xyz": 1}, "unknown configuration key 'xyz'"),
        ({"compressor": 8}, "compressor must be a registered name, got 8."),
        ({"options": "rank=4"}, "options must be a mapping of option names to values, got 'rank=4'."),
        ({"error_feedback": "yes"}, "error_feedback must be true, false or null, got 'yes'."),
        ({"quality": "best"}, "quality must be one of lossless, safe, aggressive, got 'best'."),
        ({"options": {"rank": 4}}, "compressor='auto' chooses options and error feedback itself"),
        ({"error_feedback": True}, "compressor='auto' chooses options and error feedback itself"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0."),
        ({"timeout": float("inf")}, "timeout must be a positive number of seconds, got inf."),
        ({"timeout": float("nan")}, "timeout must be a positive number of seconds, got nan."),
        ({"timeout": "60"}, "timeout must be a positive number of seconds, got '60'."),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CommOptConfig.from_dict(values)
    assert message in str(caught.value)


def test_feedback_follows_the_compressor_unless_told() -> None:
    assert Plan.from_config(CommOptConfig("onebit")).feedback
    assert not Plan.from_config(CommOptConfig("onebit", error_feedback=False)).feedback
    assert not Plan.from_config(CommOptConfig("bf16")).feedback
    assert Plan.from_config(CommOptConfig("bf16", error_feedback=True)).feedback


def test_an_unbiased_compressor_shrinks_under_feedback() -> None:
    assert Plan(create("randomk", density=0.1), feedback=True).gain == pytest.approx(0.1)
    assert Plan(create("randomk", density=0.1), feedback=False).gain == 1.0
    assert Plan(create("topk"), feedback=True).gain == 1.0
