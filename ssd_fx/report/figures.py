"""The figures of a report: one step of all graphs together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ssd_fx.runtime.wear import rated_days
from ssd_fx.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of memory are above the level before the step. "stock" is the same step without ssd_fx.

    stay_bytes: saved tensors in memory between forward and backward. offloaded_bytes: of the plan, to leave memory.
    floor_bytes: the peak with infinitely fast I/O. limit_bytes: the peak that the budget allows.
    step_s: forward and backward; of it transfer_s for starting transfers and computing beside them, and the stalls.
    drive_tbw: 10^12 bytes that the drives are rated for; 0 if that is not known.
    written_bytes, measured_drive_bytes: to drives.
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
    drive_tbw: float
    measured_step_s: float
    measured_stall_s: float | None
    measured_drive_bytes: int | None
    measured_peak_bytes: int | None

    @property
    def stall_s(self) -> float:
        """What the step is predicted to wait for transfers."""
        return self.write_stall_s + self.read_stall_s

    @property
    def drive_bytes_s(self) -> float:
        """What drives get in a second: as measured, or else as predicted; 0 if no time is known."""
        written = self.written_bytes if self.measured_drive_bytes is None else self.measured_drive_bytes
        seconds = self.measured_step_s or self.step_s
        return written / seconds if seconds else 0.0


def may_stay(predicted: Iterable[Mapping[str, float]]) -> int:
    """Bytes of what graphs offload that the runtime may leave in memory. It has one budget for all of them.

    predicted: the figures of their dumps.
    """
    return max((int(p.get("shared_budget_bytes", 0) + p.get("resident_bytes", 0)) for p in predicted), default=0)


def drive_life(found: Figures) -> float:
    """Days of training without a pause until the rated bytes are written; 0 if that is not known."""
    return rated_days(found.drive_tbw, found.drive_bytes_s) if found.drive_bytes_s else 0.0


def allowed(floor_bytes: float, limit_bytes: float, budget: object) -> str:
    """The floor and the limit beside each other. That of budget 0 is chosen (`passes/planner/budget.py`)."""
    said = f"floor {format_bytes(floor_bytes)}, limit {format_bytes(limit_bytes)}"
    if budget != 0 or limit_bytes <= floor_bytes:
        return said
    return f"{said} (the lowest that can be met, or 5% more for a step a tenth shorter)"
