"""The first five lines of a report: memory, cost, drive, plan, and what to change."""

from __future__ import annotations

from collections import defaultdict

from ssd_fx.report.advice import advice
from ssd_fx.report.course import course
from ssd_fx.report.figures import Figures, allowed, may_stay
from ssd_fx.report.model import GraphReport, GroupRow, Report
from ssd_fx.runtime.wear import wear
from ssd_fx.sizes import format_bytes, format_seconds

_REASONS = 2  # that a line names
_NEAR = 0.1  # the share by which a measured peak may be above the planned one without a word


def summary(report: Report) -> Figures:
    """The figures of all graphs together, for one step."""
    found, parts = course(report), report.parts

    def described(name: str) -> int:
        return sum(part.described[name] for part in parts)

    def predicted(name: str) -> float:
        return sum(part.predicted[name] for part in parts)

    offloaded = described("offloaded_bytes")
    rest = min(may_stay(part.predicted for part in parts), offloaded)
    stays = max(rest, _rests(parts[-1]) if parts else 0)  # what rests takes room of the budget
    outputs = sum(row.nbytes for part in parts for row in part.rows if row.slot < 0)
    stats, memory = report.stats, report.step.memory if report.step else ()
    steps = max(stats.steps, 1) if stats else 1
    return Figures(
        stock_peak_bytes=found.stock.peak,
        peak_bytes=min(found.own.peak + rest, max(found.stock.peak, found.own.peak)),
        floor_bytes=found.floor_bytes,
        limit_bytes=found.limit_bytes,
        stock_stay_bytes=outputs + sum(part.described["stock"]["saved_bytes"] for part in parts),
        stay_bytes=outputs + described("saved_bytes") - offloaded + stays,
        offloaded_bytes=offloaded,
        stock_step_s=found.stock.end_s,
        step_s=found.own.end_s,
        transfer_s=predicted("transfer_s"),
        write_stall_s=predicted("write_stall_s"),
        read_stall_s=predicted("read_stall_s"),
        written_bytes=int(max(0, predicted("written_bytes") - rest)),
        drive_tbw=stats.drive_tbw if stats else 0.0,
        measured_step_s=stats.step_s if stats else 0.0,
        measured_stall_s=stats.stall_s / steps if stats else None,
        measured_drive_bytes=round((stats.drive_bytes + stats.moved_bytes) / steps) if stats else None,
        measured_peak_bytes=max((nbytes for _, nbytes in memory), default=None),
    )


def _rests(part: GraphReport) -> int:
    """Bytes of the last graph whose write begins only with another forward: its backward comes first."""
    offloaded = [row for row in part.rows if row.decision == "offload"]
    return sum(row.nbytes for row in offloaded if row.times is not None and row.times.write is None)


def lines(report: Report) -> list[tuple[str, str]]:
    """The five lines, each with its name."""
    found = summary(report)
    budget = 0 if all(part.described["budget"] == 0 for part in report.parts) else None
    return [
        ("memory", _memory(report, found, budget)),
        ("cost", _cost(report, found)),
        ("drive", _drive(found)),
        ("plan", _plan(report)),
        ("next", advice(report, found)),
    ]


def _memory(report: Report, found: Figures, budget: object = None) -> str:
    limited = _limited(report)
    peak = f"peak {_change(found.stock_peak_bytes, found.peak_bytes)}, "
    peak += allowed(found.floor_bytes, found.limit_bytes, budget)
    stays = f"between forward and backward {_change(found.stock_stay_bytes, found.stay_bytes)}"
    if found.measured_peak_bytes is None:
        return f"{limited}{peak}; {stays}"
    measured = f"measured peak at our nodes {format_bytes(found.measured_peak_bytes)}{_gap(report, found)}"
    return f"{limited}{measured}; planned {peak}; {stays}"


def _limited(report: Report) -> str:
    """What the last step took of the option `memory`; empty without it, and before a step has ended."""
    stats = report.stats
    if stats is None or not stats.memory_limit_bytes:
        return ""
    limit, peak, stay = stats.memory_limit_bytes, stats.memory_peak_bytes, stats.memory_stay_bytes
    fits = "fits" if peak <= limit else "does not fit"
    return f"{fits} {format_bytes(limit)}: {format_bytes(peak)} measured, {format_bytes(stay)} of activations stay; "


def _gap(report: Report, found: Figures) -> str:
    """What a measured peak well above the planned one consists of; empty if it is not."""
    gap = (found.measured_peak_bytes or 0) - found.peak_bytes
    if gap <= _NEAR * found.peak_bytes:
        return ""
    inflight, prefetch = (max(part.described[name] for part in report.parts) for name in ("inflight", "prefetch"))
    writes, reads = min(inflight, found.offloaded_bytes), min(prefetch, found.offloaded_bytes)
    parts = f"{format_bytes(writes)} being written (`inflight`) and {format_bytes(reads)} read early (`prefetch`)"
    missed = sum(each.nbytes for each in report.unfreed if not each.planned)
    held = f" and {format_bytes(missed)} that somebody holds" if missed else ""
    rest = ", and more than that" if gap > writes + reads + missed else ""
    return f", {format_bytes(gap)} above the plan: it may have up to {parts}{held}{rest}"


def _change(before: int, after: int) -> str:
    share = f" ({100 * (after - before) / before:+.0f}%)" if before else ""
    return f"{format_bytes(before)} -> {format_bytes(after)}{share}"


def _cost(report: Report, found: Figures) -> str:
    more = 100 * (found.step_s / found.stock_step_s - 1) if found.stock_step_s else 0.0
    said = f"step {format_seconds(found.stock_step_s)} -> {format_seconds(found.step_s)} ({more:+.1f}%), "
    said += f"waits {format_seconds(found.stall_s)} by {_rates(report)} rates"
    if found.measured_stall_s is not None:
        said += f"; measured waits {format_seconds(found.measured_stall_s)}"
        if found.measured_step_s:
            share = 100 * found.measured_stall_s / found.measured_step_s
            said += f" ({share:.1f}%) in {format_seconds(found.measured_step_s)} a step"
    where = waits(report)
    if where:
        row, seconds = where[0]
        said += f", most for {row.place} ({format_seconds(seconds)})"
    return said


def _rates(report: Report) -> str:
    return " and ".join(dict.fromkeys(graph.described["rates"] for graph in report.graphs))


def waits(report: Report) -> list[tuple[GroupRow, float]]:
    """What the step waits for, the most first: measured in the traced step if there is one, else predicted."""
    rows = {(row.graph, row.slot): row for graph in report.graphs for row in graph.rows}
    found: dict[tuple[str, int], float] = defaultdict(float)
    if report.step is not None:
        for event in report.step.waits:
            found[event.graph, event.slot] += event.ended - event.started
    else:
        timed = [(row, row.times) for part in report.parts for row in part.rows if row.times is not None]
        for row, times in timed:
            found[row.graph, row.slot] += times.write_wait_s + times.read_wait_s
    ranked = sorted(found.items(), key=lambda each: -each[1])
    return [(rows[key], seconds) for key, seconds in ranked if seconds > 0 and key in rows]


def _drive(found: Figures) -> str:
    written = found.written_bytes if found.measured_drive_bytes is None else found.measured_drive_bytes
    said = f"{format_bytes(written)} written a step"
    if found.measured_drive_bytes is not None:
        said += f" (predicted {format_bytes(found.written_bytes)})"
    if not found.drive_bytes_s:
        return said
    daily, life = wear(found.drive_tbw, found.drive_bytes_s)
    return f"{said}, {daily} a day at {format_seconds(found.measured_step_s or found.step_s)} a step; {life}"


def _plan(report: Report) -> str:
    rows = [row for part in report.parts for row in part.rows]
    gone = [row for row in rows if row.decision == "offload"]
    said = f"{len(gone)} of {len(rows)} groups ({format_bytes(sum(row.nbytes for row in gone))}) are offloaded"
    kept = report.kept.most_common()
    if kept:
        named = [f"{format_bytes(nbytes)} {reason}" for reason, nbytes in kept[:_REASONS]]
        if len(kept) > _REASONS:
            named.append(f"{format_bytes(sum(n for _, n in kept[_REASONS:]))} for other reasons")
        said += f"; kept: {', '.join(named)}"
    again = [each for part in report.parts for each in part.described["recomputed"]]
    if again:
        said += f"; {len(again)} tensors ({format_bytes(sum(r['nbytes'] for r in again))}) are recomputed"
    return said
