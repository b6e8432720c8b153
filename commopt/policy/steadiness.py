"""Whether the gradient changes fast: at the start, when the learning rate moves, when the loss falls steeply.

What compression loses is made good over some steps (error feedback), which takes gradients that stay alike so long.
"""

import math
from collections import deque

FAST, SLOW = 0.2, 0.03  # weights of the last step, in two means of the log of the gradient's norm
APART = 0.4  # between these means, from which the gradient changes: half as much again, or a third less
RATE_SPAN = 20  # steps, over which the learning rate is compared
RATE_MOVES = 1.5  # a factor


class Steadiness:
    """Told each step; the same figures on all ranks give the same answer.

    >>> steady = Steadiness()
    >>> for _ in range(50):
    ...     steady.add(norm=1.0, rate=0.1)
    >>> steady.changing
    False
    >>> steady.add(norm=1.0, rate=0.01)
    >>> steady.changing
    True
    """

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._weights = [0.0, 0.0]  # of the steps so far: means are of these, and not of a start at zero
        self._rates: deque[float] = deque(maxlen=RATE_SPAN)

    def add(self, norm: float, rate: float | None) -> None:
        """One step: the norm of its mean gradient, and the largest learning rate (None: nobody knows)."""
        if 0.0 < norm < math.inf:
            value = math.log(norm)
            self._fast += FAST * (value - self._fast)
            self._slow += SLOW * (value - self._slow)
            self._weights = [w + share * (1 - w) for w, share in zip(self._weights, (FAST, SLOW), strict=True)]
        if rate is not None and rate > 0.0:
            self._rates.append(rate)

    @property
    def changing(self) -> bool:
        """Whether it does."""
        rates = self._rates
        if rates and max(rates) > RATE_MOVES * min(rates):
            return True
        fast, slow = self._weights
        return fast > 0.0 and abs(self._fast / fast - self._slow / slow) > APART
