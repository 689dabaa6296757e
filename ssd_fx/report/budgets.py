"""What a training step needs under each of several budgets, as values and as the table that people decide by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ssd_fx.report.figures import allowed
from ssd_fx.report.rows import aligned
from ssd_fx.runtime.wear import DAY_S, format_days, rated_days
from ssd_fx.sizes import format_bytes, format_seconds

_COARSE = 0.01  # by a smaller share predicted times cannot be told apart
_WORTH = 0.05  # the share of peak or time that a row which writes must save over one that does not
_AUTO = "auto"  # the budget that the options have by default
MEMORY = "memory"  # the row of the option of that name


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of a step under one budget, or of a rival.

    Attributes:
        budget: as in the options: a share (float), bytes (int) or "auto"; `MEMORY` for the option of that name. Of a
            rival, its name.
        peak_bytes: live tensors above the level before the step: activations, transients and gradients.
        memory_bytes: all tensors at that peak: those, the inputs of the graph with its parameters, the optimizer's
            state.
        step_s: seconds of forward and backward, without the optimizer.
        compute_s: seconds of that without transfers and recomputing.
        stall_s: seconds of that in which the step waits for the drive.
        written_bytes: to the drives, per step. Compression counts where its result does not depend on the values.
        floor_bytes: the peak with infinitely fast transfers. limit_bytes: the peak that the budget allows.
    """

    budget: int | float | str
    peak_bytes: int
    memory_bytes: int
    step_s: float
    compute_s: float
    stall_s: float
    written_bytes: int
    floor_bytes: int = 0
    limit_bytes: int = 0

    @property
    def name(self) -> str:
        """The budget as people write it."""
        if isinstance(self.budget, float):
            return str(round(self.budget, 3))
        return format_bytes(self.budget) if isinstance(self.budget, int) and self.budget else str(self.budget)

    def dominates(self, other: Prediction) -> bool:
        """Whether `other` is no lower at the peak, no faster and writes no less, and is worse in one of them."""
        no_less = self.peak_bytes <= other.peak_bytes and self.written_bytes <= other.written_bytes
        lower = self.peak_bytes < other.peak_bytes or self.written_bytes < other.written_bytes
        slower = (1 + _COARSE) * self.step_s < other.step_s
        return no_less and self.step_s <= (1 + _COARSE) * other.step_s and (lower or slower)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is predicted of a training step under several budgets; printed, it is a table.

    Attributes:
        graph: the name that the compiled graph would have under the options, by PyTorch's own partition.
        batch: the first size of the first input; None if there is none.
        saved_bytes: what the forward saves, of PyTorch's own partition.
        input_bytes: parameters, buffers and inputs of the graph.
        state_bytes: of the optimizer. state_guessed: there is none yet, and one such as Adam is assumed.
        predictions: one for each budget.
        memory: the bytes that all tensors together may have, if asked for.
        other_bytes: of the script's other tensors, such as its data.
        largest: the largest tensor at the lowest peak, with its module and line.
        drive_tbw: this rank's share of what the drives are rated for, in 10^12 bytes; 0 if that is not known.
        rates: where the rates behind the times come from: "measured", "typical", "typical compute", "given".
        rivals: what needs no drive, if asked for: a checkpoint per layer, shares of PyTorch's
            `activation_memory_budget`. They write nothing.
        note: about the rivals, or why one is missing; why the options' limit of memory is none here; how the step
            ended.
    """

    graph: str
    batch: int | None
    saved_bytes: int
    input_bytes: int
    state_bytes: int
    predictions: tuple[Prediction, ...]
    memory: int | None = None
    other_bytes: int = 0
    state_guessed: bool = False
    drive_tbw: float = 0.0
    rates: str = "typical"
    rivals: tuple[Prediction, ...] = ()
    note: str = ""
    largest: str = ""

    @property
    def rows(self) -> tuple[Prediction, ...]:
        """The predictions and the rivals."""
        return self.predictions + self.rivals

    def fits(self, row: Prediction) -> bool:
        """Whether all tensors fit in `memory`; without one everything does."""
        return self.memory is None or row.memory_bytes <= self.memory

    @property
    def fastest(self) -> Prediction | None:
        """The fastest of the budgets that fit; of those within 1% of its time, the one that writes least."""
        return _fastest(filter(self.fits, self.predictions))

    def better(self, row: Prediction) -> Prediction | None:
        """A row that is no worse than `row` in peak, time and bytes written, and better in one of them."""
        return _fastest(other for other in self.rows if other.dominates(row))

    @property
    def best(self) -> Prediction | None:
        """The row to take; None if none fits.

        With `memory` it is the fastest row that fits; without, "auto", or else the budget with the lowest peak. If that
        row writes, a rival takes its place that is hardly slower and fits (without `memory`: is hardly larger). In any
        case, a row that is better than the one found takes its place.
        """
        first = self._fastest_that_fits
        if self.memory is None:
            lowest = min(self.predictions, key=lambda row: (row.budget != _AUTO, row.peak_bytes))
            first = self._best_from(lowest)
        if first is None:
            return None
        if not first.written_bytes:
            return first
        peak = (1 + _WORTH) * first.peak_bytes
        near = [row for row in self.rivals if row.step_s <= (1 + _WORTH) * first.step_s]
        fitting = [row for row in near if (row.peak_bytes <= peak if self.memory is None else self.fits(row))]
        return self._best_from(_fastest(fitting) or first)

    @property
    def _fastest_that_fits(self) -> Prediction | None:
        """The fastest of all rows that fit, or a row that is better than it; None if none fits."""
        found = _fastest(filter(self.fits, self.rows))
        return found and self._best_from(found)

    def _best_from(self, row: Prediction) -> Prediction:
        """`row`, or a better one, which needs no more memory. The search ends, because peak and bytes only fall."""
        while better := self.better(row):
            row = better
        return row

    def life_s(self, row: Prediction) -> float | None:
        """Seconds of training without a pause until the drive has written what it is rated for.

        None if the rating is not known, or nothing is written.
        """
        if not self.drive_tbw or not row.written_bytes:
            return None
        return DAY_S * rated_days(self.drive_tbw, row.written_bytes / row.step_s)

    def details(self) -> dict[str, Any]:
        """The table as a dictionary of plain values, for JSON."""
        rows, others = ([self._detail(row) for row in each] for each in (self.predictions, self.rivals))
        fastest = None if self.memory is None or self.fastest is None else self.fastest.budget
        best = None if self.best is None else self.best.budget
        found = {"predictions": rows, "rivals": others, "fastest": fastest, "best": best}
        return asdict(self) | found | {"verdict": self.verdict}

    def _detail(self, row: Prediction) -> dict[str, Any]:
        better = self.better(row)
        more = {"fits": self.fits(row), "drive_life_s": self.life_s(row), "worse_than": better and better.budget}
        return asdict(row) | more

    def __str__(self) -> str:
        batch = "" if self.batch is None else f"batch {self.batch}, "
        head = (
            f"graph {self.graph}: {batch}{format_bytes(self.saved_bytes)} saved; "
            f"parameters, buffers and inputs {format_bytes(self.input_bytes)}, "
            f"optimizer state {format_bytes(self.state_bytes)}"
        )
        rates = f"times by {self.rates} rates"
        if self.state_guessed:
            rates += "; there is no optimizer yet, so one such as Adam counts"
        if self.other_bytes:
            rates += f"; other tensors of the script {format_bytes(self.other_bytes)}"
        table = aligned([_HEAD, *map(self._cells, self.rows)], _FIGURES, heads=1)
        return "\n".join([head, rates, *table, *self._lowest(), *filter(None, [self.note]), self.verdict])

    def _lowest(self) -> list[str]:
        """A line about budget 0: the limit that it has come to, beside the floor."""
        rows = [row for row in self.predictions if row.name == "0"]
        return [f"budget 0: {allowed(row.floor_bytes, row.limit_bytes, 0)}" for row in rows[:1] if row.limit_bytes]

    def _cells(self, row: Prediction) -> tuple[str, ...]:
        life, better = self.life_s(row), self.better(row)
        fits = "" if self.memory is None else "fits" if self.fits(row) else "too large"
        if fits and row is self._fastest_that_fits:
            fits = "fastest that fits"
        return (
            row.name,
            format_bytes(row.peak_bytes),
            format_bytes(row.memory_bytes),
            format_seconds(row.step_s),
            format_seconds(row.stall_s),
            format_bytes(row.written_bytes),
            "" if not self.drive_tbw else "unused" if life is None else format_days(life / DAY_S),
            ", ".join(filter(None, [fits, f"worse than {better.name}" if better else ""])),
        )

    @property
    def verdict(self) -> str:
        """What to take, in a line."""
        best = self.best
        if best is None:
            return self._missing()
        other = self._compared(best)
        change = f"{_change(best, other)} than with {self._called(other)}; " if other is not None else ""
        written = f"it writes {format_bytes(best.written_bytes)} a step" if best.written_bytes else "it writes nothing"
        return f"take {self._called(best)}: {change}{written}"

    def _missing(self) -> str:
        """By how much even the least row does not fit, which part of it we do not move, and what would help."""
        least, limit = min(row.memory_bytes for row in self.rows), self.memory or 0
        said = (
            f"none fits {format_bytes(limit)}: the least is {format_bytes(least)}, {format_bytes(least - limit)} more; "
        )
        before = self.input_bytes + self.state_bytes + self.other_bytes
        whose = "parameters, buffers, inputs" + (", other tensors" if self.other_bytes else "")
        said += f"{whose} and the optimizer's state are {format_bytes(before)} of it"
        largest = f"; the largest tensor at its peak is {self.largest}" if self.largest else ""
        return (
            f"{said}{largest}\na smaller batch, a loss in chunks, sharding or an optimizer with less state would help"
        )

    def _compared(self, best: Prediction) -> Prediction | None:
        """The row to compare `best` with: the first rival if `best` is a budget, else the budget to take."""
        if best not in self.rivals:
            return next(iter(self.rivals), None)
        return min(self.predictions, key=lambda row: (not self.fits(row), row.budget != _AUTO, row.peak_bytes))

    def _called(self, row: Prediction) -> str:
        if row in self.rivals:
            return row.name if row.name.startswith("PyTorch") else f"a {row.name}"
        return f"memory={format_bytes(self.memory or 0)}" if row.budget == MEMORY else f"budget {row.name}"


def _fastest(rows: Iterable[Prediction]) -> Prediction | None:
    """The fastest row; of those within 1% of its time, the one that writes least, and then has the lowest peak."""
    found = list(rows)
    least_s = min((row.step_s for row in found), default=0.0)
    equal = [row for row in found if row.step_s <= (1 + _COARSE) * least_s]
    return min(equal, key=lambda row: (row.written_bytes, row.peak_bytes, row.step_s), default=None)


def _change(row: Prediction, other: Prediction) -> str:
    """`peak 41% lower, step 8% shorter`."""
    peak = _share(row.peak_bytes / other.peak_bytes if other.peak_bytes else 1.0, "lower", "higher")
    step = _share(row.step_s / other.step_s if other.step_s else 1.0, "shorter", "longer")
    return f"peak {peak}, step {step}"


def _share(ratio: float, less: str, more: str) -> str:
    percent = round(100 * abs(ratio - 1))
    return f"{percent}% {less if ratio < 1 else more}" if percent else f"0% {more}"


_HEAD = ("budget", "peak", "all tensors", "step", "waits", "written", "drive life", "")
_FIGURES = range(1, len(_HEAD) - 1)
