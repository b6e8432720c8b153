"""A cluster rehearsed on one machine: hosts that are network namespaces, behind links as slow as one chooses."""

from commopt.lab.loopback import Loopback, on_each_host, on_each_rank
from commopt.lab.netlab import Lab, NetLab, available, open_lab

__all__ = ["Lab", "Loopback", "NetLab", "available", "on_each_host", "on_each_rank", "open_lab"]
