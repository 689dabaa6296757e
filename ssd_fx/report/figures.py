"""The figures of a report: one step of all graphs together, and what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ssd_fx.report.model import WITHIN, Facts, GraphReport, GroupRow
from ssd_fx.report.rows import Layers, together
from ssd_fx.runtime.stats import SlotStats
from ssd_fx.runtime.wear import rated_days
from ssd_fx.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bytes of memory are above the level before the step. "stock" is the same step without ssd_fx.

    stay_bytes: saved tensors in memory between forward and backward. offloaded_bytes: those that are to leave memory.
    floor_bytes: the peak with infinitely fast I/O. limit_bytes: the peak that the budget allows.
    step_s: forward and backward; of it transfer_s for starting transfers and computing beside them, and the stalls.
    drive_tbw: 10^12 bytes that the drives are rated for; 0 if that is not known.
    written_bytes, measured_drive_bytes: what drives get.
    measured_...: per step, None where nothing was measured. measured_step_s has all that the loop does; 0 if unknown.
    """

    stock_peak_bytes: int
    peak_bytes: int
    floor_bytes: int
    limit_bytes: int
    stock_stay_bytes: int
    stay_bytes: int
    offloaded_bytes: int
    stock_step_s: float
    step_s: float
    transfer_s: float
    write_stall_s: float
    read_stall_s: float
    written_bytes: int
    drive_tbw: float = 0.0
    measured_step_s: float = 0.0
    measured_stall_s: float | None = None
    measured_drive_bytes: int | None = None
    measured_peak_bytes: int | None = None

    @property
    def stall_s(self) -> float:
        """The seconds that the step is predicted to wait for transfers."""
        return self.write_stall_s + self.read_stall_s

    @property
    def drive_bytes_s(self) -> float:
        """The bytes that drives get in a second: as measured, or else as predicted; 0 if no time is known."""
        written = self.written_bytes if self.measured_drive_bytes is None else self.measured_drive_bytes
        seconds = self.measured_step_s or self.step_s
        return written / seconds if seconds else 0.0


def figures(known: Facts) -> Figures:
    """The figures of all graphs together, for one step."""
    parts, stock, planned, stats = known.parts, known.stock, known.planned, known.stats

    def each(name: str) -> list[float]:
        return [part.predicted[name] for part in parts]

    offloaded = sum(part.offloaded_bytes for part in parts)
    rest = min(may_stay(part.predicted for part in parts), offloaded)
    behind = left_behind([part.own.gradients for part in parts])
    outputs = sum(row.nbytes for part in parts for row in part.rows if row.slot < 0)
    measured: dict[str, Any] = {}
    if stats:
        measured = {
            "drive_tbw": stats.drive_tbw,
            "measured_step_s": stats.step_s,
            "measured_stall_s": stats.stall_s / known.steps,
            "measured_drive_bytes": round((stats.drive_bytes + stats.moved_bytes) / known.steps),
        }
    if known.step and known.step.memory:
        measured["measured_peak_bytes"] = known.step.peak
    return Figures(
        stock_peak_bytes=stock.peak,
        peak_bytes=min(planned.peak + rest, max(stock.peak, planned.peak)),
        floor_bytes=highest(each("floor_bytes"), map(_must_stay, parts), behind),
        limit_bytes=highest(each("limit_bytes"), (part.own.stays for part in parts), behind),
        stock_stay_bytes=outputs + stock.stays,
        stay_bytes=outputs + planned.stays + max(rest, _rests(parts[-1]) if parts else 0),
        offloaded_bytes=offloaded,
        stock_step_s=stock.end_s,
        step_s=planned.end_s,
        transfer_s=sum(each("transfer_s")),
        write_stall_s=sum(each("write_stall_s")),
        read_stall_s=sum(each("read_stall_s")),
        written_bytes=round(still_leaving(offloaded - sum(map(_rests, parts)), rest) * sum(each("written_bytes"))),
        **measured,
    )


def highest(peaks: Iterable[float], stays: Iterable[int], behind: Iterable[int]) -> int:
    """The highest peak of several graphs, each above the `stays` that the forwards before it leave in memory. `behind`:
    as `left_behind` has them; a peak is taken to be in the backward."""
    levels = accumulate(stays, initial=0)
    return int(max((sum(each) for each in zip(levels, behind, peaks, strict=False)), default=0))


def left_behind(gradients: Sequence[int]) -> list[int]:
    """For each of several graphs, the bytes of `gradients` that the backwards of those behind it leave in memory."""
    return list(accumulate(reversed(gradients[1:]), initial=0))[::-1]


def still_leaving(nbytes: int, stays: int) -> float:
    """The share of `nbytes`, which are to be written, that still leaves if `stays` of them stay in memory.

    Both count tensors as they are in memory. Compression makes what is written less, in the same proportion.
    """
    return max(0, nbytes - stays) / nbytes if nbytes else 0.0


def _must_stay(part: GraphReport) -> int:
    """Bytes that a forward leaves in memory under any budget, until its backward begins."""
    kept = [row for row in part.rows if row.decision == "keep" and row.slot >= 0]
    return sum(row.nbytes for row in kept if row.reason != WITHIN)


def _rests(part: GraphReport) -> int:
    """Bytes that are written only if another forward begins, and the backward of the last graph comes first.

    They take room of the budget.
    """
    return sum(row.nbytes for row in part.rows if row.decision == "offload" and row.times and "write" not in row.times)


def waits(known: Facts) -> list[tuple[GroupRow, float]]:
    """The groups that the step waits for, the most first: in the traced step if there is one, else as predicted."""
    rows = {(row.graph, row.slot): row for row in known.groups}
    found: dict[tuple[str, int], float] = defaultdict(float)
    for span in known.over_time.waits:
        found[span.graph, span.slot] += span.waited
    ranked = sorted(found.items(), key=lambda each: -each[1])
    return [(rows[key], seconds) for key, seconds in ranked if key in rows]


def stalls(known: Facts) -> list[Layers]:
    """The modules that the step waits for, layers together, the most first.

    The sums are seconds of a step: for writes, for reads, and predicted for both. The first two are measured, over all
    steps; before any they are predicted too.
    """
    found = []
    for graph in known.graphs:
        for row in graph.rows:
            of = {span.kind: graph.runs * span.waited for span in row.spans}
            predicted = of.get("release", 0.0), of.get("wait", 0.0)
            seen = row.measured or SlotStats()
            measured = seen.write_stall_s / known.steps, seen.read_stall_s / known.steps
            if any(predicted) or any(measured):
                found.append((row, "", (*(measured if known.stats else predicted), sum(predicted))))
    return sorted(together(found), key=lambda each: -sum(each.sums[:2]))


def may_stay(predicted: Iterable[Mapping[str, float]]) -> int:
    """Bytes of what graphs offload that the runtime may leave in memory. It has one budget for all of them.

    predicted: the figures of their dumps.
    """
    return max((int(p.get("shared_budget_bytes", 0) + p.get("resident_bytes", 0)) for p in predicted), default=0)


def drive_life(found: Figures) -> float:
    """Days of training without a pause until the rated bytes are written; 0 if that is not known."""
    return rated_days(found.drive_tbw, found.drive_bytes_s) if found.drive_bytes_s else 0.0


def allowed(floor_bytes: float, limit_bytes: float, budget: object) -> str:
    """The floor and the limit beside each other. The limit of budget 0 is chosen (`passes/planner/budget.py`)."""
    said = f"floor {format_bytes(floor_bytes)}, limit {format_bytes(limit_bytes)}"
    if budget != 0 or limit_bytes <= floor_bytes:
        return said
    return f"{said} (the lowest that can be met, or 5% more for a step a tenth shorter)"
