"""Every error and warning that a user of commopt can meet. Each message says what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable


class CommOptError(Exception):
    """Base of all errors that commopt raises for its users."""


class ConfigError(CommOptError, ValueError):
    """An unknown name or option, or a value out of range; raised before anything is sent."""


class UnsupportedError(CommOptError, TypeError):
    """A tensor or an operation that cannot mean what was asked for."""


class AttachError(CommOptError, RuntimeError):
    """A model that cannot take the communication hook."""


class MismatchError(CommOptError, RuntimeError):
    """Ranks that disagree about configuration, parameters, the step or the next plan; raised on every rank, before a
    payload travels by what they disagree on."""


class ExchangeError(CommOptError, RuntimeError):
    """A bucket that could not be exchanged; raised on every rank, naming the rank and the bucket where it began."""


class CheckpointError(CommOptError, RuntimeError):
    """State beside a checkpoint that cannot be written or read; nothing of the exchange was changed."""


class ReportError(CommOptError, ValueError):
    """The lines of a run that are not there, or that no monitor wrote."""


class LabError(CommOptError, RuntimeError):
    """A network of namespaces that cannot be made, found or changed here; the message is the reason."""


class DivergenceError(CommOptError, RuntimeError):
    """Training diverges without compression too, so that compression is not the cause; raised on every rank."""


class CommOptWarning(UserWarning):
    """Something was skipped, passed through or reset; said once, with the reason and the remedy."""


def unknown(kind: str, given: str, valid: Iterable[str]) -> ConfigError:
    """A ``ConfigError`` for an unknown name, which names the nearest valid one."""
    names = sorted(valid)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return ConfigError(f"unknown {kind} {given!r}{hint} Valid: {', '.join(names) or 'none'}.")
