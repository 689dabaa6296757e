"""Rounds of steps as points of memory and time, and what says that one of them is better than another.

Times of one round are compared with each other only. What a run would give if it were repeated is told by the interval
that holds the median of such ratios with 95% certainty, whatever their distribution (the sign test's).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from svg import Point as Mark
from system import MIB

CERTAINTY = 0.95
SAME_MEMORY = 0.02  # peaks that differ by a smaller share are the same memory


@dataclass(frozen=True)
class Point:
    """One way to train at one budget (None: it has none), over all rounds.

    `peak_bytes` is the highest of all steps. `times_s` and `ratios` (to `keep` in the same round) have one entry for
    every round.
    """

    mode: str
    budget: float | None
    peak_bytes: int
    times_s: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.mode if self.budget is None else f"{self.mode} {self.budget:g}"


@dataclass(frozen=True)
class Spread:
    least: float
    lower: float
    median: float
    upper: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Quartiles and extremes."""
        if len(values) == 1:
            return Spread(*[values[0]] * 5)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(min(values), lower, median, upper, max(values))


@dataclass(frozen=True)
class Comparison:
    """`other` needs no more memory than `ours`. `slowdown`: the median of time of `ours` / time of `other` in the same
    round; `low` and `high`: the interval of that median."""

    ours: str
    other: str
    ours_bytes: int
    other_bytes: int
    slowdown: float
    low: float
    high: float

    @property
    def is_beyond_spread(self) -> bool:
        """Whether `ours` is slower for certain."""
        return self.low > 1.0


def median_interval(values: Sequence[float], certainty: float = CERTAINTY) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least `certainty`.

    Fewer than six values cannot be that certain for 0.95; the extremes are then the answer.
    """
    ordered, n = sorted(values), len(values)
    tail, cut = 0.0, 0
    for below in range((n + 1) // 2):
        tail += math.comb(n, below) / 2**n  # that no more than `below` of n values lie on one side of the median
        if 2 * tail <= 1 - certainty:
            cut = below
    return ordered[cut], ordered[n - 1 - cut]


def dominance(ours: Iterable[Point], others: Iterable[Point]) -> list[Comparison]:
    """All pairs where another point has at most our memory (give or take `SAME_MEMORY`) and was faster in the median.

    What is beyond the spread comes first, then the slowest.
    """
    rivals = list(others)
    found = []
    for mine in ours:
        for other in rivals:
            ratios = [a / b for a, b in zip(mine.times_s, other.times_s, strict=True)]
            slowdown = statistics.median(ratios)
            if other.peak_bytes <= mine.peak_bytes * (1 + SAME_MEMORY) and slowdown > 1.0:
                peaks = (mine.peak_bytes, other.peak_bytes)
                found.append(Comparison(mine.name, other.name, *peaks, slowdown, *median_interval(ratios)))
    return sorted(found, key=lambda c: (not c.is_beyond_spread, -c.slowdown))


def verdict(comparisons: Sequence[Comparison], points: int, rounds: int) -> str:
    """What `dominance` found, in words."""
    beaten = {c.ours for c in comparisons if c.is_beyond_spread}
    lines = [
        f"{c.ours}, {c.ours_bytes / MIB:.1f} MiB: {c.other} needs {c.other_bytes / MIB:.1f} MiB "
        f"and is {c.slowdown:.3f} times as fast ({c.low:.3f} to {c.high:.3f}): "
        f"{'BEYOND' if c.is_beyond_spread else 'within'} the spread"
        for c in comparisons
    ]
    result = f"{len(beaten)} of {points} joint points lie above another mode at the same memory, beyond the spread"
    return "\n".join([*lines, f"{result} of {rounds} rounds"])


def table(points: Sequence[Point]) -> str:
    """One line for every point."""
    spread = "(quartiles; extremes)"
    rows = [("mode", "budget", "peak MiB", "step ms", spread, "to keep", spread)]
    for point in points:
        budget = "-" if point.budget is None else f"{point.budget:g}"
        times, ratios = Spread.of([1e3 * s for s in point.times_s]), Spread.of(point.ratios)
        peak = f"{point.peak_bytes / MIB:.1f}"
        rows.append((point.mode, budget, peak, *_cells(times, ".0f"), *_cells(ratios, ".3f")))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = {0, 4, 6}
    lines = (
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _cells(spread: Spread, form: str) -> tuple[str, str]:
    quartiles = f"{spread.lower:{form}}-{spread.upper:{form}}"
    return f"{spread.median:{form}}", f"({quartiles}; {spread.least:{form}}-{spread.most:{form}})"


def marks(points: Sequence[Point]) -> dict[str, list[Mark]]:
    """The plot's series: memory in MiB, time to `keep` with its quartiles, by memory within each mode."""
    series: dict[str, list[Mark]] = {}
    for point in sorted(points, key=lambda p: p.peak_bytes):
        spread = Spread.of(point.ratios)
        label = f"{point.name}: {point.peak_bytes / MIB:.1f} MiB, {spread.median:.3f}"
        mark = Mark(point.peak_bytes / MIB, spread.median, spread.lower, spread.upper, label)
        series.setdefault(point.mode, []).append(mark)
    return {mode: series[mode] for mode in dict.fromkeys(p.mode for p in points)}
