"""A cluster rehearsed on one machine: hosts that are network namespaces, behind links as slow as one chooses."""

from commopt.lab.loopback import Loopback, on_each_rank
from commopt.lab.netlab import NetLab, available, open_lab

__all__ = ["Loopback", "NetLab", "available", "on_each_rank", "open_lab"]
