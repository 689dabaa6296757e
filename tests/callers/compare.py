"""Two runs of one program, line by line and bit by bit; and the differences that are none, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.bitwise import same_bits
from tests.callers.caller import Outcome

IN_PLACE = "modified by an inplace operation"
STAND_IN = "RuntimeError: a backward was given an ssd_fx handle"
REFUSALS = (IN_PLACE, "backward through the graph a second time", "donated buffers")
STOCK_IS_WRONG = "stock is not near eager mode, ours is"
TWO_FAULTS = "a line with two faults: stock names one, ours the other"
ANOTHER_GRAPH = "a checkpoint ran another compiled graph again, and ours says so"
HOOKED = "PyTorch checks no version behind saved_tensors_hooks, ours does"
EXCUSES = (STOCK_IS_WRONG, TWO_FAULTS, ANOTHER_GRAPH, HOOKED)


@dataclass(frozen=True)
class Difference:
    """What ends otherwise, where values come from `source`; line -1: nothing that a line did."""

    source: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.source}: line {self.line}: {self.what}"


@dataclass
class Verdict:
    """How the lines end under stock, what differs from that, and what is no difference by reason."""

    stock: list[Outcome]
    differences: list[Difference] = field(default_factory=list)
    excused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Comparison:
    """Of one source with stock; `eager` runs the program where the two differ, for stock may be wrong."""

    source: str
    eager: Callable[[], Sequence[Outcome]]
    precision: str

    def add_to(self, verdict: Verdict, ours: Sequence[Outcome]) -> None:
        """Up to the first line behind which one of the two computes with other values for a good reason."""
        in_doubt = False
        for stock, outcome in zip(verdict.stock, ours, strict=True):
            reasons = set()
            # Behind hooks the two may have found different changes, with different gradients accumulated until then.
            in_doubt |= stock.hooked and IN_PLACE in stock.kind and IN_PLACE in outcome.kind
            for name, what in _differences(stock, outcome):
                reason = HOOKED if in_doubt else self._excuse(stock, outcome, name)
                if reason:
                    reasons.add(reason)
                else:
                    verdict.differences.append(Difference(self.source, stock.line, what))
            verdict.excused.update(reasons)
            if reasons - {TWO_FAULTS}:
                return

    def _excuse(self, stock: Outcome, ours: Outcome, name: str) -> str:
        """Why a difference of the value `name`, or of the kind of error, is none; or empty."""
        right = self.eager()[stock.line]
        if name and _is_near(right, ours, name, self.precision) and not _is_near(right, stock, name, self.precision):
            return STOCK_IS_WRONG
        if not name and right.kind == ours.kind:
            return STOCK_IS_WRONG
        if IN_PLACE in ours.kind and IN_PLACE not in stock.kind and stock.hooked:
            return HOOKED  # also where stock finds another fault later, with gradients accumulated until then
        if all(any(r in o.kind for r in REFUSALS) for o in (stock, ours)):
            return TWO_FAULTS
        if STAND_IN in ours.kind:
            return ANOTHER_GRAPH
        return ""


def _differences(stock: Outcome, ours: Outcome) -> list[tuple[str, str]]:
    """The names of values that differ, or an empty one for the kind of error; and what to say of it."""
    if stock.kind != ours.kind:
        return [("", f"{ours.kind or 'no error'!r} instead of {stock.kind or 'no error'!r}")]
    names = sorted(stock.values.keys() | ours.values.keys())
    pairs = [(name, stock.values.get(name), ours.values.get(name)) for name in names]
    return [(n, f"{n} is {_short(b)} instead of {_short(a)}") for n, a, b in pairs if not _is_same(a, b)]


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit by bit; every NaN equals every other."""
    return a is b or (a is not None and b is not None and same_bits(a, b))


def _is_near(a: Outcome, b: Outcome, name: str, precision: str) -> bool:
    """No gradient is one of zeros."""
    if a.kind != b.kind:
        return False
    tolerance = 1e-4 if precision == "float32" else 5e-2
    x, y = (torch.zeros(()) if (t := o.values.get(name)) is None else t for o in (a, b))
    try:
        torch.testing.assert_close(*torch.broadcast_tensors(x, y), rtol=tolerance, atol=tolerance, equal_nan=True)
    except (AssertionError, RuntimeError):
        return False
    return True


def _short(t: Tensor | None) -> str:
    if t is None:
        return "None"
    numbers = [f"{x:.6g}" for x in t.flatten().tolist()]
    return f"{list(t.shape)} [{', '.join(numbers if len(numbers) <= 6 else [*numbers[:5], '...'])}]"
