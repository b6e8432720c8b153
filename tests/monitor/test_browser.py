"""The page of a run in a real browser."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.image import imread

from commopt.monitor.report import read, write
from tests.monitor.pages import Page
from tests.monitor.runs import ATTACK, eventful

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TITLES = (
    "Loss",
    "Gradient norm",
    "Time of a step",
    "Bytes of a step",
    "Communication to computation",
    "Exposed share",
    "Delivered against true gradient",
    "Residual over gradient norm",
)


@dataclass(frozen=True)
class Shown:
    """What a browser made of a page: the DOM, if it was asked for, what the console said, and what the page fetched."""

    dom: str
    console: list[str]
    fetched: set[str]


Browser = Callable[..., Shown]


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    """Opens a page in a headless browser that reaches no network."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(BROWSERS)}")

    def show(page: Path, *options: str) -> Shown:
        log = tmp_path / "net.json"
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-proxy-server",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--log-net-log={log}",
            *options,
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        # What the browser fetches for itself is initiated by no origin.
        requests = re.findall(r'"initiator":"([^"]*)".*?"url":"(\w+:[^"]*)"', log.read_text())
        fetched = {url for initiator, url in requests if initiator != "not an origin"}
        return Shown(done.stdout, re.findall(r"CONSOLE.*", done.stderr), fetched)

    return show


def test_a_page_that_does_more_is_found_out(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text('<img src="http://outside.invalid/x.png"><script>console.log("here")</script>')
    shown = browser(page, "--dump-dom")
    assert shown.fetched == {"http://outside.invalid/x.png"}
    assert len(shown.console) == 1


def test_it_shows_the_run_and_fetches_nothing(tmp_path: Path, browser: Browser) -> None:
    run = tmp_path / "my run & <i>more"
    eventful(run)
    write(read(run), run / "page.html")
    shown = browser(run / "page.html", "--dump-dom")
    assert not shown.fetched
    assert not shown.console
    dom = shown.dom
    page = Page(dom)
    assert page.tags.count("svg") == 1
    assert page.tags.count("script") == page.tags.count("img") == page.tags.count("i") == 0
    for title in TITLES:
        assert f">{title}</text>" in dom
    assert "<title>my run &amp; &lt;i&gt;more - communication report</title>" in dom
    (events,) = re.findall(r'<table id="events">.*?</table>', dom, re.DOTALL)
    rows = re.findall(r"<tr>.*?</tr>", events, re.DOTALL)[1:]
    assert len(rows) == 5
    assert "roll-back to step 180" in rows[1]
    escaped = ATTACK.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert escaped in rows[1]
    assert "Uncompressed steps waited" in dom
    assert "a &lt;b&gt;bold&lt;/b&gt; one" in dom
    assert "is unfinished: the run was ended while it wrote it" in dom


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_painted_light_and_dark(tmp_path: Path, browser: Browser, scheme: str) -> None:
    eventful(tmp_path)
    write(read(tmp_path), tmp_path / "page.html")
    shot = tmp_path / f"{scheme}.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    browser(tmp_path / "page.html", "--window-size=1200,1800", "--hide-scrollbars", f"--screenshot={shot}", *dark)
    pixels = imread(shot)[..., :3]
    paper, plot = pixels[4, 4], pixels[700:1600, 100:1100].reshape(-1, 3)
    assert (paper.mean() > 0.9) == (scheme == "light")
    ink = abs(plot - paper).mean(axis=1)
    assert (ink > 0.7).sum() > 500  # axis labels stand out from the paper
    coloured = plot.max(axis=1) - plot.min(axis=1)
    assert (coloured > 0.4).sum() > 2000  # so do the lines
