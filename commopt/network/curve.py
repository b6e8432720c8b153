"""Seconds as a function of size, through measured points.

Not a straight line of latency and rate: it is far off where a collective changes its algorithm with size, or where
latency hides behind the wire.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from commopt.errors import ConfigError

FAR = 4  # between two points of a slope: noise of nearer ones would tilt it
LEAST_SLOPE = 0.5  # of the last point's seconds by size: a flatter end is noise, since bytes are not free


@dataclass(frozen=True)
class Curve:
    """Points of (size, seconds), of rising size; seconds never fall.

    Interpolated log-log. Below the first point seconds stay as they are there: that is latency. Above the last one they
    rise by the slope between it and a point well below, which leaves out what is spent once however much is sent; no
    steeper than in proportion to size, and no flatter than `LEAST_SLOPE` of that.

    >>> curve = Curve(((1000, 0.001), (4000, 0.004)))
    >>> curve.seconds(10), curve.seconds(2000), curve.seconds(8000)
    (0.001, 0.002, 0.008)

    Raises:
        ConfigError: no points, or points that are no such curve.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("a curve needs at least one point of (size, seconds).")
        for size, seconds in self.points:
            if not (0 < size < math.inf and 0 < seconds < math.inf):
                raise ConfigError(f"size and seconds of a curve must be positive and finite, got ({size}, {seconds}).")
        for (smaller, faster), (larger, slower) in pairwise(self.points):
            if smaller >= larger or faster > slower:
                raise ConfigError(f"a curve must rise: after ({smaller}, {faster}) came ({larger}, {slower}).")

    @classmethod
    def fit(cls, samples: Iterable[tuple[float, float]]) -> "Curve":
        """Through measurements of rising size. Where noise makes a larger size look faster, neighbours take their
        geometric mean (pool adjacent violators: the nearest curve that never falls)."""
        pools: list[tuple[float, list[float]]] = []  # mean log seconds of neighbouring sizes
        for size, seconds in samples:
            mean, sizes = math.log(seconds), [size]
            while pools and pools[-1][0] > mean:
                before, members = pools.pop()
                mean = (before * len(members) + mean * len(sizes)) / (len(members) + len(sizes))
                sizes = members + sizes
            pools.append((mean, sizes))
        return cls(tuple((size, math.exp(mean)) for mean, sizes in pools for size in sizes))

    def seconds(self, size: float) -> float:
        """What ``size`` takes."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1] + (size - last[0]) * self._slope
        right = bisect_right(self.points, size, key=lambda point: point[0])
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return y0 * math.pow(y1 / y0, math.log(size / x0) / math.log(x1 / x0))

    def scaled(self, factor: float) -> "Curve":
        """With all seconds multiplied."""
        return Curve(tuple((size, seconds * factor) for size, seconds in self.points))

    @property
    def rate(self) -> float:
        """Size by seconds at the last point."""
        return self.points[-1][0] / self.points[-1][1]

    @property
    def _slope(self) -> float:
        proportional = 1 / self.rate
        x1, y1 = self.points[-1]
        smaller = [point for point in self.points if point[0] <= x1 / FAR]
        if not smaller:
            return proportional
        x0, y0 = smaller[-1]
        return min(max((y1 - y0) / (x1 - x0), LEAST_SLOPE * proportional), proportional)

    def to_plain(self) -> list[list[float]]:
        """Plain values, for JSON."""
        return [[size, seconds] for size, seconds in self.points]

    @classmethod
    def from_plain(cls, plain: Any) -> "Curve":
        """The inverse of `to_plain`; raises ``ConfigError`` for anything else."""
        if not isinstance(plain, list) or not all(isinstance(point, list) and len(point) == 2 for point in plain):
            raise ConfigError("a curve is a list of pairs of size and seconds.")
        return cls(tuple((number(size), number(seconds)) for size, seconds in plain))


def number(value: Any) -> float:
    """A number from plain values; raises ``ConfigError`` for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"expected a number, got {value!r}.")
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError("a number is too large.") from error
