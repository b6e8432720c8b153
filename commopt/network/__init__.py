"""What the network and the machine can do, in numbers: measured by `probe` and `machine`, kept by `cache`, read by the
cost model."""

from commopt.network.curve import Curve
from commopt.network.table import Link, Network

__all__ = ["Curve", "Link", "Network"]
