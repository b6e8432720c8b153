"""What is measured of a run: means, lines of JSON, a summary with advice, a page."""

from commopt.monitor.monitor import FILE_NAME, VERSION, Monitor, Run
from commopt.monitor.summary import Summary, Totals, Window, advice, render

__all__ = ["FILE_NAME", "VERSION", "Monitor", "Run", "Summary", "Totals", "Window", "advice", "render"]
