"""The page in headless Chromium: it draws, zooms, hovers, searches and folds, by mouse and by keyboard.

No script may fail, and nothing may be asked of the network.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd_fx.report.report import Report
from tests.report.trained import report

sync_api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra browser)")
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium on the path: none of {', '.join(NAMES)}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    found, path = report(layers=8), tmp_path_factory.mktemp("page") / "report.html"
    found.save(path)
    return found, path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, saved: tuple[Report, Path]) -> Iterator[Any]:
    """The page, offline. What goes wrong in its scripts, and what it asks the network for, fails the test."""
    context = browser.new_context(color_scheme=request.param, offline=True, viewport={"width": 1280, "height": 1600})
    opened, wrong = context.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    opened.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
    opened.goto(saved[1].as_uri())
    opened.wait_for_function("window.report")
    yield opened
    context.close()
    assert wrong == []


def zoomed(page: Any) -> float:
    begin, end = page.evaluate("report.zoomed()")
    return float(end - begin)


def at_bar(page: Any, part: int) -> tuple[float, float]:
    """The place on the screen of the middle of the first bar of a kind."""
    box = page.locator("#chart").bounding_box()
    x, y = page.evaluate(
        """(part) => {
            const bars = report.chart.getOption().series.find((each) => each.id === "bars").data;
            const bar = bars.filter((each) => each[3] === part).sort((a, b) => (b[1] - b[0]) - (a[1] - a[0]))[0];
            return report.chart.convertToPixel({ seriesId: "bars" }, [(bar[0] + bar[1]) / 2, bar[2]]);
        }""",
        part,
    )
    return box["x"] + x, box["y"] + y - 3


def test_the_five_lines_and_the_groups(page: Any, saved: tuple[Report, Path]) -> None:
    assert page.locator("#lines dt").all_text_contents() == ["memory", "cost", "drive", "plan", "next"]
    assert page.locator("#table tbody tr").count() == len(saved[0].rows())
    assert page.locator("#unfreed").is_visible()
    assert "as an output of the graph" in page.locator("#unfreed").inner_text()


@pytest.mark.parametrize("width", [1280, 700])
def test_nothing_is_cut_off(page: Any, width: int) -> None:
    """The reason why a tensor stays is a sentence."""
    page.set_viewport_size({"width": width, "height": 1000})
    cut = """[...document.querySelectorAll("main *")].filter((each) => each.scrollWidth > each.clientWidth + 1
        && each.clientWidth && getComputedStyle(each).overflow !== "visible").map((each) => each.textContent)"""
    assert page.evaluate(cut) == []
    left = page.evaluate("report.chart.getOption().grid[0].left")
    assert left <= 0.4 * page.evaluate("report.chart.getWidth()") + 20, "names have room that bars need"


def test_zoom_by_wheel_buttons_and_keys(page: Any) -> None:
    whole = zoomed(page)
    page.mouse.move(700, page.locator("#chart").bounding_box()["y"] + 100)
    page.mouse.wheel(0, -400)
    page.wait_for_function("(whole) => report.zoomed()[1] - report.zoomed()[0] < 0.95 * whole", arg=whole)
    page.locator("#reset").click()
    assert zoomed(page) == pytest.approx(whole)
    page.locator("#in").click()
    assert zoomed(page) == pytest.approx(whole / 2)
    page.locator("#chart").focus()
    page.keyboard.press("+")
    assert zoomed(page) == pytest.approx(whole / 4)
    before = page.evaluate("report.zoomed()[0]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("report.zoomed()[0]") == pytest.approx(before + whole / 16)
    page.keyboard.press("0")
    assert zoomed(page) == pytest.approx(whole)


def test_hover_and_click_tell_of_a_group(page: Any) -> None:
    x, y = at_bar(page, 0)
    page.mouse.move(x - 2, y)
    page.mouse.move(x, y)
    tip = page.locator("#chart > div").last
    page.wait_for_function("document.querySelector('#chart').innerText.includes('in memory')")
    assert "trained.py:" in tip.inner_text()
    page.mouse.click(x, y)
    details = page.locator("#details").inner_text()
    assert all(word in details for word in ("module", "source", "trained.py:", "bytes", "decision", "produced", "used"))


def test_hover_over_memory_tells_all_curves(page: Any) -> None:
    box = page.locator("#chart").bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 120)
    page.mouse.move(box["x"] + 502, box["y"] + 121)
    page.wait_for_function("document.querySelector('#chart').innerText.includes('without ssd_fx')")
    told = page.locator("#chart").inner_text()
    assert re.search(r"without ssd_fx [\d.]+\s(KiB|MiB)", told), told
    assert re.search(r"with, predicted [\d.]+\s(KiB|MiB)", told), told


def test_search_by_module_and_by_decision(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("blocks.3")
    assert page.locator("#table tbody tr").count() == 1
    assert page.evaluate("report.lines()") == 1
    assert page.locator("#count").inner_text().startswith("1 of ")
    page.locator("#search").fill("output")
    assert page.locator("#table tbody tr").count() == 8
    page.locator("#search").fill("nothing is called so")
    assert page.locator("#table tbody tr").count() == 0


def test_fold_by_layer_and_unfold_by_a_click(page: Any) -> None:
    assert page.evaluate("report.lines()") == 9
    page.locator("#fold").check()
    assert page.evaluate("report.lines()") == 9  # eight blocks, and the input
    x, y = at_bar(page, 6)
    page.mouse.click(x, y)
    assert not page.locator("#fold").is_checked()
    assert page.locator("#search").input_value() != ""


def test_rows_by_keyboard(page: Any) -> None:
    page.locator("#table tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    second = page.locator("#table tbody tr").nth(1)
    assert second.get_attribute("aria-selected") == "true"
    assert page.locator("#details dd").first.inner_text() == second.locator("td").first.inner_text()
