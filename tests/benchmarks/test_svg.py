"""The plot: where points land, what stands in the document."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Point, plot

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0, 100), [0, 20, 40, 60, 80, 100]),
        ((0.93, 1.07), [0.92, 0.94, 0.96, 0.98, 1.0, 1.02, 1.04, 1.06, 1.08]),
        ((0, 1219.4), [0, 200, 400, 600, 800, 1000, 1200, 1400]),
        ((-3, 4), [-3, -2, -1, 0, 1, 2, 3, 4]),
        ((5, 5), [5, 6]),
        ((0, 0), [0.0, 0.2]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values: tuple[float, float], ticks: list[float]) -> None:
    assert Axis.around(values, 0, 1).ticks() == pytest.approx(ticks)


def test_points_land_where_the_axes_say() -> None:
    """x from 0 to 100 and y from 1 to 2: corners and the middle of the area."""
    series = {"a": [Point(0, 1, 1, 1), Point(100, 2, 2, 2)], "b": [Point(50, 1.5, 1.0, 2.0, "fifty")]}
    root = ElementTree.fromstring(plot(series, title="t", x="x", y="y"))
    middle = ((LEFT + WIDTH - RIGHT) / 2, (HEIGHT - BOTTOM + TOP) / 2)
    corners = [(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, TOP)]
    dots = [dot for dot in root.iter(f"{SVG}circle") if dot.get("r") == "3.5"]
    assert [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in dots] == [*corners, middle]
    assert [d.findtext(f"{SVG}title") for d in dots] == ["", "", "fifty"]
    bars = [line for line in root.iter(f"{SVG}line") if line.get("stroke-opacity")]
    assert [(float(b.attrib["y1"]), float(b.attrib["y2"])) for b in bars][2] == (HEIGHT - BOTTOM, TOP)
    lines = [line.get("points") for line in root.iter(f"{SVG}polyline")]
    assert lines == [" ".join(f"{float(x)},{float(y)}" for x, y in corners), f"{middle[0]},{middle[1]}"]


def test_every_series_has_its_colour_and_its_legend() -> None:
    series = {name: [Point(1, 1, 1, 1)] for name in ("keep", "recompute", "joint")}
    root = ElementTree.fromstring(plot(series, title="t", x="x", y="y"))
    colors = [line.get("stroke") for line in root.iter(f"{SVG}polyline")]
    assert len(set(colors)) == 3
    assert [dot.get("fill") for dot in root.iter(f"{SVG}circle") if dot.get("r") == "4"] == colors
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[-3:] == ["keep", "recompute", "joint"]


def test_text_is_escaped() -> None:
    series = {"a < b": [Point(1, 1, 1, 1, 'x & "y"')]}
    root = ElementTree.fromstring(plot(series, title="<t>", x="&", y="<"))
    assert {"a < b", "<t>", "&", "<"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_nothing_to_plot() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        plot({"a": []}, title="", x="", y="")
