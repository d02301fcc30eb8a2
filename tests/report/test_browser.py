"""The page in a real Chromium without a window: it draws, answers the mouse, has no complaint.

Needs Debian's `chromium` (or one that CHROMIUM names) and the Python package `playwright`, which
drives it; nothing is downloaded, and the network is not used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patrickstar.report import page, read_run

BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()
MISSING = [
    name
    for name, there in (
        ("Chromium (apt-get install chromium)", BROWSER),
        ("the Python package playwright", importlib.util.find_spec("playwright")),
        ("the Python package plotly", importlib.util.find_spec("plotly")),
    )
    if not there
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def opened(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page of a recorded run, drawn; `complaints` collects what the browser says."""
    from playwright.sync_api import sync_playwright

    folder = tmp_path_factory.mktemp("browser")
    file = folder / "report.html"
    file.write_text(page(read_run(recorded)), encoding="utf-8")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            folder / "profile",
            executable_path=BROWSER,
            args=FLAGS,
            viewport={"width": 1200, "height": 900},
        )
        opened = context.pages[0]
        opened.complaints = []
        opened.on("console", lambda message: opened.complaints.append(message.text))
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.on(
            "request",
            lambda request: (
                request.url.startswith(("file:", "data:", "blob:"))
                or opened.complaints.append(f"asked for {request.url}")
            ),
        )
        opened.goto(file.as_uri())
        opened.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
        yield opened
        context.close()


def test_every_figure_is_drawn_without_a_complaint(opened: Any) -> None:
    assert opened.locator(".plot").count() == 8
    assert opened.locator(".plot .main-svg").count() >= 7
    assert opened.locator(".plot .trace").count() > 20
    assert opened.complaints == []


def test_pointing_at_a_figure_shows_its_values(opened: Any) -> None:
    plot = opened.locator("#memory .plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    label = plot.locator(".hoverlayer .legend, .hoverlayer .hovertext").first
    label.wait_for(timeout=10_000)
    assert "MiB" in plot.locator(".hoverlayer").text_content()
    assert opened.complaints == []


def test_pointing_at_the_end_of_a_stay_tells_why_a_chunk_left(opened: Any) -> None:
    shown = opened.evaluate(
        """() => {
            const plot = document.querySelector("#chunks .plot");
            const curve = plot.data.findIndex(trace => trace.name === "host");
            const point = plot.data[curve].customdata.findIndex(row => row[1].startsWith("left"));
            Plotly.Fx.hover(plot, [{curveNumber: curve, pointNumber: point}]);
            return plot.querySelector(".hoverlayer").textContent;
        }"""
    )
    assert "left: " in shown and "chunk" in shown


@pytest.mark.parametrize("section", ["timeline", "curves"])
def test_dragging_zooms_and_a_double_click_shows_everything_again(
    opened: Any, section: str
) -> None:
    plot = opened.locator(f"#{section} .plot").first
    plot.scroll_into_view_if_needed()
    axis = f"document.querySelector('#{section} .plot').layout.xaxis"
    limits = f"() => {axis}.range.slice()"
    whole = opened.evaluate(limits)
    box = plot.locator(".nsewdrag").first.bounding_box()
    y = box["y"] + box["height"] / 2
    opened.mouse.move(box["x"] + box["width"] * 0.4, y)
    opened.mouse.down()
    opened.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
    opened.mouse.up()
    opened.wait_for_function(
        f"whole => {{ const r = {axis}.range; return r[1] - r[0] < (whole[1] - whole[0]) / 3; }}",
        arg=whole,
        timeout=10_000,
    )
    plot.locator(".nsewdrag").first.dblclick()
    opened.wait_for_function(
        f"whole => {{ const r = {axis}.range;"
        " return Math.abs((r[1] - r[0]) / (whole[1] - whole[0]) - 1) < 0.01; }",
        arg=whole,
        timeout=10_000,
    )
    assert opened.complaints == []


def test_colours_follow_the_system(opened: Any) -> None:
    colour = "() => getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    seen = {}
    for scheme in ("dark", "light"):
        opened.emulate_media(color_scheme=scheme)
        expected = opened.evaluate(
            "() => getComputedStyle(document.body).color.match(/\\d+/g).join()"
        )
        opened.wait_for_function(
            f"expected => ({colour})().match(/\\d+/g).slice(0, 3).join() === expected",
            arg=expected,
            timeout=10_000,
        )
        seen[scheme] = expected
    assert seen["dark"] != seen["light"]
    assert opened.complaints == []


def test_a_narrow_screen_needs_no_scrolling_sideways(opened: Any) -> None:
    opened.set_viewport_size({"width": 360, "height": 800})
    opened.wait_for_function(
        "() => document.documentElement.scrollWidth <= innerWidth && "
        "[...document.querySelectorAll('.plot .main-svg')].every(s => s.clientWidth <= innerWidth)",
        timeout=10_000,
    )
    opened.set_viewport_size({"width": 1200, "height": 900})
    assert opened.complaints == []
