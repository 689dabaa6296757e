"""What was learned about each slot.

* A tensor that somebody else still holds when it is read back was written in vain. After two such steps in a row its
  slot is no longer written.
* A slot that the graph waited for twice in a row is read up to two loads earlier.
* A graph whose backward does not come writes in vain. After some such forwards in a row the log says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ssd_fx.runtime import plans
from ssd_fx.runtime.layout import is_alone
from ssd_fx.runtime.states import Entry
from ssd_fx.runtime.stats import CHECKPOINT, counters

_log = logging.getLogger("ssd_fx")

WASTES = 2  # steps in a row
STALLS = 2  # waits in a row
PLAIN = 64  # stores until a codec that could not make a tensor smaller is tried again
UNREAD = 4  # forwards in a row without a backward: more than a look at one batch
STALL_S = 1e-3  # a shorter wait is the price of a system call, not of a late read


@dataclass(slots=True)
class Habit:
    """What was learnt about one slot."""

    wasted: int = 0  # steps in a row in which it was written in vain
    stalled: int = 0  # waits in a row that were stalls
    keep: bool = False  # do not write it
    plain: dict[str, int] = field(default_factory=dict)  # by codec that did not shrink it: stores left without it
    error: float | None = None  # the relative error of its lossy encoding, None until it was measured

    def stored(self) -> None:
        """Counts a store of the slot."""
        if self.plain:
            self.plain = {codec: left - 1 for codec, left in self.plain.items() if left}


@dataclass(slots=True)
class Habits:
    """The habits of all slots of one store. Without `adapt` they are noted, and change nothing."""

    adapt: bool
    late: dict[tuple[str, int], None] = field(default_factory=dict)  # (graph, slot): to be read earlier than planned
    _slots: dict[tuple[str, int], Habit] = field(default_factory=dict)
    _unread: dict[str, tuple[int, int]] = field(default_factory=dict)  # by graph: a slot, its unread deaths in a row
    _told: set[str] = field(default_factory=set)  # graphs without a backward that the log has named

    def of(self, graph: str, slot: int) -> Habit:
        """The habit of a slot, made at its first use."""
        found = self._slots.get((graph, slot))
        return found if found is not None else self._slots.setdefault((graph, slot), Habit())

    def asked(self, entry: Entry) -> None:
        """Records that a backward asks for an entry. Called before the load changes where its bytes are."""
        entry.asked = True
        self._unread.pop(entry.graph, None)
        self.judge(entry)

    def dies(self, entry: Entry) -> None:
        """Records that an entry dies. Called before its I/O is ended.

        For each graph it counts the entries of one slot that went to the engine and that no backward loaded. A forward
        stores a slot once, so these are forwards without a backward.
        """
        graph, slot = entry.graph, entry.slot
        counted, deaths = self._unread.get(graph, (slot, 0))
        if entry.asked or entry.extent is None or slot != counted:
            return
        self._unread[graph] = slot, deaths + 1
        if deaths + 1 >= UNREAD and graph not in self._told:
            self._told.add(graph)
            if graph.startswith(CHECKPOINT):
                _log.warning(
                    "call %s of ssd_fx.checkpoint in a step has run %d times in a row, and no backward computed it "
                    "again: what it stored was written and never read; evaluate under torch.no_grad(), and call what "
                    "the loss does not depend on without a checkpoint",
                    graph.removeprefix(CHECKPOINT).strip(),
                    UNREAD,
                )
                return
            _log.warning(
                "graph %r has run %d forwards in a row whose backward never came: what they stored was written and "
                "never read; evaluate under torch.no_grad(), which stores nothing",
                graph,
                UNREAD,
            )

    def judge(self, entry: Entry) -> None:
        """Learns whether writing an entry freed its memory, or would have, if it was not written.

        Called when it is loaded, and when its I/O has ended because it dies. A slot that is not written is written
        again once nobody else holds its tensor.
        """
        if entry.held is None:
            if entry.extent and entry.storage:
                self.freed(entry, entry.storage.expired())
            return
        habit = self.of(entry.graph, entry.slot)
        if habit.keep and is_alone(entry.held):
            habit.keep = False
            habit.wasted = 0

    def freed(self, entry: Entry, freed: bool) -> None:
        """Records, once for each entry, whether writing it freed its memory."""
        if entry.storage is None:
            return
        entry.storage = None
        graph, slot, nbytes = entry.graph, entry.slot, entry.nbytes
        counters(graph).count("freed" if freed else "wasted", slot, nbytes)
        habit = self.of(graph, slot)
        habit.wasted = 0 if freed else habit.wasted + 1
        if self.adapt and habit.wasted == WASTES:
            habit.keep = True
            _log.info(
                "slot %d of graph %r (%s) is no longer written: somebody else (a variable of the model or of its "
                "caller) holds that tensor until the backward, so that writing it freed no memory",
                slot,
                graph,
                ", ".join(filter(None, (plans.where(graph, slot), f"{nbytes} B"))),
            )

    def waited(self, graph: str, slot: int, stall_s: float) -> None:
        """Records how long the graph waited for a read of this slot."""
        habit = self.of(graph, slot)
        habit.stalled = habit.stalled + 1 if stall_s > STALL_S else max(0, habit.stalled - 1)
        if self.adapt and habit.stalled >= STALLS:
            self.late[graph, slot] = None
        elif not habit.stalled:
            self.late.pop((graph, slot), None)
