"""A line plot as SVG text: points with bars of spread, one line for each series. No dependencies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#0072b2")  # Okabe and Ito's
WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 60  # margins; the legend is in the right one


@dataclass(frozen=True)
class Point:
    """`low` and `high` are the ends of the bar through the point, and may both be `y`."""

    x: float
    y: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True)
class Axis:
    """Values from `first` to `last` on pixels from `start` to `end`, with a tick at every multiple of `step`."""

    first: float
    last: float
    step: float
    start: float
    end: float

    @staticmethod
    def around(values: Sequence[float], start: float, end: float) -> Axis:
        """The least range of whole steps that holds all `values`, in four to nine steps of 1, 2 or 5 times 10^n."""
        low, high = min(values), max(values)
        span = high - low or abs(high) or 1.0
        power = 10.0 ** math.floor(math.log10(span / 4))
        step = max(factor * power for factor in (1, 2, 5) if factor * power <= span / 4)
        first, last = math.floor(low / step), math.ceil(high / step)
        return Axis(first * step, (last if last > first else first + 1) * step, step, start, end)

    def pixel(self, value: float) -> float:
        return round(self.start + (value - self.first) / (self.last - self.first) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        return [self.first + i * self.step for i in range(round((self.last - self.first) / self.step) + 1)]


def plot(series: Mapping[str, Sequence[Point]], *, title: str, x: str, y: str) -> str:
    """The document. Lines join the points of a series in their order; `x` and `y` name the axes."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("a plot needs at least one point")
    across = Axis.around([0.0, *(p.x for p in points)], LEFT, WIDTH - RIGHT)
    up = Axis.around([v for p in points for v in (p.low, p.y, p.high)], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, anchor="middle", size=14),
        *_axes(across, up, x, y),
    ]
    for number, (name, line) in enumerate(series.items()):
        parts += _line(line, COLORS[number % len(COLORS)], across, up)
        parts += _legend(number, name, COLORS[number % len(COLORS)])
    return "\n".join([*parts, "</svg>"]) + "\n"


def panels(plots: Sequence[str], columns: int) -> str:
    """One document of several plots, row by row."""
    rows = math.ceil(len(plots) / columns)
    wide, high = columns * WIDTH, rows * HEIGHT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}">']
    for number, each in enumerate(plots):
        row, column = divmod(number, columns)
        place = f'x="{column * WIDTH}" y="{row * HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(each.rstrip().replace("<svg ", f"<svg {place} ", 1))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(across: Axis, up: Axis, x: str, y: str) -> list[str]:
    parts = []
    for tick in across.ticks():
        at = across.pixel(tick)
        parts.append(f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{up.start}" stroke="#e0e0e0"/>')
        parts.append(_text(at, up.start + 18, f"{tick:.10g}", anchor="middle"))
    for tick in up.ticks():
        at = up.pixel(tick)
        parts.append(f'<line x1="{LEFT}" y1="{at}" x2="{across.end}" y2="{at}" stroke="#e0e0e0"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{tick:.10g}", anchor="end"))
    parts.append(_text((across.start + across.end) / 2, HEIGHT - 18, x, anchor="middle"))
    middle = (up.start + up.end) / 2
    turned = f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y)}</text>'
    return [*parts, turned]


def _line(line: Sequence[Point], color: str, across: Axis, up: Axis) -> list[str]:
    at = [(across.pixel(p.x), up.pixel(p.y)) for p in line]
    corners = " ".join(f"{a},{b}" for a, b in at)
    parts = [f'<polyline points="{corners}" fill="none" stroke="{color}" stroke-width="1.5"/>']
    for point, (a, b) in zip(line, at, strict=True):
        low, high = up.pixel(point.low), up.pixel(point.high)
        parts.append(f'<line x1="{a}" y1="{low}" x2="{a}" y2="{high}" stroke="{color}" stroke-opacity="0.6"/>')
        parts.append(f'<circle cx="{a}" cy="{b}" r="3.5" fill="{color}"><title>{escape(point.label)}</title></circle>')
    return parts


def _legend(number: int, name: str, color: str) -> list[str]:
    x, y = WIDTH - RIGHT + 16, TOP + 10 + 20 * number
    return [f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>', _text(x + 10, y + 4, name)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
