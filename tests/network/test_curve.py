"""Tables of size and seconds, and what they say between and beyond their points."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commopt.errors import ConfigError
from commopt.network import Curve, Link, Network

seconds = st.floats(1e-7, 1e3)


@st.composite
def samples(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Sizes well apart, as a probe tries them, and any seconds."""
    start = draw(st.floats(1, 1e4))
    taken = draw(st.lists(seconds, min_size=1, max_size=9))
    return [(start * 4**i, value) for i, value in enumerate(taken)]


@given(samples())
def test_a_fit_is_a_curve_that_never_falls(measured: list[tuple[float, float]]) -> None:
    curve = Curve.fit(measured)
    assert [size for size, _ in curve.points] == [size for size, _ in measured]
    asked = [size * factor for size, _ in measured for factor in (0.3, 1, 1.5, 3)] + [1e12]
    answers = [curve.seconds(size) for size in sorted(asked)]
    assert all(earlier <= later * (1 + 1e-9) for earlier, later in pairwise(answers))
    logs = [math.log(value) for _, value in measured], [math.log(value) for _, value in curve.points]
    assert sum(logs[0]) == pytest.approx(sum(logs[1]), abs=1e-6)  # pooling keeps geometric means


@given(samples(), st.floats(1e-3, 1e3))
def test_scaling_and_plain_values(measured: list[tuple[float, float]], factor: float) -> None:
    curve = Curve.fit(measured)
    assert Curve.from_plain(json.loads(json.dumps(curve.to_plain()))) == curve
    for size in (0.5, 3e3, 1e9):
        assert curve.scaled(factor).seconds(size) == pytest.approx(factor * curve.seconds(size))


def test_a_curve_that_rises_is_kept_as_it_was_measured() -> None:
    points = ((1024, 0.001), (4096, 0.002), (16384, 0.007))
    assert dict(Curve.fit(points).points) == pytest.approx(dict(points))


@pytest.mark.parametrize("latency", [0.0, 0.0004, 0.002])
def test_a_straight_line_is_met(latency: float) -> None:
    def line(size: float) -> float:
        return latency + size * 1e-7

    curve = Curve(tuple((4**i * 1000, line(4**i * 1000)) for i in range(6)))
    for size in (1000, 1500, 3000, 10_000, 90_000, 500_000):
        assert curve.seconds(size) == pytest.approx(line(size), rel=0.07)
    for far in (2e6, 1e8):
        assert curve.seconds(far) == pytest.approx(line(far), rel=1e-9)
    assert curve.seconds(1) == curve.seconds(1000) == line(1000)


@pytest.mark.parametrize(
    ("points", "slope"),
    [
        (((1000, 0.003), (4000, 0.003)), 0.5 * 0.003 / 4000),  # bytes are not free
        (((1000, 0.001), (4000, 0.012)), 0.012 / 4000),  # nor dearer than all that came before
        (((1000, 0.002), (4000, 0.005), (8000, 0.0091)), 0.0071 / 7000),  # a near neighbour is passed over
        (((4000, 0.004),), 0.004 / 4000),
    ],
)
def test_what_lies_beyond(points: tuple[tuple[float, float], ...], slope: float) -> None:
    size, last = points[-1]
    assert Curve(points).seconds(3 * size) == pytest.approx(last + 2 * size * slope)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0, 1),),
        ((1, 0),),
        ((1, math.inf),),
        ((math.nan, 1),),
        ((2, 1), (1, 2)),
        ((1, 2), (2, 1)),
        ((1, 1), (1, 1)),
    ],
    ids=str,
)
def test_what_is_no_curve_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ConfigError):
        Curve(points)


@pytest.mark.parametrize(
    "plain", [None, 3, "x", [1], [[1]], [[1, 2, 3]], [["1", "2"]], [[True, 2]], [[1, 10**400]], {}]
)
def test_what_is_no_plain_curve_is_refused(plain: Any) -> None:
    with pytest.raises(ConfigError):
        Curve.from_plain(plain)


CURVE = Curve(((1000, 0.001), (4000, 0.002)))
FAST = Curve(((1000, 0.0001), (4000, 0.0002)))
NETWORK = Network(
    (0, 1, 2, 0),
    {(0, 1): Link(0.001, FAST), (0, 2): Link(0.002, CURVE)},
    {"all_reduce": CURVE, "all_gather": CURVE, "all_to_all": FAST},
    0.25,
    65536,
)


def test_a_network_survives_plain_values() -> None:
    assert Network.from_plain(json.loads(json.dumps(NETWORK.to_plain()))) == NETWORK
    alone = Network((0,), {}, {}, 0.0, 1)
    assert Network.from_plain(alone.to_plain()) == alone


def test_the_slowest_link() -> None:
    slowest = NETWORK.slowest
    assert slowest is NETWORK.links[0, 2]
    assert slowest.bandwidth == pytest.approx(4000 / 0.002)
    assert Network((0,), {}, {}, 0.0, 1).slowest is None


@pytest.mark.parametrize(
    "damage",
    [
        {"hosts": []},
        {"hosts": ["0", 1, 2, 0]},
        {"hosts": [0, 1]},
        {"links": []},
        {"links": [{"hosts": [0, 1], "latency": -1.0, "curve": [[1, 1]]}]},
        {"links": [{"hosts": [0], "latency": 1.0, "curve": [[1, 1]]}]},
        {"links": 3},
        {"collectives": {}},
        {"collectives": {"all_reduce": [[1, 1]], "all_gather": [[1, 1]], "gossip": [[1, 1]]}},
        {"collectives": [1]},
        {"cpu_share": None},
        {"cpu_share": math.nan},
    ],
    ids=str,
)
def test_damaged_plain_values_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Network.from_plain({**NETWORK.to_plain(), **damage})


@pytest.mark.parametrize("plain", [None, [], "text", {"hosts": [0]}], ids=str)
def test_other_plain_values_are_refused(plain: Any) -> None:
    with pytest.raises(ConfigError):
        Network.from_plain(plain)
