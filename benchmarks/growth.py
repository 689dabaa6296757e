"""Compile times as tables: seconds per pass, shares of the whole, and how they grow with the graph."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ssd_fx.report.rows import aligned

FIRST_CUT, FURTHER_CUTS = "first cut (torch)", "further cuts (torch)"
PLANNING, ORDER = "planning", "order"
LIMIT = 0.10  # what is added to partition and planning may take this share of the compile time


@dataclass(frozen=True)
class Compiled:
    """One compilation of `compile_s` seconds, in which the parts took `seconds` and `cpu` (CPU seconds).

    `PLANNING` is the partitioner as a whole, torch's cuts and all passes included; `ORDER` is not in it.
    """

    layers: int
    nodes: int
    groups: int
    compile_s: float
    seconds: Mapping[str, float]
    cpu: Mapping[str, float]

    @property
    def share(self) -> float:
        """Of partition, planning and order in the compile time."""
        return total(self.seconds) / self.compile_s

    @property
    def added_share(self) -> float:
        """The same without torch's first cut, which plain Inductor makes too."""
        return (total(self.seconds) - self.seconds[FIRST_CUT]) / self.compile_s

    @property
    def uncut_share(self) -> float:
        """The same without any of torch's cuts."""
        return self.added_share - self.seconds.get(FURTHER_CUTS, 0.0) / self.compile_s


def total(parts: Mapping[str, float]) -> float:
    """Partition, planning and order."""
    return parts[PLANNING] + parts.get(ORDER, 0.0)


def rows(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts by the names of their rows: what is timed, then what is left of the partitioner, then the sum."""
    passes = {name: value for name, value in parts.items() if name not in (PLANNING, ORDER)}
    rest = parts[PLANNING] - sum(passes.values())
    return {**passes, "rest": rest, ORDER: parts.get(ORDER, 0.0), "partition and planning": total(parts)}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The least-squares slope of log seconds over log size: 1 is linear, 2 quadratic.

    Raises:
        ValueError: fewer than two different sizes, or a figure that is not above 0.
    """
    if len(set(sizes)) < 2 or min(*sizes, *seconds) <= 0:
        raise ValueError(f"no growth can be fitted to {list(seconds)} over {list(sizes)}")
    x, y = ([math.log(value) for value in values] for values in (sizes, seconds))
    return statistics.linear_regression(x, y).slope


def table(runs: Sequence[Compiled]) -> str:
    """Milliseconds of every part for every size, and the exponents of its CPU time from each size to the next."""
    lines = [
        ["ms", *(f"{run.layers} layers" for run in runs)],
        ["nodes of the joint graph", *(str(run.nodes) for run in runs)],
        ["alias groups", *(str(run.groups) for run in runs)],
    ]
    lines[0] += [f"{a.layers}>{b.layers}" for a, b in itertools.pairwise(runs)]
    seconds, cpu = [rows(run.seconds) for run in runs], [rows(run.cpu) for run in runs]
    sizes = list(itertools.pairwise(run.nodes for run in runs))
    for name in dict.fromkeys(name for each in seconds for name in each):
        pairs = itertools.pairwise(each.get(name, 0.0) for each in cpu)
        grown = [_grown(size, pair) for size, pair in zip(sizes, pairs, strict=True)]
        lines.append([name, *(f"{1e3 * each.get(name, 0.0):.1f}" for each in seconds), *grown])
    lines.append(["whole compilation", *(f"{1e3 * run.compile_s:.1f}" for run in runs)])
    lines.append(["share of the compilation", *(f"{run.share:.1%}" for run in runs)])
    lines.append(["  without the first cut", *(f"{run.added_share:.1%}" for run in runs)])
    lines.append(["  without any cut", *(f"{run.uncut_share:.1%}" for run in runs)])
    columns = range(len(lines[0]))
    full = [tuple(line + [""] * (len(columns) - len(line))) for line in lines]
    return "\n".join(aligned(full, right=columns[1:]))


def _grown(nodes: Sequence[float], seconds: Sequence[float]) -> str:
    """The exponent between two sizes; `-` for what is too short to tell (under a millisecond)."""
    return f"{exponent(nodes, seconds):.2f}" if min(seconds) >= 1e-3 and len(set(nodes)) == 2 else "-"


def verdict(runs: Sequence[Compiled]) -> str:
    """Share at the largest size and growth over all sizes, in words."""
    last = max(runs, key=lambda run: run.nodes)
    held = "under" if last.added_share < LIMIT else "NOT UNDER"
    text = f"{last.layers} layers: ssd_fx adds {last.added_share:.1%} of the compile time, {held} {LIMIT:.0%}"
    text += f"\nwith the cut that plain Inductor makes too, it is {last.share:.1%}"
    if len(runs) > 1:
        slope = exponent([run.nodes for run in runs], [total(run.cpu) for run in runs])
        text += f"\nthey grow with the nodes to the power of {slope:.2f}"
    return text
