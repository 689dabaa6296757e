"""A report as text: five lines, what did not leave memory, and one table in which layers are folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ssd_fx.report.columns import aligned
from ssd_fx.report.model import GroupRow, Report
from ssd_fx.report.rows import parts
from ssd_fx.report.summary import lines
from ssd_fx.report.unfreed import asked, loud
from ssd_fx.sizes import format_bytes

ROWS = 24  # of the table: with all else one screen
HOLDERS = 6  # rows of what did not leave memory
_LINES, _WIDTH = 3, 48  # source lines that a row names, and their columns


@dataclass(slots=True)
class Folded:
    """Groups of all layers that are shown in one row."""

    module: str
    layers: dict[int, None] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)
    groups: int = 0
    nbytes: int = 0

    def add(self, row: GroupRow, number: int | None, nbytes: int, runs: int) -> None:
        if number is not None:
            self.layers[number] = None
        self.sources[row.source or row.name] = None
        self.groups += runs
        self.nbytes += nbytes

    @property
    def name(self) -> str:
        return self.module.replace("{}", _numbers(sorted(self.layers))) if self.layers else self.module

    @property
    def where(self) -> str:
        """`gpt.py:57,58`: at most three lines, and fewer if they are long."""
        named = list(self.sources)
        shown = [each for i, each in enumerate(named[:_LINES]) if not i or len(",".join(named[: i + 1])) <= _WIDTH]
        files = {each.rpartition(":")[0] for each in shown}
        if len(shown) > 1 and len(files) == 1 and "" not in files:
            shown = [shown[0], *(each.rpartition(":")[2] for each in shown[1:])]
        more = f" +{len(named) - len(shown)}" if len(named) > len(shown) else ""
        return ",".join(shown) + more


def text(report: Report) -> str:
    """The report as people read it in a terminal: at most one screen."""
    shown = [f"{name:7} {said}" for name, said in lines(report)]
    return "\n".join([*shown, *_unfreed(report), "", *_table(report), *_foot(report)])


def _unfreed(report: Report) -> list[str]:
    """What stays in memory though it was to leave, and who holds it; empty if that is little."""
    missed = loud(report)
    if not missed:
        return []
    head = f"NOT FREED: {format_bytes(missed)} of {format_bytes(asked(report))} a step stay in memory between forward "
    head += "and backward, beyond what the budget allows"
    found = holders(report)
    rows = [(f"  {format_bytes(f.nbytes)}", f.name, f.where, f"held by {who}") for who, f in found[:HOLDERS]]
    return ["", head, *aligned(rows, {0}), *_more([f for _, f in found[HOLDERS:]])]


def holders(report: Report) -> list[tuple[str, Folded]]:
    """Who holds what was to leave memory, layers together, the largest first."""
    found = _fold((each.row, each.who, each.nbytes, 1) for each in report.unfreed)
    return sorted(found, key=lambda each: -each[1].nbytes)


def _table(report: Report) -> list[str]:
    rows = [(row, graph.runs) for graph in report.graphs for row in graph.rows]
    folded = _fold((row, _decision(row), runs * row.nbytes, runs) for row, runs in rows)
    ranked = sorted(range(len(folded)), key=lambda i: -folded[i][1].nbytes)
    shown, left = [folded[i] for i in sorted(ranked[:ROWS])], [folded[i][1] for i in ranked[ROWS:]]
    head = ("module", "source", "groups", "bytes", "decision")
    cells = [(f.name or "(no module)", f.where, str(f.groups), format_bytes(f.nbytes), what) for what, f in shown]
    return [*aligned([head, *cells], {2, 3}), *_more(left)]


def _decision(row: GroupRow) -> str:
    if row.decision == "keep":
        return f"keep: {row.reason}"
    return " ".join(filter(None, (row.decision, row.tier, f"({row.reason})" if row.reason else "")))


def _fold(rows: Iterable[tuple[GroupRow, str, int, int]]) -> list[tuple[str, Folded]]:
    """Those of all layers together that are alike but for their number, in the order in which they come first.

    rows: each with what to say of it, with its bytes, and with how often it is there.
    """
    found: dict[tuple[str, str], tuple[str, Folded]] = {}
    for row, what, nbytes, runs in rows:
        before, number, behind = parts(row.module)
        module = ".".join([*before, *([] if number is None else ["{}"]), *behind])
        _, folded = found.setdefault((module, what), (what, Folded(module)))
        folded.add(row, number, nbytes, runs)
    return list(found.values())


def _numbers(numbers: Sequence[int]) -> str:
    """`3`, `{0..11}`, or `{0..4,7}`; a long list is cut."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in spans]
    if len(shown) == 1 and ".." not in shown[0]:
        return shown[0]
    return f"{{{','.join(shown if len(shown) <= 4 else [*shown[:3], '..', shown[-1]])}}}"


def _more(left: Sequence[Folded]) -> list[str]:
    if not left:
        return []
    return [f"and {len(left)} more rows of {format_bytes(sum(f.nbytes for f in left))} together: report.rows() has all"]


def _foot(report: Report) -> list[str]:
    names = [f"{g.graph}{f' x {g.runs}' if g.runs > 1 else ''}" for g in report.graphs]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    steps = f"; measured over {report.stats.steps} steps" if report.stats else "; nothing measured"
    whole = report.parts and report.parts[-1].described.get("whole", True)  # plans of older traces do not say it
    outside = [] if whole else ["not counted: what eager code saves beside them, such as a loss outside of the graphs"]
    return ["", f"graphs of a step: {listed}{steps}", *outside]
