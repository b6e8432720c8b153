"""The one path from gradient to gradient, who runs it, and the vote that ends each step."""

from commopt.engine.engine import Engine
from commopt.engine.step import Stats
from commopt.messages import Bucket

__all__ = ["Bucket", "Engine", "Stats"]
