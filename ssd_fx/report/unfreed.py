"""What should have left memory and did not: which groups, how much, and who holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ssd_fx.report.model import WITHIN, Facts, GraphReport, GroupRow
from ssd_fx.report.rows import Layers, together

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


def unfreed(known: Facts) -> list[Unfreed]:
    """The groups that stay though neither budget nor marks ask for it, the largest first."""
    found = [each for row in known.groups for each in _measured(row, known.steps)]
    found += [each for graph in known.graphs for row in graph.rows for each in _planned(graph, row)]
    return sorted(found, key=lambda each: -each.nbytes)


def holders(known: Facts) -> list[Layers]:
    """Who holds what was to leave memory, layers together, the largest first. The sum is the bytes."""
    found = together((each.row, each.who, (each.nbytes,)) for each in unfreed(known))
    return sorted(found, key=lambda each: -each.sums[0])


def asked(known: Facts) -> int:
    """Bytes a step that budget and marks want out of memory."""
    gone = sum(graph.runs * graph.offloaded_bytes for graph in known.graphs)
    return gone + sum(each.nbytes for each in unfreed(known) if each.planned)


def loud(known: Facts) -> int:
    """Bytes a step that were to leave memory and stay; 0 if it is too little to tell, or `memory` is kept."""
    if known.stats is not None and known.stats.memory_limit_bytes and not known.over_bytes:
        return 0
    missed = sum(each.nbytes for each in unfreed(known))
    saved = sum(graph.runs * row.nbytes for graph in known.graphs for row in graph.rows)
    return missed if missed > max(LOUD * asked(known), LEAST * saved) else 0


def _measured(row: GroupRow, steps: int) -> Iterator[Unfreed]:
    seen = row.measured
    if seen is None:
        return
    if held := round((seen.wasted + seen.held) / steps):
        who = f"its owner: {seen.why}" if seen.held and seen.why and not seen.kept else _HOLDERS[row.shared]
        yield Unfreed(row, held, who, planned=False)
    if seen.kept:
        yield Unfreed(row, round(seen.kept / steps), f"us, for storing failed: {seen.why}", planned=False)


def _planned(graph: GraphReport, row: GroupRow) -> Iterator[Unfreed]:
    everything_stays = graph.budget == 1.0
    if row.decision == "keep" and row.reason != WITHIN and not row.marked and not everything_stays:
        who = "the caller, as an output of the graph" if row.shared == "output" else f"the plan: {row.reason}"
        yield Unfreed(row, graph.runs * row.nbytes, who, planned=True)
