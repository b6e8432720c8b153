"""What a user writes for a link, checked before anything is made."""

import re

from commopt.errors import ConfigError

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATES = 8e3, 4e11  # bits per second that tc keeps
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_DELAY = 10.0  # seconds; more is a slip of the unit


def rate(text: str | None) -> str | None:
    """Bits per second as tc writes them, or None ("none" or None: as fast as this machine carries it).

    >>> rate("2.5Gbit")
    '2.5gbit'
    """
    if text is None or text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    if not match or not _RATES[0] <= float(match[1]) * _BITS[match[2]] <= _RATES[1]:
        raise ConfigError(
            f"{text!r} is not a rate: write 800kbit, 100mbit, 2.5gbit (8kbit to 400gbit), or none for an unshaped link"
        )
    return text.lower()


def delay(text: str | None) -> float:
    """Seconds.

    >>> delay("20ms")
    0.02
    """
    if text is None:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if not match or (seconds := float(match[1]) * _SECONDS[match[2]]) > _LONGEST_DELAY:
        raise ConfigError(f"{text!r} is not a delay: write 500us, 20ms, 0.1s; at most {_LONGEST_DELAY:g}s")
    return seconds


def loss(text: str | None) -> float:
    """The share of packets that is lost.

    >>> loss("1%")
    0.01
    """
    if text is None:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if not match or (percent := float(match[1])) > 100:
        raise ConfigError(f"{text!r} is not a loss: write 1% or 0.05%; at most 100%")
    return percent / 100
