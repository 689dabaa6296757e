"""The report of a training step, which shows itself as text, page, picture and plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ssd_fx.report import page, picture
from ssd_fx.report.dump import Explanation
from ssd_fx.report.figures import figures, stalls
from ssd_fx.report.model import Facts, GraphReport
from ssd_fx.report.text import lines, text
from ssd_fx.report.timeline import Timeline
from ssd_fx.runtime.stats import SlotStats, Stats


@dataclass(frozen=True)
class Report(Facts):
    """What ssd_fx does to a training step: predicted, and after steps measured as well.

    Attributes:
        graphs: the compiled graphs, in the order in which they first run.
        order: the names of the graphs as the forward of one step runs them.
        stats: the counts since the last reset; None before any step.
        step: the last whole step that was traced, if there is one.
        missing: why no graph is among them, and what to do; empty if one is.
        dumps: of `ssd_fx.explain` alone: the plans and the rewritten graphs, as the option `dump` writes them.
    """

    dumps: tuple[Explanation, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return {
            "summary": asdict(figures(self)),
            "lines": dict(lines(self)),
            "graphs": [
                {"graph": g.graph, "runs": g.runs, "predicted": dict(g.predicted), "recomputed": g.recomputed}
                for g in self.graphs
            ],
            "groups": self.rows(),
            "stalls": [
                dict(zip(("module", "write_s", "read_s", "predicted_s"), (found.name, *found.sums), strict=True))
                for found in stalls(self)
            ],
            "stats": None if self.stats is None else asdict(self.stats),
        }

    def save(self, path: str | Path) -> None:
        """Write the page to `path`.

        Raises:
            OSError: the file cannot be written; nothing is left behind then.
        """
        page.save(self, path)

    def _repr_html_(self) -> str:
        return page.framed(self)

    def plot(self) -> Any:
        """Return memory and lanes as a figure of matplotlib, which the extra `plot` installs.

        Raises:
            ValueError: matplotlib is missing.
        """
        return picture.picture(self)


def made(
    graphs: Sequence[GraphReport],
    order: Sequence[str],
    *,
    stats: Stats | None = None,
    slots: Mapping[str, Mapping[int, SlotStats]] | None = None,
    step: Timeline | None = None,
    missing: str = "",
    dumps: Sequence[Explanation] = (),
) -> Report:
    """A report of graphs. `order`: as in `Report`; a graph that it lacks runs once."""
    by_name = {graph.graph: graph for graph in graphs}
    known = [name for name in order if name in by_name]
    known += [name for name in by_name if name not in known]
    counted = slots or {}
    found = [
        replace(
            by_name[name],
            runs=known.count(name),
            rows=tuple(replace(row, measured=counted.get(name, {}).get(row.slot)) for row in by_name[name].rows),
        )
        for name in dict.fromkeys(known)
    ]
    return Report(tuple(found), tuple(known), stats, step, missing, tuple(dumps))
