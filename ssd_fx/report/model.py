"""What a report is made of, as values: graphs, their alias groups, and the step that they make together.

plans that graphs carry ---.
counts of the run ---------+--> Facts --> figures, advice, lines, table, page, picture
events of a step ----------'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ssd_fx.report.timeline import Span, Timeline, joined
from ssd_fx.runtime import plans
from ssd_fx.runtime.stats import SlotStats, Stats

Times = Mapping[str, tuple[float, ...]]  # of a group: begin and end by the kind of a `Span`, in seconds
WITHIN, BELOW = "within the budget", "below min_bytes"  # the planner's words

_TIMES = (  # of a row: the name, the kind of the span, and which of its times
    ("produced_s", "store", "begin"),
    ("released_s", "release", "begin"),
    ("used_s", "wait", "end"),
    ("last_used_s", "last", "end"),
    ("write_from_s", "write", "begin"),
    ("write_to_s", "write", "end"),
    ("read_from_s", "read", "begin"),
    ("read_to_s", "read", "end"),
    ("gone_from_s", "gone", "begin"),
    ("gone_to_s", "gone", "end"),
    ("write_wait_s", "release", "waited"),
    ("read_wait_s", "wait", "waited"),
)
_COUNTS = {
    "measured_freed_bytes": "freed",
    "measured_wasted_bytes": "wasted",
    "measured_held_bytes": "held",
    "measured_kept_bytes": "kept",
    "measured_write_stall_s": "write_stall_s",
    "measured_read_stall_s": "read_stall_s",
}


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One alias group of a graph: what is saved, what is decided, and what became of it.

    Attributes:
        graph: its name.
        slot: the group's number in the graph; below 0 for a saved output of the graph, which is no group's and stays in
            any case.
        name: the node that makes it.
        module: the module that makes it.
        source: the line of the model, or its argument.
        nbytes: of its storage.
        stored_nbytes: of these, what is stored if it is offloaded.
        decision: "keep" or "offload".
        tier: where it is stored, empty if the runtime decides.
        reason: of the decision.
        marked: the user has said what is to become of it.
        shared: "output" if the caller gets it, "input" if the caller has passed it, else empty.
        times: predicted, from the start of its graph's forward.
        measured: over all steps; None before any step, and where nothing is to tell.
    """

    graph: str
    slot: int
    name: str
    module: str
    source: str
    nbytes: int
    stored_nbytes: int
    decision: str
    tier: str = ""
    reason: str = ""
    marked: bool = False
    shared: str = ""
    times: Times = field(default_factory=dict)
    measured: SlotStats | None = None

    @property
    def place(self) -> str:
        """Where people find the group: its module and its line."""
        return " ".join(filter(None, (self.module, self.source))) or self.name

    @property
    def what(self) -> str:
        """`keep`, `offload` or `offload ssd`."""
        return f"{self.decision} {self.tier}".rstrip()

    @property
    def spans(self) -> list[Span]:
        """What is predicted of the group. The step waits for its write in the release, for its read in the wait."""
        found = []
        for kind, (begin, end) in self.times.items():
            waited = round(end - begin, 6) if kind in ("release", "wait") else 0.0
            nbytes = self.stored_nbytes if kind in ("write", "read") else 0
            found.append(Span(kind, self.graph, self.slot, 0, begin, end, waited, nbytes))
        return found

    def flat(self) -> dict[str, Any]:
        """One level of plain values, for a table of rows."""
        found = {name: value for name, value in asdict(self).items() if name not in ("times", "measured")}
        spans = {span.kind: span for span in self.spans}
        found |= {name: getattr(spans.get(kind), which, None) for name, kind, which in _TIMES}
        return found | {name: getattr(self.measured, of, None) for name, of in _COUNTS.items()}


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph: its plan, which the graph itself carries.

    Attributes:
        graph: its name.
        budget, min_bytes, prefetch: the options. inflight: the option, or what it is by default.
        rates: where the machine's rates come from: "measured", "typical", "typical compute", "given".
        saved_bytes, offloaded_bytes: of all alias groups.
        predicted: the figures of the dump: `step_s`, `peak_bytes` and so on.
        host_speedup: how many times as fast as the drives host memory would be; 0 where it does not matter.
        whole: whether the graph seems to have the loss: its backward gets gradients of single numbers only.
        stock: the step of PyTorch's own partition with everything kept.
        own: the step as planned, without its spans, which the rows have.
        rows: the alias groups, and the saved outputs.
        recomputed: name, module, source, nbytes and seconds of what is computed again.
        runs: how often it runs in a step.
        memory: the option; empty if another budget is planned for.
    """

    graph: str
    budget: int | float | str
    min_bytes: int
    inflight: int
    prefetch: int
    rates: str
    saved_bytes: int
    offloaded_bytes: int
    predicted: Mapping[str, float]
    host_speedup: float
    whole: bool
    stock: Timeline = field(repr=False)
    own: Timeline = field(repr=False)
    rows: tuple[GroupRow, ...] = field(repr=False)
    recomputed: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    runs: int = 1
    memory: int | float | str = ""

    @property
    def planned(self) -> Timeline:
        """`own` with the spans of the rows."""
        return replace(self.own, spans=tuple(span for row in self.rows for span in row.spans))

    def packed(self) -> str:
        """The text that the graph carries, with every field by its name."""
        return plans.pack(asdict(self))

    @staticmethod
    def unpacked(about: str) -> GraphReport:
        """The plan that a graph carries.

        Raises:
            ValueError, KeyError, TypeError: it is none, or that of another version.
        """
        found = plans.unpack(about)
        rows = tuple(GroupRow(**row) for row in found["rows"])
        found |= {"rows": rows, "stock": Timeline(**found["stock"]), "own": Timeline(**found["own"])}
        return GraphReport(**{f.name: found[f.name] for f in fields(GraphReport)})


@dataclass(frozen=True)
class Facts:
    """What is known of a training step: predicted, and after steps measured as well.

    Attributes:
        graphs: the compiled graphs, in the order in which they first run.
        order: the names of the graphs as the forward of one step runs them.
        stats: the counts since the last reset; None before any step.
        step: the last whole step that was traced, if there is one.
        missing: why no graph is among them; empty if one is.
    """

    graphs: tuple[GraphReport, ...]
    order: tuple[str, ...]
    stats: Stats | None = None
    step: Timeline | None = None
    missing: str = ""

    @property
    def parts(self) -> list[GraphReport]:
        """The graphs as the forward of one step runs them: one that runs twice is there twice."""
        graphs = {graph.graph: graph for graph in self.graphs}
        return [graphs[name] for name in self.order]

    @property
    def groups(self) -> list[GroupRow]:
        """The rows of all graphs, each once."""
        return [row for graph in self.graphs for row in graph.rows]

    @cached_property
    def planned(self) -> Timeline:
        """The predicted step of all graphs together."""
        return joined([part.planned for part in self.parts])

    @cached_property
    def stock(self) -> Timeline:
        """The same step without ssd_fx."""
        return joined([part.stock for part in self.parts])

    @property
    def over_time(self) -> Timeline:
        """The traced step if there is one, or else the planned one."""
        return self.step or self.planned

    @property
    def steps(self) -> int:
        """How many steps were measured, at least 1."""
        return max(self.stats.steps, 1) if self.stats else 1

    @property
    def kept(self) -> Counter[str]:
        """Bytes that the plan keeps in memory, by reason, in all runs of a step."""
        found: Counter[str] = Counter()
        for row in (row for part in self.parts for row in part.rows if row.decision == "keep"):
            found[row.reason] += row.nbytes
        return found

    @property
    def over_bytes(self) -> int:
        """By how much the last step was above the option `memory`; 0 if it was within it, and without the option."""
        stats = self.stats
        return max(0, stats.memory_peak_bytes - stats.memory_limit_bytes) if stats and stats.memory_limit_bytes else 0

    @property
    def roomy(self) -> str:
        """The option that lets the runtime leave in memory what the plan offloads, as long as it has room; or empty."""
        if self.stats is not None and self.stats.memory_limit_bytes:
            return "memory"
        return "budget" if any(isinstance(g.budget, int) and g.budget for g in self.graphs) else ""

    @property
    def stayed(self) -> frozenset[tuple[str, int]]:
        """Graph and slot of groups that were to leave, and stayed in the traced step as the option `roomy` had room."""
        return frozenset(self.step.stayed if self.roomy and self.step else ())

    def rows(self) -> list[dict[str, Any]]:
        """A flat dictionary for every alias group: `pandas.DataFrame(report.rows())`."""
        return [row.flat() for row in self.groups]


def step_of(graphs: Sequence[GraphReport], step: Timeline | None) -> list[GraphReport]:
    """The graphs that the step ran, so those of other batches are not added to it; all if no step is known."""
    return [each for each in graphs if step and each.graph in step.order] or list(graphs)
