"""What should have left memory and did not: which groups, how much, and who holds them."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.report.model import WITHIN, GraphReport, GroupRow, Report

_HOLDERS = {"input": "the caller, who has passed it in", "": "a variable of the model or of the caller"}
LOUD = 0.05  # the share of what was asked for; less is no news
LEAST = 0.02  # the share of all that is saved


@dataclass(frozen=True, slots=True)
class Unfreed:
    """A group of which `nbytes` stay in memory in a step. planned: the plan already says so."""

    row: GroupRow
    nbytes: int
    who: str
    planned: bool


def unfreed(report: Report) -> list[Unfreed]:
    """For `Report.unfreed`, which keeps it."""
    steps = max(report.stats.steps, 1) if report.stats else 1
    found = [each for graph in report.graphs for row in graph.rows for each in _measured(row, steps)]
    found += [each for graph in report.graphs for row in graph.rows for each in _planned(graph, row)]
    return sorted(found, key=lambda each: -each.nbytes)


def asked(report: Report) -> int:
    """Bytes a step that budget and marks want out of memory."""
    gone: int = sum(graph.runs * graph.described["offloaded_bytes"] for graph in report.graphs)
    return gone + sum(each.nbytes for each in report.unfreed if each.planned)


def loud(report: Report) -> int:
    """Bytes a step that were to leave memory and stay; 0 if it is too little to tell."""
    missed = sum(each.nbytes for each in report.unfreed)
    saved = sum(graph.runs * row.nbytes for graph in report.graphs for row in graph.rows)
    return missed if missed > max(LOUD * asked(report), LEAST * saved) else 0


def _measured(row: GroupRow, steps: int) -> list[Unfreed]:
    seen = row.measured
    if seen is None:
        return []
    found = []
    held = round((seen.wasted + seen.held) / steps)
    if held:
        who = f"its owner: {seen.why}" if seen.held and seen.why and not seen.kept else _HOLDERS[row.shared]
        found.append(Unfreed(row, held, who, planned=False))
    if seen.kept:
        found.append(Unfreed(row, round(seen.kept / steps), f"us, for storing failed: {seen.why}", planned=False))
    return found


def _planned(graph: GraphReport, row: GroupRow) -> list[Unfreed]:
    everything_stays = graph.described["budget"] == 1.0
    if row.decision != "keep" or row.reason == WITHIN or row.marked or everything_stays:
        return []
    who = "the caller, as an output of the graph" if row.shared == "output" else f"the plan: {row.reason}"
    return [Unfreed(row, graph.runs * row.nbytes, who, planned=True)]
