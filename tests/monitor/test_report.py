"""What is read from a run's lines, and the page and the picture that come of it."""

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from commopt.errors import ReportError
from commopt.monitor import FILE_NAME, Monitor
from commopt.monitor.report import FEW, MANY, _split, _thinned, draw, read, write
from commopt.records import Event
from tests.monitor.pages import Page
from tests.monitor.runs import COMPRESSED, PLAIN, eventful, steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with a short run that came to its end."""
    monitor = Monitor(tmp_path, every=5, gpu_hour_price=1.0)
    for record in steps(COMPRESSED, range(40)) + steps(PLAIN, range(40, 60)):
        monitor.add(record)
    monitor.event(Event(39, "fall_back", "why not"))
    monitor.close()
    return tmp_path


def test_what_was_written_is_read(run: Path) -> None:
    log = read(run)
    (section,) = log.sections
    assert section.ended
    assert not log.notes
    lines = [json.loads(line) for line in (run / FILE_NAME).read_text().splitlines()]
    assert [{"kind": "window", **asdict(window)} for window in log.windows] == lines[1:-2]
    assert log.events == [Event(39, "fall_back", "why not")]
    summary = log.summary()
    for name, totals in summary.plans.items():
        assert asdict(totals) == pytest.approx(lines[-1]["plans"][name])
    assert summary.advice == lines[-1]["advice"]
    assert summary.comparison == lines[-1]["comparison"]
    assert log.summary(gpu_hour_price=3.0).hour_price == 3.0


def test_null_is_not_a_number(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, every=1)
    monitor.add(PLAIN)
    monitor.close()
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().replace('"exposed_seconds": 0.25', '"exposed_seconds": null', 1))
    (window,) = read(tmp_path).windows
    assert math.isnan(window.exposed_seconds)
    write(read(tmp_path), tmp_path / "page.html")


def test_a_run_that_was_killed_within_a_line_is_read_up_to_there(run: Path) -> None:
    path = run / FILE_NAME
    whole = path.read_bytes()
    windows = read(run).windows
    for cut in (1, 30, 200):
        path.write_bytes(whole[:-cut])
        log = read(run)
        assert log.windows == windows
        unfinished, *more = log.notes if cut > 1 else ["", *log.notes]
        if cut > 1:
            assert re.match(r"The last line, 15, is unfinished", unfinished)
            assert more == ["The last run has no summary: it was ended from outside, or it still goes on."]
    Monitor(run).event(Event(1, "note", "resumed"))
    log = read(run)
    assert len(log.sections) == 2
    assert log.notes[0] == "Line 15 is unfinished: the run was ended while it wrote it."


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "not JSON"),
        ('{"kind": "win', "not JSON"),
        ("\x00\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a run, window, event or summary"),
        ("17", "not a run, window, event or summary"),
        ('{"kind": ["run"]}', "not a run, window, event or summary"),
        ('{"kind": "weights"}', "not a run, window, event or summary"),
        ('{"kind": "event", "step": 1}', "lacks action, reason"),
        ('{"kind": "event", "step": "1", "action": "skip", "reason": "", "restored_step": null}', "step cannot be '1'"),
        (
            '{"kind": "event", "step": 1, "action": "run", "reason": "", "restored_step": null}',
            "action cannot be 'run'",
        ),
        ('{"kind": "event", "step": 1, "action": [], "reason": "", "restored_step": null}', "action cannot be"),
        ('{"kind": "event", "step": 1e400, "action": "skip", "reason": "", "restored_step": 0}', "step cannot be inf"),
        ('{"kind": "event", "step": 1, "action": "skip", "reason": "", "restored_step": null, "x": 1}', "unknown x"),
        ('{"kind": "run", "version": 1}', "lacks gpu_hour_price, gpus"),
    ],
)
def test_a_damaged_or_foreign_line_is_named(run: Path, line: str, reason: str) -> None:
    path = run / FILE_NAME
    lines = path.read_text().splitlines()
    for position in (3, len(lines)):
        changed = [*lines[:position], line, *lines[position:]]
        path.write_bytes(("\n".join(changed) + "\n").encode("latin-1"))
        with pytest.raises(ReportError, match=f"line {position + 1} of .*{re.escape(reason)}"):
            read(run)


def change_run(field: str, value: object) -> Callable[[str], str]:
    def change(text: str) -> str:
        first, _, rest = text.partition("\n")
        return json.dumps({**json.loads(first), field: value}) + "\n" + rest

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.partition("\n")[2], "no run line stands before it"),
        (lambda text: "", "holds no run"),
        (change_run("version", 2), "its version is 2"),
        (change_run("world", 0), "at least one rank"),
        (change_run("parameters", []), "parameters cannot be"),
    ],
)
def test_a_file_that_begins_otherwise_is_refused(run: Path, change: Callable[[str], str], reason: str) -> None:
    path = run / FILE_NAME
    path.write_text(change(path.read_text()))
    with pytest.raises(ReportError, match=reason):
        read(run)


def test_a_directory_without_lines_is_said(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="Give the directory that the monitor wrote to"):
        read(tmp_path)


def test_runs_below_a_directory_are_named(tmp_path: Path) -> None:
    for name in ("version_0", "more/version_1"):
        Monitor(tmp_path / name).event(Event(0, "note", "began"))
    with pytest.raises(ReportError, match="latest runs below that: ") as caught:
        read(tmp_path)
    assert all(str(tmp_path / name) in str(caught.value) for name in ("version_0", "more/version_1"))


def test_steps_that_were_done_again_are_told_apart(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, every=1)
    for step in [0, 1, 2, 3, 4, 2, 3, 4, 5, 3, 4, 5, 6]:
        monitor.add(replace(PLAIN, step=step))
    kept, superseded = _split(read(tmp_path).windows)
    assert [window.step for window in kept] == [0, 1, 2, 3, 4, 5, 6]
    assert [[window.step for window in stretch] for stretch in superseded] == [[2, 3, 4, 5], [1, 2, 3, 4]]
    assert _split([]) == ([], [])


@pytest.mark.parametrize("count", [MANY + 1, 10 * MANY + 3])
def test_means_of_neighbours_pass_over_what_is_not_a_number(count: int) -> None:
    values = [math.nan if index % 3 else 2.0 for index in range(count)]
    steps_, means = _thinned(range(count), values)
    assert len(steps_) == len(means) <= MANY
    assert steps_ == sorted(set(steps_))
    assert {mean for mean in means if math.isfinite(mean)} == {2.0}
    assert math.isnan(_thinned(range(count), [math.inf] * count)[1][0])


def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path: Path) -> None:
    eventful(tmp_path)
    write(read(tmp_path), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(page.tags)
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_the_same_run_gives_the_same_page(run: Path) -> None:
    pages = []
    for name in ("a.html", "b.html"):
        write(read(run), run / name)
        pages.append((run / name).read_text())
    assert pages[0] == pages[1]


def test_the_picture_is_the_figure(run: Path) -> None:
    write(read(run), run / "page.html", run / "picture.png")
    pixels = imread(run / "picture.png")
    assert pixels.shape == (1800, 1650, 4)
    assert (pixels[0, 0] == 1).all()
    assert pixels.std() > 0.05


@pytest.mark.parametrize("value", ["1e400", "1e308", "-1e308", "1e-320", "-1"])
def test_absurd_figures_are_drawn_without_a_crash(run: Path, value: str) -> None:
    path = run / FILE_NAME
    text = re.sub(
        r'("(?:loss|step_seconds|bytes_sent|ratio|exposed_share)"): [0-9.e-]+', rf"\1: {value}", path.read_text()
    )
    path.write_text(text.replace('"step": 19', f'"step": {2**53}').replace('"step": 24', f'"step": -{2**53}'))
    assert value in path.read_text()
    write(read(run), run / "page.html", run / "picture.png")


@pytest.mark.parametrize("content", ["nothing", "an event", "one window", "no number"])
def test_a_run_of_which_little_is_known_is_drawn(tmp_path: Path, content: str) -> None:
    monitor = Monitor(tmp_path, every=1)
    monitor.event(Event(0, "note", "began"))
    if content == "nothing":
        path = tmp_path / FILE_NAME
        path.write_text(path.read_text().splitlines()[0] + "\n")
    if content == "one window":
        monitor.add(COMPRESSED)
    if content == "no number":
        for record in steps(COMPRESSED, range(3)):
            monitor.add(replace(record, loss=math.nan, gradient_norm=math.nan))
    write(read(tmp_path), tmp_path / "page.html", tmp_path / "picture.png")
    text = (tmp_path / "page.html").read_text()
    assert text.count("not measured") >= {"nothing": 8, "an event": 8, "one window": 0, "no number": 2}[content]


def test_many_windows_and_events_make_a_page_of_sensible_size(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, every=1)
    history = steps(COMPRESSED, range(5000))
    for record in history:
        monitor.add(record)
    for step in range(0, 5000, 5):
        monitor.event(Event(step, "skip" if step % 2 else "fall_back", "again"))
    start = time.process_time()
    write(read(tmp_path), tmp_path / "page.html")
    assert time.process_time() - start < 30
    assert (tmp_path / "page.html").stat().st_size < 8e6
    figure = draw(read(tmp_path))
    assert len(history) > FEW
    assert len(figure.axes) == 8
