"""What looks at one series of numbers each: a spike, or a drift. Plain Python, a few microseconds a step."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, pstdev
from typing import Any

from commopt.guard import state as read

MAD = 1.4826  # the standard deviation of Gaussian noise, over its median absolute deviation
TINY = 1e-12
READABLE = 1 << 20  # entries of a saved window


class RecentMax:
    """The largest of the values that were added within the last ``span`` ticks, 0 where none was."""

    def __init__(self, span: int) -> None:
        self.span = span
        self.now = 0
        self._peaks: deque[tuple[int, float]] = deque()  # falling: what a later, larger value hides is not kept

    def tick(self) -> None:
        """Lets time pass."""
        self.now += 1
        if self._peaks and self._peaks[0][0] <= self.now - self.span:
            self._peaks.popleft()

    def add(self, value: float) -> None:
        """Adds a value, now."""
        while self._peaks and self._peaks[-1][1] <= value:
            self._peaks.pop()
        self._peaks.append((self.now, value))

    def largest(self) -> float:
        """The largest value in memory."""
        return self._peaks[0][1] if self._peaks else 0.0

    def state(self) -> dict[str, Any]:
        """Plain values."""
        ages, values = [self.now - at for at, _ in self._peaks], [value for _, value in self._peaks]
        return {"ages": ages, "values": values}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state`` gave."""
        values = read.numbers(state, "values", self.span)
        ages = read.numbers(state, "ages", self.span, like=len(values))
        self.now = 0
        self._peaks = deque((-int(age), value) for age, value in zip(ages, values, strict=True))


class Spike:
    """Single values far above a sliding window.

    A value is a spike where its distance from the window's median is more than ``sigma`` times the window's scale, and
    more than ``MARGIN`` times the largest such distance of the last ``MEMORY`` accepted values. The scale is the larger
    of the standard deviation and the scaled median absolute deviation. The second condition carries heavy tails: where
    noise falls off as x^-3, one value in MARGIN^3 x MEMORY passes it. It ends at ten times the median, lest one outlier
    make room for a larger one.

    Args:
        window: values; there is no verdict before it is full.
        sigma: threshold, in units of the window's scale.
    """

    MARGIN = 3.0
    MEMORY = 2048
    BEYOND = math.log(10)  # ten times the median is no noise, whatever was shown before
    FLOOR = 0.01  # of the scale, relative to the value: for training that is hardly noisy

    def __init__(self, window: int, sigma: float) -> None:
        self.window, self.sigma = window, sigma
        self.reset()

    def reset(self) -> None:
        """Forgets the series."""
        self._values: deque[float] = deque(maxlen=self.window)
        self._sorted: list[float] = []
        self._shown = RecentMax(self.MEMORY)

    def sigmas(self, value: float, relative: bool) -> float | None:
        """How many scales ``value`` lies above the median where it is a spike; None where it is not.

        Args:
            value: a logarithm, or a plain value.
            relative: whether differences of the values are relative changes, as those of logarithms are.
        """
        if len(self._values) < self.window:
            return None
        centre = self._median()
        distance = value - centre
        shown = self.MARGIN * self._shown.largest()
        if distance <= (min(shown, self.BEYOND) if relative else shown):
            return None
        floor = self.FLOOR if relative else self.FLOOR * abs(centre)
        sigmas = distance / max(pstdev(self._sorted), self._robust(centre), floor, TINY)
        return sigmas if sigmas > self.sigma else None

    def accept(self, value: float) -> None:
        """Adds ``value`` to the window."""
        self._shown.tick()
        if self._sorted:
            centre = self._median()
            distance = max(value - centre, 0.0)
            if len(self._values) < self.window:
                # Nothing is judged yet: what may be trouble must not pass for ordinary noise.
                distance = min(distance, self.sigma * self._robust(centre) / 2)
            self._shown.add(distance)
        if len(self._values) == self.window:
            del self._sorted[bisect_left(self._sorted, self._values[0])]
        self._values.append(value)
        insort(self._sorted, value)

    def _robust(self, centre: float) -> float:
        return MAD * median(abs(entry - centre) for entry in self._sorted)

    def _median(self) -> float:
        half = len(self._sorted) // 2
        return (self._sorted[half] + self._sorted[~half]) / 2

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {"values": list(self._values), "shown": self._shown.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state`` gave; of a longer window, the latest values."""
        self._values = deque(read.numbers(state, "values", READABLE), maxlen=self.window)
        self._sorted = sorted(self._values)
        self._shown.load(read.section(state, "shown"))


@dataclass(frozen=True)
class Rise:
    """What a drift was found by: where it may have begun, the CUSUM and its threshold, and the rise of the level."""

    onset: int
    total: float
    threshold: float
    relative: float


class Drift:
    """A slow rise of the level: a one-sided CUSUM (Page, 1954) against the low levels of the last steps.

    Every ``STRIDE`` steps the median and the spread of the last ``BLOCK`` values are taken. The reference is the
    ``RANK``-th lowest of the medians of the last ``SPAN`` steps, so that it follows a falling level at once and a
    rising one late. What a value lies above it, in units of the spread and at most ``LIMIT`` of them, is summed, less
    ``ALLOWANCE``; the sum starts anew where it falls below zero.

    An alarm is a sum above ``THRESHOLD``, raised in two ways for noise that is correlated from step to step: by
    (1 + r) / (1 - r), with r the correlation of neighbours, which is how much wider sums of such noise spread; and to
    twice the largest sum that came back to zero by itself within ``MEMORY`` steps.

    Args:
        relative: whether differences of the values are relative changes, as those of logarithms are.
    """

    BLOCK, STRIDE, SPAN, RANK = 32, 16, 256, 3
    ALLOWANCE, THRESHOLD, LIMIT = 0.75, 13.0, 5.0
    FLOOR = 0.0125  # of the spread, relative to the loss: what is quieter is not taken at its word
    MEMORY = 4096

    def __init__(self, relative: bool = True) -> None:
        self._returned = RecentMax(self.MEMORY)
        self.reset(relative)

    def reset(self, relative: bool) -> None:
        """Forgets the series, but not how far it used to wander."""
        blocks = self.SPAN // self.STRIDE
        self._relative = relative
        self._values: deque[float] = deque(maxlen=self.BLOCK)
        self._levels: deque[float] = deque(maxlen=blocks)
        self._spreads: deque[float] = deque(maxlen=blocks)
        self._jitters: deque[float] = deque(maxlen=blocks)  # spreads of the differences between neighbours
        self._until_level = self.BLOCK
        self.restart()

    def restart(self) -> None:
        """Begins a new sum."""
        self._total = self._peak = 0.0
        self._onset = self._length = 0

    def update(self, value: float, step: int) -> Rise | None:
        """Adds the value of a step. The rise, where there is an alarm."""
        self._returned.tick()
        self._values.append(value)
        if len(self._levels) >= self.RANK:
            self._add((value - self._reference) / self._sigma, step)
        self._until_level -= 1
        if self._until_level == 0:
            self._until_level = self.STRIDE
            self._take_level()
        if self._total == 0:
            return None
        threshold = max(self.THRESHOLD * self._widening, 2 * self._returned.largest())
        if self._total <= threshold:
            return None
        latest = list(self._values)[-min(self._length, self.STRIDE) :]
        # A slow rise hides below the allowance first: in simulations, for up to four times as long as it is summed.
        # What lies before all that the reference was taken from has nothing to do with it.
        begun = max(self._onset - 4 * self._length - 2 * self.BLOCK, step - self.SPAN, 0)
        return Rise(min(begun, self._onset), self._total, threshold, (median(latest) - self._reference) / self._unit)

    def _add(self, excess: float, step: int) -> None:
        if self._total == 0:
            self._onset, self._length = step, 0
        self._length += 1
        self._total = max(self._total + max(-self.LIMIT, min(excess, self.LIMIT)) - self.ALLOWANCE, 0.0)
        self._peak = max(self._peak, self._total)
        if self._total == 0 and self._peak > 0:
            self._returned.add(self._peak)
            self._peak = 0.0

    def _take_level(self) -> None:
        level = median(self._values)
        self._levels.append(level)
        self._spreads.append(MAD * median(abs(value - level) for value in self._values))
        self._jitters.append(MAD * median(abs(after - before) for before, after in pairwise(self._values)))
        if len(self._levels) >= self.RANK:
            self._measure()

    def _measure(self) -> None:
        self._reference = sorted(self._levels)[self.RANK - 1]
        spread = median(self._spreads)
        # A loss that crosses zero has no size of its own: its noise is taken to be a twentieth of it.
        self._unit = 1.0 if self._relative else max(abs(self._reference), 20 * spread, TINY)
        self._sigma = max(spread, self.FLOOR * self._unit)
        # Differences of independent values spread by the square root of two more than the values do.
        correlation = 1 - (median(self._jitters) / max(spread, TINY)) ** 2 / 2
        correlation = min(max(correlation, 0.0), 0.95)
        self._widening = (1 + correlation) / (1 - correlation)

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "relative": self._relative,
            "values": list(self._values),
            "levels": list(self._levels),
            "spreads": list(self._spreads),
            "jitters": list(self._jitters),
            "until_level": self._until_level,
            "total": self._total,
            "peak": self._peak,
            "onset": self._onset,
            "length": self._length,
            "returned": self._returned.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state`` gave."""
        self.reset(read.flag(state, "relative"))
        self._values.extend(read.numbers(state, "values", self.BLOCK))
        blocks = self.SPAN // self.STRIDE
        self._levels.extend(read.numbers(state, "levels", blocks))
        self._spreads.extend(read.numbers(state, "spreads", blocks, like=len(self._levels)))
        self._jitters.extend(read.numbers(state, "jitters", blocks, like=len(self._levels)))
        self._until_level = read.integer(state, "until_level", max(1, self.BLOCK - len(self._values)), self.BLOCK)
        self._total, self._peak = read.number(state, "total", low=0), read.number(state, "peak", low=0)
        self._onset, self._length = read.integer(state, "onset"), read.integer(state, "length")
        self._returned.load(read.section(state, "returned"))
        if len(self._levels) >= self.RANK:
            self._measure()
