"""A report as text: five lines, what did not leave memory, the groups of all layers, and what the step waits for."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_fx.report.advice import advice, without_plan
from ssd_fx.report.figures import Figures, allowed, figures, stalls, waits
from ssd_fx.report.model import Facts, GroupRow
from ssd_fx.report.rows import Layers, aligned, together
from ssd_fx.report.unfreed import asked, holders, loud, unfreed
from ssd_fx.runtime.wear import wear
from ssd_fx.sizes import format_bytes, format_seconds

ROWS = 24  # of the table: with all else one screen
FEW = 6  # rows of the other tables
_REASONS = 2  # that a line names
_NEAR = 0.1  # the share by which a measured peak may be above the planned one without a word


def text(known: Facts) -> str:
    """The report as people read it in a terminal: at most one screen."""
    shown = [f"{name:7} {said}" for name, said in lines(known)]
    if known.missing:
        return "\n".join([*shown, *(["", str(known.stats)] if known.stats and known.stats.graphs else [])])
    return "\n".join([*shown, *_unfreed(known), "", *_table(known), *_stalls(known), *_foot(known)])


def lines(known: Facts) -> list[tuple[str, str]]:
    """The five lines, each with its name; without a plan, those that can be told."""
    found = figures(known)
    if known.missing:
        return _unplanned(known, found)
    budget = 0 if all(part.budget == 0 for part in known.parts) else None
    return [
        ("memory", _memory(known, found, budget)),
        ("cost", _cost(known, found)),
        ("drive", _drive(found)),
        ("plan", _plan(known)),
        ("next", advice(known, found)),
    ]


def _unplanned(known: Facts, found: Figures) -> list[tuple[str, str]]:
    """The lines of what has no plan: what was measured, and why there is none."""
    stats = known.stats
    if stats is None or not stats.graphs:
        return [("next", known.missing)]
    freed, saved = (format_bytes(nbytes // known.steps) for nbytes in (stats.freed_bytes, stats.saved_bytes))
    return [
        ("memory", f"{_limited(known)}{freed} of {saved} a step leave memory between forward and backward"),
        ("cost", _measured_cost(found)),
        ("drive", _drive(found)),
        ("plan", known.missing),
        ("next", without_plan(known, found)),
    ]


def _memory(known: Facts, found: Figures, budget: object = None) -> str:
    limited = _limited(known)
    peak = f"peak {_change(found.stock_peak_bytes, found.peak_bytes)}, "
    peak += allowed(found.floor_bytes, found.limit_bytes, budget)
    stays = f"between forward and backward {_change(found.stock_stay_bytes, found.stay_bytes)}"
    if found.measured_peak_bytes is None:
        return f"{limited}{peak}; {stays}"
    measured = f"measured peak at our nodes {format_bytes(found.measured_peak_bytes)}{_gap(known, found)}"
    return f"{limited}{measured}; planned {peak}; {stays}"


def _limited(known: Facts) -> str:
    """What the last step took of the option `memory`; empty without it, and before a step has ended."""
    stats = known.stats
    if stats is None or not stats.memory_limit_bytes:
        return ""
    limit, peak, stay = stats.memory_limit_bytes, stats.memory_peak_bytes, stats.memory_stay_bytes
    fits = "fits" if peak <= limit else "does not fit"
    measured = f"{format_bytes(peak)} measured"
    if known.over_bytes:
        measured += f", which is {format_bytes(known.over_bytes)} too much"
    return f"{fits} {format_bytes(limit)}: {measured}, {format_bytes(stay)} of activations stay; "


def _gap(known: Facts, found: Figures) -> str:
    """What a measured peak consists of that is well above the planned one; empty if it is not above it."""
    gap = (found.measured_peak_bytes or 0) - found.peak_bytes
    if gap <= _NEAR * found.peak_bytes:
        return ""
    stayed = _stayed_bytes(known) if known.roomy == "memory" else 0  # a budget in bytes is in the planned peak
    if stayed:
        room = f", {format_bytes(gap)} above the plan: {format_bytes(stayed)} stay, for `memory` has room"
        if gap - stayed <= _NEAR * found.peak_bytes:
            return room
    gone = found.offloaded_bytes - stayed
    inflight, prefetch = (max(getattr(part, name) for part in known.parts) for name in ("inflight", "prefetch"))
    writes, reads = min(inflight, gone), min(prefetch, gone)
    parts = f"{format_bytes(writes)} being written (`inflight`) and {format_bytes(reads)} read early (`prefetch`)"
    missed = sum(each.nbytes for each in unfreed(known) if not each.planned)
    held = f" and {format_bytes(missed)} that somebody holds" if missed else ""
    rest = ", and more than that" if gap > stayed + writes + reads + missed else ""
    if stayed:
        return f"{room}; and it may have up to {parts}{held}{rest}"
    return f", {format_bytes(gap)} above the plan: it may have up to {parts}{held}{rest}"


def _stayed_bytes(known: Facts) -> int:
    """The bytes that were to leave and stayed because there is room, in all runs of a step."""
    rows = (row for part in known.parts for row in part.rows)
    return sum(row.nbytes for row in rows if (row.graph, row.slot) in known.stayed)


def _change(before: int, after: int) -> str:
    share = f" ({100 * (after - before) / before:+.0f}%)" if before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)}{share}"


def _cost(known: Facts, found: Figures) -> str:
    more = 100 * (found.step_s / found.stock_step_s - 1) if found.stock_step_s else 0.0
    said = f"step {format_seconds(found.stock_step_s)} -> {format_seconds(found.step_s)} ({more:+.1f}%), "
    said += f"waits {format_seconds(found.stall_s)} by {_rates(known)} rates"
    if found.measured_stall_s is not None:
        said += f"; {_measured_cost(found)}"
    where = waits(known)
    if where:
        row, seconds = where[0]
        said += f", most for {row.place} ({format_seconds(seconds)})"
    return said


def _measured_cost(found: Figures) -> str:
    stall_s, step_s = found.measured_stall_s or 0.0, found.measured_step_s
    share = f" ({100 * stall_s / step_s:.1f}%) in {format_seconds(step_s)} a step" if step_s else ""
    return f"measured waits {format_seconds(stall_s)}{share}"


def _rates(known: Facts) -> str:
    return " and ".join(dict.fromkeys(graph.rates for graph in known.graphs))


def _drive(found: Figures) -> str:
    written = found.written_bytes if found.measured_drive_bytes is None else found.measured_drive_bytes
    said = f"{format_bytes(written)} written a step"
    if found.measured_drive_bytes is not None and found.step_s:
        said += f" (predicted {format_bytes(found.written_bytes)})"
    if not found.drive_bytes_s:
        return said
    daily, life = wear(found.drive_tbw, found.drive_bytes_s)
    return f"{said}, {daily} a day at {format_seconds(found.measured_step_s or found.step_s)} a step; {life}"


def _plan(known: Facts) -> str:
    rows = [row for part in known.parts for row in part.rows]
    gone = [row for row in rows if row.decision == "offload"]
    stayed = [row for row in gone if (row.graph, row.slot) in known.stayed]
    left = [row for row in gone if (row.graph, row.slot) not in known.stayed]
    said = f"{len(left)} of {len(rows)} groups ({format_bytes(sum(row.nbytes for row in left))}) are offloaded"
    if stayed:
        nbytes = format_bytes(sum(row.nbytes for row in stayed))
        said += f"; {len(stayed)} ({nbytes}) stay as long as `{known.roomy}` has room"
    kept = known.kept.most_common()
    if kept:
        named = [f"{format_bytes(nbytes)} {reason}" for reason, nbytes in kept[:_REASONS]]
        if len(kept) > _REASONS:
            named.append(f"{format_bytes(sum(n for _, n in kept[_REASONS:]))} for other reasons")
        said += f"; kept: {', '.join(named)}"
    again = [each for part in known.parts for each in part.recomputed]
    if again:
        said += f"; {len(again)} tensors ({format_bytes(sum(r['nbytes'] for r in again))}) are recomputed"
    return said


def _unfreed(known: Facts) -> list[str]:
    """What stays in memory though it was to leave, and who holds it; empty if that is little."""
    missed = loud(known)
    if not missed:
        return []
    head = f"NOT FREED: {format_bytes(missed)} of {format_bytes(asked(known))} a step stay in memory between forward "
    head += "and backward, beyond what the budget allows"
    found = holders(known)
    rows = [(f"  {format_bytes(f.sums[0])}", f.name, f.where, f"held by {f.what}") for f in found[:FEW]]
    return ["", head, *aligned(rows, {0}), *_more(found[FEW:])]


def _table(known: Facts) -> list[str]:
    rows = [(row, graph.runs) for graph in known.graphs for row in graph.rows]
    folded = together((row, _decision(row, known), (runs * row.nbytes, runs)) for row, runs in rows)
    ranked = sorted(range(len(folded)), key=lambda i: -folded[i].sums[0])
    shown, left = [folded[i] for i in sorted(ranked[:ROWS])], [folded[i] for i in ranked[ROWS:]]
    head = ("module", "source", "groups", "bytes", "decision")
    cells = [(f.name or "(no module)", f.where, str(f.sums[1]), format_bytes(f.sums[0]), f.what) for f in shown]
    return [*aligned([head, *cells], {2, 3}), *_more(left)]


def _decision(row: GroupRow, known: Facts) -> str:
    if (row.graph, row.slot) in known.stayed:
        return f"stays: `{known.roomy}` has room"
    if row.decision == "keep":
        return f"keep: {row.reason}"
    return f"{row.what} ({row.reason})" if row.reason else row.what


def _more(left: Sequence[Layers]) -> list[str]:
    if not left:
        return []
    nbytes = sum(f.sums[0] for f in left)
    return [f"and {len(left)} more rows of {format_bytes(nbytes)} together: report.rows() has all"]


def _stalls(known: Facts) -> list[str]:
    """For which modules the step waits, the most first; empty if it waits for none."""
    found = stalls(known)
    if not found:
        return []
    head: tuple[str, ...] = ("the step waits for", "source", "writes", "reads", "predicted")
    cells = [(f.name or "(no module)", f.where, *map(format_seconds, f.sums)) for f in found[:FEW]]
    rows = [each if known.stats else each[:-1] for each in (head, *cells)]
    left = found[FEW:]
    more = f"and {len(left)} more rows of {format_seconds(sum(sum(f.sums[:2]) for f in left))} together"
    return ["", *aligned(rows, {2, 3, 4}), *([more] if left else [])]


def _foot(known: Facts) -> list[str]:
    names = [f"{g.graph}{f' x {g.runs}' if g.runs > 1 else ''}" for g in known.graphs]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    steps = f"; measured over {known.stats.steps} steps" if known.stats else "; nothing measured"
    whole = known.parts and known.parts[-1].whole
    outside = [] if whole else ["not counted: what eager code saves beside them, such as a loss outside of the graphs"]
    return ["", f"graphs of a step: {listed}{steps}", *outside]
