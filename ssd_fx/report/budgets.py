"""What a training step needs under each of several budgets, as values and as the table that people decide by."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ssd_fx.report.columns import aligned
from ssd_fx.runtime.wear import DAY_S, format_days, rated_days
from ssd_fx.sizes import format_bytes, format_seconds

_COARSE = 0.01  # by a smaller share predicted times cannot be told apart


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of a step under one budget.

    Attributes:
        budget: as in the options: a share (float), bytes (int) or "auto".
        peak_bytes: live tensors above the level before the step: activations, transients and gradients.
        memory_bytes: all tensors at that peak: those, the inputs of the graph with its parameters, the optimizer's
            state.
        step_s: seconds of forward and backward, without the optimizer.
        compute_s: seconds of that without transfers and recomputing.
        stall_s: seconds of that in which the step waits for the drive.
        written_bytes: to the drives, per step. Of compression it counts what does not depend on the values.
    """

    budget: int | float | str
    peak_bytes: int
    memory_bytes: int
    step_s: float
    compute_s: float
    stall_s: float
    written_bytes: int

    @property
    def name(self) -> str:
        """The budget as people write it."""
        if isinstance(self.budget, float):
            return str(round(self.budget, 3))
        return format_bytes(self.budget) if isinstance(self.budget, int) and self.budget else str(self.budget)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted of a training step under several budgets; printed, it is a table.

    Attributes:
        graph: the name that the compiled graph would have under the options, by PyTorch's own partition.
        batch: the first size of the first input; None if there is none.
        saved_bytes: what the forward saves, of PyTorch's own partition.
        input_bytes: parameters, buffers and inputs of the graph.
        state_bytes: of the optimizer.
        predictions: one for each budget.
        memory: the bytes that all tensors together may have, if asked for.
        drive_tbw: this rank's share of what the drives are rated for, in 10^12 bytes; 0 if that is not known.
        rates: where the rates behind the times come from: "measured", "typical", "typical compute", "given".
    """

    graph: str
    batch: int | None
    saved_bytes: int
    input_bytes: int
    state_bytes: int
    predictions: tuple[Prediction, ...]
    memory: int | None = None
    drive_tbw: float = 0.0
    rates: str = "typical"

    def fits(self, row: Prediction) -> bool:
        """Whether all tensors fit in `memory`; without one everything does."""
        return self.memory is None or row.memory_bytes <= self.memory

    @property
    def fastest(self) -> Prediction | None:
        """Of the budgets that fit the fastest one; of those within 1% of it that which writes least."""
        fitting = list(filter(self.fits, self.predictions))
        least_s = min((row.step_s for row in fitting), default=0.0)
        equal = [row for row in fitting if row.step_s <= (1 + _COARSE) * least_s]
        return min(equal, key=lambda row: (row.written_bytes, row.step_s), default=None)

    def life_s(self, row: Prediction) -> float | None:
        """Seconds of training without a pause until the drive has written what it is rated for.

        None if the rating is not known, or nothing is written.
        """
        if not self.drive_tbw or not row.written_bytes:
            return None
        return DAY_S * rated_days(self.drive_tbw, row.written_bytes / row.step_s)

    def details(self) -> dict[str, Any]:
        """The table as a dictionary of plain values, for JSON."""
        rows = [asdict(o) | {"fits": self.fits(o), "drive_life_s": self.life_s(o)} for o in self.predictions]
        fastest = None if self.memory is None or self.fastest is None else self.fastest.budget
        return asdict(self) | {"predictions": rows, "fastest": fastest}

    def __str__(self) -> str:
        batch = "" if self.batch is None else f"batch {self.batch}, "
        head = (
            f"graph {self.graph}: {batch}{format_bytes(self.saved_bytes)} saved; "
            f"parameters, buffers and inputs {format_bytes(self.input_bytes)}, "
            f"optimizer state {format_bytes(self.state_bytes)}"
        )
        rates = f"times by {self.rates} rates"
        return "\n".join(
            [head, rates, *aligned([_HEAD, *map(self._cells, self.predictions)], _FIGURES, heads=1), *self._verdict()]
        )

    def _cells(self, row: Prediction) -> tuple[str, ...]:
        life = self.life_s(row)
        fits = "" if self.memory is None else "fits" if self.fits(row) else "too large"
        if fits and row == self.fastest:
            fits = "fastest that fits"
        return (
            row.name,
            format_bytes(row.peak_bytes),
            format_bytes(row.memory_bytes),
            format_seconds(row.step_s),
            format_seconds(row.stall_s),
            format_bytes(row.written_bytes),
            "" if not self.drive_tbw else "unused" if life is None else format_days(life / DAY_S),
            fits,
        )

    def _verdict(self) -> list[str]:
        if self.memory is None or self.fastest is not None:
            return []
        least = min(o.memory_bytes for o in self.predictions)
        return [f"none fits {format_bytes(self.memory)}: the least is {format_bytes(least)}"]


_HEAD = ("budget", "peak", "all tensors", "step", "waits", "written", "drive life", "")
_FIGURES = range(1, len(_HEAD) - 1)
