"""The predicted step of all graphs together: forwards in their order, backwards in the reverse one.

    forward A   forward B   backward B   backward A

While a graph runs, what those before it keep is in memory besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ssd_fx.report.model import WITHIN, GraphReport, GroupRow, Report, Span, Times

Points = tuple[tuple[float, int], ...]


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """A point for each of at most `most` parts: its begin, and its highest value."""
    size = max(1, -(-len(points) // most))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[0][0], max(nbytes for _, nbytes in part)) for part in parts]


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes above the level before the step, from each time on. turn_s: the backward begins. end_s: the step ends."""

    points: Points
    turn_s: float
    end_s: float

    @property
    def peak(self) -> int:
        return max((nbytes for _, nbytes in self.points), default=0)


@dataclass(frozen=True, slots=True)
class Bar:
    """The life of a group in one run of its graph, in seconds of the step. `run`: counted over all runs, from 0."""

    row: GroupRow
    run: int
    times: Times


@dataclass(frozen=True, slots=True)
class Course:
    """stock: without ssd_fx. own: as planned. floor_bytes, limit_bytes: as in `Figures`."""

    stock: Curve
    own: Curve
    floor_bytes: int
    limit_bytes: int
    bars: tuple[Bar, ...]


def course(report: Report) -> Course:
    """The predicted step of a report."""
    parts = [part.described for part in report.parts]
    stays = [part["saved_bytes"] - part["offloaded_bytes"] for part in parts]
    offsets, own = _joined(parts, stays)
    stocks = [part["stock"] for part in parts]
    _, stock = _joined(stocks, [part["saved_bytes"] for part in stocks])
    bars = [
        Bar(row, run, row.times.moved(*shift))
        for run, (part, shift) in enumerate(zip(report.parts, offsets, strict=True))
        for row in part.rows
        if row.times is not None
    ]
    floor = _highest(report.parts, "floor_bytes", map(_must_stay, report.parts))
    return Course(stock, own, floor, _highest(report.parts, "limit_bytes", stays), tuple(bars))


def _highest(parts: Sequence[GraphReport], name: str, stays: Iterable[int]) -> int:
    """The highest of a predicted figure, above what the forwards before leave in memory: `stays` of each."""
    levels = accumulate(stays, initial=0)
    return max((level + int(part.predicted[name]) for level, part in zip(levels, parts, strict=False)), default=0)


def _must_stay(part: GraphReport) -> int:
    """Bytes that a forward leaves in memory under any budget, until its backward begins."""
    kept = [row for row in part.rows if row.decision == "keep" and row.slot >= 0]
    return sum(row.nbytes for row in kept if row.reason != WITHIN)


def _joined(parts: Sequence[Any], stays: Sequence[int]) -> tuple[list[Span], Curve]:
    """What to add to times of each part's forward, and of its backward; and the memory of the step.

    stays: bytes that each forward leaves, until its backward begins.
    """
    levels = list(accumulate(stays, initial=0))[:-1]  # what the parts before each one have left
    points: list[tuple[float, int]] = []
    forwards: list[float] = []
    backwards: list[float] = []
    at = 0.0
    for part, level in zip(parts, levels, strict=True):
        forwards.append(at)
        points += _moved(part["forward"], at, level)
        at += part["turn_us"] / 1e6
    turn = at
    for part, level in zip(reversed(parts), reversed(levels), strict=True):
        shift = at - part["turn_us"] / 1e6  # a part's times of its backward are from the start of its forward
        backwards.append(shift)
        points += _moved(part["backward"], shift, level)
        at = shift + part["step_us"] / 1e6
    return list(zip(forwards, reversed(backwards), strict=True)), Curve(tuple(points), turn, at)


def _moved(points: Sequence[Sequence[int]], at: float, level: int) -> list[tuple[float, int]]:
    return [(at + us / 1e6, level + nbytes) for us, nbytes in points]
