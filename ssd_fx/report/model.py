"""The report as values: graphs, their alias groups, and the step that they make together.

described plans ----.
counts of the run ---+--> Report --> lines, table, page, picture, rows, dictionary
events of a step ----'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_fx.report.dump import Explanation
from ssd_fx.report.measured import MeasuredStep
from ssd_fx.runtime.stats import SlotStats, Stats

if TYPE_CHECKING:
    from ssd_fx.report.unfreed import Unfreed

Span = tuple[float, float]
WITHIN, BELOW = "within the budget", "below min_bytes"  # the planner's words


@dataclass(frozen=True, slots=True)
class Times:
    """The predicted times of one alias group, in seconds from the start of its graph's forward.

    The fields are those of `passes.plan.Life`. What does not happen is None.
    """

    produced: float
    released: float
    used: float
    last_used: float
    write: Span | None
    read: Span | None
    gone: Span | None
    write_wait_s: float
    read_wait_s: float

    @property
    def waits(self) -> tuple[Span, ...]:
        """When the step waits for the write, and for the read."""
        ends = (self.released, self.released + self.write_wait_s), (self.used - self.read_wait_s, self.used)
        return tuple((begin, end) for begin, end in ends if begin < end)

    def moved(self, forward_s: float, backward_s: float) -> Times:
        """The same with so many seconds added to what happens in the forward, and in the backward."""
        return replace(
            self,
            produced=self.produced + forward_s,
            released=self.released + forward_s,
            used=self.used + backward_s,
            last_used=self.last_used + backward_s,
            write=_moved(self.write, forward_s, forward_s),
            read=_moved(self.read, backward_s, backward_s),
            gone=_moved(self.gone, forward_s, backward_s),
        )


def _moved(span: Span | None, begin_s: float, end_s: float) -> Span | None:
    return None if span is None else (span[0] + begin_s, span[1] + end_s)


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One alias group of a graph: what is saved, what is decided, and what became of it.

    slot: its number in the graph; below 0 for a saved output of the graph, which is no group's and stays in any case.
    name: the node that makes it. source: the line of the model, or its argument. marked: the user has said what is to
    become of it. shared: "output" if the caller gets it, "input" if the caller has passed it, else empty.
    measured: bytes over all steps; None before any step, and where nothing is to tell.
    """

    graph: str
    slot: int
    name: str
    module: str
    source: str
    nbytes: int
    stored_nbytes: int
    decision: str
    tier: str
    reason: str
    marked: bool
    shared: str
    times: Times | None = None
    measured: SlotStats | None = None

    @property
    def place(self) -> str:
        """Where people find the group: its module and its line."""
        return " ".join(filter(None, (self.module, self.source))) or self.name

    def flat(self) -> dict[str, Any]:
        """One level of plain values, for a table of rows."""
        found = {name: value for name, value in asdict(self).items() if name not in ("times", "measured")}
        times: dict[str, Any] = {} if self.times is None else asdict(self.times)
        for name in Times.__slots__:
            value = times.get(name)
            if name in ("write", "read", "gone"):
                found |= {f"{name}_from_s": value and value[0], f"{name}_to_s": value and value[1]}
            else:
                found[name if name.endswith("_s") else f"{name}_s"] = value
        seen: dict[str, Any] = {} if self.measured is None else asdict(self.measured)
        return found | {f"measured_{what}_bytes": seen.get(what) for what in ("freed", "wasted", "held", "kept")}


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph. `runs`: how often it runs in a step. `described`: as `report.describe` made it."""

    graph: str
    runs: int
    rows: tuple[GroupRow, ...]
    described: Mapping[str, Any] = field(repr=False)

    @property
    def predicted(self) -> Mapping[str, float]:
        """The figures of the dump: `step_s`, `peak_bytes` and so on."""
        found: Mapping[str, float] = self.described["predicted"]
        return found


@dataclass(frozen=True)
class Report:
    """What ssd_fx does to a training step: predicted, and after steps measured as well.

    graphs: the compiled graphs, in the order in which they first run.
    order: the names of the graphs as the forward of one step runs them.
    stats: the counts since the last reset; None before any step.
    step: the last whole step that was traced, if there is one.
    dumps: of `ssd_fx.explain` alone: the plans and the rewritten graphs, as the option `dump` writes them.
    """

    graphs: tuple[GraphReport, ...]
    order: tuple[str, ...]
    stats: Stats | None = None
    step: MeasuredStep | None = None
    dumps: tuple[Explanation, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        from ssd_fx.report.text import text

        return text(self)

    @property
    def parts(self) -> list[GraphReport]:
        """The graphs as the forward of one step runs them: one that runs twice is there twice."""
        graphs = {graph.graph: graph for graph in self.graphs}
        return [graphs[name] for name in self.order]

    @property
    def kept(self) -> Counter[str]:
        """Bytes that the plan keeps in memory, by reason, in all runs of a step."""
        found: Counter[str] = Counter()
        for row in (row for part in self.parts for row in part.rows if row.decision == "keep"):
            found[row.reason] += row.nbytes
        return found

    @cached_property
    def unfreed(self) -> list[Unfreed]:
        """The groups that stay though neither budget nor marks ask for it, the largest first."""
        from ssd_fx.report.unfreed import unfreed

        return unfreed(self)

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for every alias group: `pandas.DataFrame(report.rows())`."""
        return [row.flat() for graph in self.graphs for row in graph.rows]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        from ssd_fx.report.summary import lines, summary

        return {
            "summary": asdict(summary(self)),
            "lines": dict(lines(self)),
            "graphs": [
                {
                    "graph": g.graph,
                    "runs": g.runs,
                    "predicted": dict(g.predicted),
                    "recomputed": g.described["recomputed"],
                }
                for g in self.graphs
            ],
            "groups": self.rows(),
            "stats": None if self.stats is None else asdict(self.stats),
        }

    def save(self, path: str | Path) -> None:
        """Write the page to `path`.

        Raises:
            OSError: the file cannot be written; nothing is left behind then.
        """
        from ssd_fx.report.page import save

        save(self, path)

    def _repr_html_(self) -> str:
        from ssd_fx.report.page import framed

        return framed(self)

    def plot(self) -> Any:
        """Return memory and lanes as a figure of matplotlib, which the extra `plot` installs.

        Raises:
            ValueError: matplotlib is missing.
        """
        from ssd_fx.report.picture import picture

        return picture(self)


def made(
    described: Sequence[Mapping[str, Any]],
    order: Sequence[str],
    *,
    stats: Stats | None = None,
    slots: Mapping[str, Mapping[int, SlotStats]] | None = None,
    step: MeasuredStep | None = None,
    dumps: Sequence[Explanation] = (),
) -> Report:
    """A report of graphs as `describe` tells of them. `order`: as in `Report`; a graph that it lacks runs once."""
    names = [each["graph"] for each in described]
    known = [name for name in order if name in names]
    known += [name for name in names if name not in known]
    by_name = {each["graph"]: each for each in described}
    graphs = tuple(
        _graph(by_name[name], known.count(name), (slots or {}).get(name, {})) for name in dict.fromkeys(known)
    )
    return Report(graphs, tuple(known), stats, step, tuple(dumps))


def step_of(described: Sequence[Mapping[str, Any]], step: MeasuredStep | None) -> list[Mapping[str, Any]]:
    """The graphs that the step ran, so those of other batches are not added to it; all if no step is known."""
    return [each for each in described if step and each["graph"] in step.order] or list(described)


def _graph(described: Mapping[str, Any], runs: int, slots: Mapping[int, SlotStats]) -> GraphReport:
    rows = tuple(_row(described["graph"], group, slots.get(group["slot"])) for group in described["groups"])
    return GraphReport(described["graph"], runs, rows, described)


def _row(graph: str, group: Mapping[str, Any], measured: SlotStats | None) -> GroupRow:
    given = {name: value for name, value in group.items() if name != "life"}
    times = Times(*map(_seconds, group["life"])) if group["life"] else None
    return GroupRow(graph=graph, **given, times=times, measured=measured)


def _seconds(us: Any) -> Any:
    return None if us is None else tuple(each / 1e6 for each in us) if isinstance(us, (list, tuple)) else us / 1e6
