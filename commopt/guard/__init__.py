"""Notices a run in trouble, from values that all ranks share: pure, so that all ranks decide alike."""

from commopt.guard.config import GuardConfig, Verdict
from commopt.guard.guard import Guard

__all__ = ["Guard", "GuardConfig", "Verdict"]
