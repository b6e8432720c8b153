from typing import Any

import pytest

from commopt.errors import ConfigError
from commopt.guard import GuardConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sigma", 0),
        ("sigma", float("nan")),
        ("window", 3),
        ("window", 128.0),
        ("allowed_loss", -0.1),
        ("cool_down", 0),
        ("cool_down", True),
        ("roll_backs", 0),
        ("min_agreement", 1.5),
        ("min_agreement", "high"),
        ("roll_back_rise", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_its_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be a .*number from -?\d+ to \d+, got"):
        GuardConfig(**{name: value})
