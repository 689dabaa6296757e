"""What was learnt about the slots of the graphs, so that the next step does better without compiling again.

A slot whose tensor was still held by somebody else when it was read back freed nothing by being written: after two
steps in a row it is no longer written. A slot that was waited for twice in a row is read one load earlier.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

_log = logging.getLogger("ssd_fx")

WASTES = 2
STALLS = 2
STALL_S = 1e-3  # shorter waits are the price of a system call, not of a late read


@dataclass(slots=True)
class Habit:
    """One slot. `keep`: do not write it. `stalled`: waits in a row. `plain`: codecs that have nothing for it.
    `error`: the relative error of a lossy encoding, None until it was measured."""

    wasted: int = 0
    stalled: int = 0
    keep: bool = False
    plain: set[str] = field(default_factory=set)
    error: float | None = None


@dataclass(slots=True)
class Habits:
    """The habits of all slots of one store; without `adapt` they are noted and not acted upon."""

    adapt: bool = True
    late: dict[tuple[str, int], None] = field(default_factory=dict)  # reads that should start before the plan says
    _slots: dict[tuple[str, int], Habit] = field(default_factory=dict)

    def of(self, graph: str, slot: int) -> Habit:
        """The habit of a slot, made at its first use."""
        return self._slots.setdefault((graph, slot), Habit())

    def freed(self, graph: str, slot: int, nbytes: int, freed: bool) -> None:
        """A written tensor is wanted again; whether its memory had really gone."""
        habit = self.of(graph, slot)
        habit.wasted = 0 if freed else habit.wasted + 1
        if self.adapt and habit.wasted == WASTES:
            habit.keep = True
            _log.info(
                "slot %d of graph %r (%d B) is no longer written: somebody else (a variable of the model or of its "
                "caller) holds that tensor until the backward, so that writing it freed no memory",
                slot,
                graph,
                nbytes,
            )

    def kept(self, graph: str, slot: int, alone: bool) -> None:
        """A tensor that was kept is wanted again; if nobody else has it now, it is worth writing again."""
        habit = self.of(graph, slot)
        if alone and habit.keep:
            habit.keep, habit.wasted = False, 0

    def waited(self, graph: str, slot: int, stall_s: float) -> None:
        """The graph waited so long for a read of this slot."""
        habit = self.of(graph, slot)
        habit.stalled = habit.stalled + 1 if stall_s > STALL_S else max(0, habit.stalled - 1)
        if self.adapt and habit.stalled >= STALLS:
            self.late[graph, slot] = None
        elif not habit.stalled:
            self.late.pop((graph, slot), None)
