"""Tables and sentences of the page, out of what measure.py noted down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from svg import Point  # neighbours of this package
from system import MIB

from paper.measure import CLAIM, Result

NOT_MEASURED = "not measured"
CERTAINTY = 0.95


@dataclass(frozen=True)
class Ratio:
    """The times of one way to those of another in the same rounds: median, and the interval that holds it with 95%."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(mode: Result, reference: Result, name: str = "time_s") -> Ratio:
        ratios = [a / b for a, b in zip(mode[name], reference[name], strict=True)]
        return Ratio(median(ratios), *median_interval(ratios), len(ratios))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with at least `CERTAINTY`.

    It is the sign test's, so it holds for any distribution. Fewer than six values cannot be that certain. The extremes
    are then the answer.
    """
    ordered, n = sorted(values), len(values)
    tail, cut = 0.0, 0
    for below in range((n + 1) // 2):
        tail += math.comb(n, below) / 2**n  # that no more than `below` of n values lie on one side of the median
        if 2 * tail <= 1 - CERTAINTY:
            cut = below
    return ordered[cut], ordered[n - 1 - cut]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.0f}" if nbytes >= 10 * MIB else f"{nbytes / MIB:.1f}"


def change(nbytes: float, reference: float) -> str:
    """`-45%`."""
    return f"{100 * (nbytes / reference - 1):+.0f}%"


HEAD = ("mode", "step, s", "time to the first", "live peak, MiB", "to the first", "resident peak, MiB", "written, MiB")


def modes(case: Result) -> str:
    """One row for every way to train; ratios and peaks to the first."""
    rows, found = [], case["modes"]
    for name, mode in found.items():
        first = next(iter(found.values()))
        row = [name, f"{median(mode['time_s']):.3f}", str(Ratio.of(mode, first)), mib(mode["peak_bytes"])]
        row += [change(mode["peak_bytes"], first["peak_bytes"]), mib(mode["resident_peak_bytes"])]
        rows.append([*row, mib(mode["written_bytes"]) if mode["written_bytes"] else ""])
    rows += [[name, f"failed: {why}", "", "", "", "", ""] for name, why in case["failed"].items()]
    return table(HEAD, rows)


def rounds(case: Result) -> str:
    count = case["rounds"]
    few = f", too few for a claim (at least {CLAIM})" if count < CLAIM else ""
    return f"{count} rounds{few}"


def cases(result: Result) -> str:
    """Every case with its table; those that were planned and not measured by name."""
    parts = [f"**{label}**; {rounds(case)}.\n\n{modes(case)}" for label, case in result["cases"].items()]
    return "\n\n".join([*parts, *missing(result)])


def missing(result: Result) -> list[str]:
    names = [name for name in result["planned"] if name not in result["cases"]]
    return [f"Of this part {NOT_MEASURED}: {'; '.join(names)}."] if names else []


def points(mode: Result, reference: Result, x: float) -> Point:
    """The time of a step to `reference`, at `x`."""
    ratio = Ratio.of(mode, reference)
    return Point(x, ratio.median, ratio.low, ratio.high)
