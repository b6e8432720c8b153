"""From the lines that a monitor wrote to one page and one picture.

The figure is drawn once. The page holds it as SVG, whose neutral colours follow the page, light or dark; the picture is
the same figure on white.
"""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, Formatter, MaxNLocator, PercentFormatter, ScalarFormatter

from commopt.errors import ReportError
from commopt.monitor import FILE_NAME, VERSION, Run
from commopt.monitor.plain import from_plain
from commopt.monitor.summary import COLUMNS, LEGEND, Summary, Totals, Window, add_up, cells, described, seconds, size
from commopt.records import Event

INK, LINE, PAPER = "#24292f", "#d0d7de", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE = "#3b82f6", "#d9730d", "#1f9d6b", "#9b6ef3"
RED, GREY = "#d1383d", "#8b949e"
EVENT_COLOURS = {
    "skip": GREY,
    "note": GREY,
    "fall_back": ORANGE,
    "re_arm": GREEN,
    "roll_back": RED,
    "stop": RED,
}
SMALL_EVENTS: Mapping[str, str] = {"skip": "^", "note": "."}  # there may be many: a mark each, not a line
DASHED = (0, (3, 2))
FEW, MANY = 40, 400  # windows up to which each one gets a dot, and from which on a line through them all is a blot
HUGE = 1e100  # axes cannot hold more
SHOWN_RUNS = 10

STYLE: Any = {
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "commopt",  # the same file from the same run
}


@dataclass
class Section:
    """What one process wrote, from its run line on."""

    run: Run
    windows: list[Window] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Log:
    """All that a file holds: a section for each time that the run was started or resumed.

    Args:
        path: of the file.
        sections: at least one.
        notes: what a reader should know of the file itself.
    """

    path: Path
    sections: Sequence[Section]
    notes: Sequence[str]

    @property
    def windows(self) -> list[Window]:
        """In the order in which they were written; their steps go back where the run did."""
        return [window for section in self.sections for window in section.windows]

    @property
    def events(self) -> list[Event]:
        """In the order in which they were written."""
        return [event for section in self.sections for event in section.events]

    def summary(self, gpu_hour_price: float | None = None) -> Summary:
        """Of everything in the file, steps that were rolled back and done again included: they took their time.

        Args:
            gpu_hour_price: of one GPU, instead of the one that was written down.
        """
        plans: dict[str, list[Totals]] = {}
        for section in self.sections:
            for window in section.windows:
                plans.setdefault(window.plan, []).append(window.totals(section.run.world))
        run = self.sections[-1].run
        price = run.hour_price if gpu_hour_price is None else gpu_hour_price * run.gpus
        return Summary({name: add_up(parts) for name, parts in plans.items()}, self.events, run.threshold, price)


def read(directory: Path) -> Log:
    """The lines that a monitor wrote into ``directory``. A last line that a killed run left unfinished is passed over
    and noted.

    Raises:
        ReportError: no such file, or a line that no monitor wrote; names the line.
    """
    path = directory / FILE_NAME
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        below = sorted(directory.glob(f"*/**/{FILE_NAME}"), key=lambda found: found.stat().st_mtime, reverse=True)
        names = ", ".join(str(found.parent) for found in below[:SHOWN_RUNS])
        remedy = f"The latest runs below that: {names}." if below else "Give the directory that the monitor wrote to."
        raise ReportError(f"{path} cannot be read: {error.strerror}. {remedy}") from error
    sections: list[Section] = []
    notes: list[str] = []
    unfinished = 0  # number of a line that ends in the middle, perhaps because its process did
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if unfinished:
                raise _foreign(path, unfinished, "it is not JSON") from error
            unfinished = number
            continue
        kind = entry.pop("kind", None) if isinstance(entry, dict) else None
        if unfinished and kind != "run":
            raise _foreign(path, unfinished, "it is not JSON")
        if unfinished:
            notes.append(f"Line {unfinished} is unfinished: the run was ended while it wrote it.")
            unfinished = 0
        try:
            _take(kind, entry, sections)
        except ValueError as error:
            raise _foreign(path, number, str(error)) from error
    if unfinished and lines[-1]:
        notes.append(f"The last line, {unfinished}, is unfinished: the run was ended while it wrote it.")
    elif unfinished:
        raise _foreign(path, unfinished, "it is not JSON")
    if not sections:
        raise ReportError(f"{path} holds no run: nothing was written yet.")
    if not sections[-1].ended:
        notes.append("The last run has no summary: it was ended from outside, or it still goes on.")
    return Log(path, sections, notes)


def _take(kind: object, entry: Any, sections: list[Section]) -> None:
    if kind == "run":
        run = from_plain(Run, entry)
        if run.version != VERSION:
            raise ValueError(f"its version is {run.version}, and this commopt reads version {VERSION}")
        if run.world < 1 or run.gpus < 1:
            raise ValueError("a run has at least one rank and one GPU")
        sections.append(Section(run))
        return
    if kind not in ("window", "event", "summary"):
        raise ValueError("it is not a run, window, event or summary")
    if not sections:
        raise ValueError("no run line stands before it")
    if kind == "window":
        sections[-1].windows.append(from_plain(Window, entry))
    elif kind == "event":
        sections[-1].events.append(from_plain(Event, entry))
    else:
        sections[-1].ended = True  # its figures follow from the windows


def _foreign(path: Path, number: int, reason: str) -> ReportError:
    return ReportError(
        f"line {number} of {path} was not written by a monitor, or is damaged: {reason}. Take the line out to go on "
        "without it."
    )


def write(log: Log, page: Path, picture: Path | None = None, gpu_hour_price: float | None = None) -> Summary:
    """Writes one HTML page that needs nothing else, and a PNG where ``picture`` is given.

    Returns:
        The summary that stands on top of the page.

    Raises:
        OSError: a file cannot be written.
    """
    summary = log.summary(gpu_hour_price)
    figure = draw(log)
    page.write_text(render_page(log, summary, figure), encoding="utf-8")
    if picture is not None:
        with matplotlib.rc_context(STYLE):
            figure.savefig(picture, format="png", dpi=150, facecolor=PAPER)
    return summary


def render_page(log: Log, summary: Summary, figure: Figure) -> str:
    """The page as text. It loads nothing and runs no script, and says so to the browser."""
    template = files("commopt.monitor").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    total = summary.total
    tiles = {
        "steps": f"{total.steps:.0f}",
        "time": seconds(total.step_seconds),
        "waited for gradients": f"{total.exposed_share:.1%}",
        "communication to computation": f"{total.ratio:.2f}",
        "compression": f"{total.compression_ratio:.1f} x",
        "bytes saved on each rank": size(total.bytes_saved),
        "skipped steps": f"{total.skipped:.0f}",
        "events": str(len(summary.events)),
    }
    rows = [(name, cells(totals)) for name, totals in summary.plans.items()]
    if len(rows) > 1:
        rows.append(("all", cells(total)))
    return environment.from_string(template).render(
        name=log.path.resolve().parent.name,
        log=log,
        tiles=tiles,
        columns=COLUMNS,
        legend=LEGEND,
        rows=rows,
        summary=summary,
        events=[(event, described(event)) for event in summary.events],
        colours=EVENT_COLOURS,
        figure=Markup(_svg(figure)),
    )


def _svg(figure: Figure) -> str:
    """An element to put into a page; what is neither a line nor a mark takes the page's colours."""
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor").replace(LINE, "var(--line)")


def draw(log: Log) -> Figure:
    """All panels over the steps. Where a run went back, what was done again is drawn in full and the rest faintly."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 12), layout="constrained")
        axes = figure.subplots(4, 2, sharex=True)
        panels = iter(axes.flat)
        windows = log.windows

        def panel(title: str, formatter: Formatter, *lines: tuple[str, str, Callable[[Window], float | None]]) -> Axes:
            axis: Axes = next(panels)
            _draw_panel(axis, title, formatter, windows, lines)
            return axis

        panel("Loss", ScalarFormatter(), ("loss", BLUE, lambda window: window.loss))
        panel("Gradient norm", ScalarFormatter(), ("norm", BLUE, lambda window: window.gradient_norm))
        panel(
            "Time of a step",
            EngFormatter("s"),
            ("computing", BLUE, lambda window: window.compute_seconds),
            ("exposed", RED, lambda window: window.exposed_seconds),
            ("wire", GREEN, lambda window: window.wire_seconds),
            ("codec", PURPLE, lambda window: window.codec_seconds),
        ).set_ylim(bottom=0)
        panel(
            "Bytes of a step",
            EngFormatter("B"),
            ("uncompressed", GREY, lambda window: window.bytes_uncompressed),
            ("sent", BLUE, lambda window: window.bytes_sent),
        ).set_ylim(bottom=0)
        panel("Communication to computation", ScalarFormatter(), ("ratio", BLUE, lambda w: w.ratio)).set_ylim(bottom=0)
        share = panel("Exposed share", PercentFormatter(1.0), ("share", BLUE, lambda window: window.exposed_share))
        share.set_ylim(bottom=0)
        threshold = log.sections[-1].run.threshold
        share.axhline(threshold, color=GREY, linewidth=1, linestyle=DASHED)
        share.annotate(
            f"under {threshold:.0%} compression is not worth it",
            (1, threshold),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        panel(
            "Delivered against true gradient",
            ScalarFormatter(),
            ("cosine", BLUE, lambda w: w.cosine),
            ("sign agreement", ORANGE, lambda w: w.sign_agreement),
        )
        panel("Residual over gradient norm", ScalarFormatter(), ("residual", BLUE, lambda w: w.residual_ratio))
        for axis in axes[-1]:
            axis.set_xlabel("step")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _mark_events(figure, list(axes.flat), log.events)
    return figure


def _draw_panel(
    axis: Axes,
    title: str,
    formatter: Formatter,
    windows: Sequence[Window],
    lines: Sequence[tuple[str, str, Callable[[Window], float | None]]],
) -> None:
    kept, superseded = _split(windows)
    for label, colour, value in lines:
        for stretch in superseded:
            axis.plot(*_points(stretch, value), color=colour, alpha=0.35, linewidth=1)
        steps, values = _points(kept, value)
        if len(kept) > MANY:
            axis.plot(steps, values, color=colour, alpha=0.35, linewidth=0.5)
            steps, values = _thinned(steps, values)
        axis.plot(steps, values, color=colour, label=label, marker="." if len(kept) <= FEW else None)
    axis.set_title(title, pad=8 if len(lines) == 1 else 20)
    axis.yaxis.set_major_formatter(formatter)
    axis.tick_params(length=0)
    if len(lines) > 1:
        axis.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=len(lines), borderaxespad=0, handlelength=1.2
        )
    if not any(math.isfinite(y) for _, _, value in lines for y in _points(windows, value)[1]):
        axis.set_yticks([])
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", alpha=0.6)


def _points(windows: Sequence[Window], value: Callable[[Window], float | None]) -> tuple[list[int], list[float]]:
    values = (value(window) for window in windows)
    return [window.step for window in windows], [math.nan if y is None or abs(y) > HUGE else y for y in values]


def _thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Means of what is finite among neighbours; less than ``MANY`` of them."""
    count = 2 * len(steps) // MANY + 1
    chunks = [range(start, min(start + count, len(steps))) for start in range(0, len(steps), count)]
    known = [[values[index] for index in chunk if math.isfinite(values[index])] for chunk in chunks]
    return [steps[chunk[len(chunk) // 2]] for chunk in chunks], [fmean(part) if part else math.nan for part in known]


def _split(windows: Sequence[Window]) -> tuple[list[Window], list[list[Window]]]:
    """The windows whose steps were not done again, in order, and the stretches of those that were."""
    kept: list[Window] = []
    superseded: list[list[Window]] = []
    stretch: list[Window] = []
    for window in reversed(windows):
        stays = not kept or window.step < kept[-1].step
        if stretch and (stays or window.step >= stretch[-1].step):
            if stays:
                stretch.append(window)  # where it branches off
            superseded.append(stretch[::-1])
            stretch = []
        (kept if stays else stretch).append(window)
    if stretch:
        superseded.append(stretch[::-1])
    return kept[::-1], superseded


def _mark_events(figure: Figure, axes: Sequence[Axes], events: Sequence[Event]) -> None:
    handles = []
    for action, colour in EVENT_COLOURS.items():
        steps = [event.step for event in events if event.action == action]
        if not steps:
            continue
        marker = SMALL_EVENTS.get(action)
        for axis in axes:
            across = axis.get_xaxis_transform()  # steps to the right, the height of the panel as 1
            if marker:
                heights = [0.0] * len(steps)
                axis.plot(steps, heights, marker, color=colour, markersize=5, transform=across, clip_on=False)
            else:
                axis.vlines(steps, 0, 1, colors=colour, linewidth=1, linestyles=DASHED, transform=across, zorder=1)
        label = f"{action.replace('_', '-')} ({len(steps)})"
        handles.append(Line2D([], [], color=colour, label=label, marker=marker, linestyle="" if marker else DASHED))
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
