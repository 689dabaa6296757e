"""What one store learns. The store says what happens; writer, reader and prefetcher ask the parts.

    habits      of each slot: whether it is written, encoded, read early
    residency   how many bytes may be resident
    peak        how many bytes a step has outstanding
    runs        in which order backwards come and ask
    where steps begin the one clock of the process says (`step_clock.py`)

All methods run under the lock of `entries`.
"""

from __future__ import annotations

from collections.abc import Callable

from ssd_fx.runtime.adapt.habits import Habits
from ssd_fx.runtime.adapt.peak import Peak
from ssd_fx.runtime.adapt.residency import Residency
from ssd_fx.runtime.adapt.runs import Runs
from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.layout import is_alone
from ssd_fx.runtime.states import Entry
from ssd_fx.runtime.stats import counters


class Learner:
    """`resident_bytes`: that may be resident. `available_bytes`: the memory that this process may take now."""

    def __init__(self, config: RuntimeConfig, resident_bytes: int, available_bytes: Callable[[], int]) -> None:
        most = config.resident_at_most if config.adapt else 0
        self.residency = Residency(resident_bytes, most, available_bytes, waits=config.slowdown)
        self.habits = Habits(config.adapt)
        self.peak = Peak()
        self.runs = Runs(self.habits)

    def stored(self, entry: Entry, resident_bytes: int, stall_s: float) -> None:
        """An entry was stored, `resident_bytes` of all entries are resident, and the store waited for so long."""
        self.runs.stored(entry)
        self.residency.stored(entry.nbytes, resident_bytes)
        self.residency.waited(stall_s)

    def asked(self, entry: Entry) -> None:
        """A backward asks for an entry, which is where it was."""
        entry.asked = True
        self.habits.asked(entry.graph)
        self.judge(entry)

    def waited(self, entry: Entry, stall_s: float, *, for_itself: bool) -> None:
        """The graph waited so long for a read of an entry. `for_itself`: so it should be read earlier."""
        self.residency.waited(stall_s)
        if for_itself:
            self.habits.waited(entry.graph, entry.slot, stall_s)

    def dies(self, entry: Entry) -> None:
        """The handle of an entry is dead, and its I/O has not ended yet. Called again if a signal ended it early."""
        if entry.extent is not None and not entry.asked:
            self.habits.died_unread(entry.graph, entry.slot)
        self.runs.dead(entry)

    def freed(self, entry: Entry, freed: bool) -> None:
        """Whether writing an entry freed its memory is known now, once and for all."""
        if entry.storage:
            entry.storage = None
            counters(entry.graph).count("freed" if freed else "wasted", entry.slot, entry.nbytes)
            self.habits.freed(entry.graph, entry.slot, entry.nbytes, freed)

    def judge(self, entry: Entry) -> None:
        """An entry is loaded, or its I/O has ended because it dies.

        Learns, once per entry, whether writing it freed memory, or would have freed memory if it was not written.
        """
        if entry.held is None and entry.extent and entry.storage:
            self.freed(entry, entry.storage.expired())
        elif entry.held is not None and self.habits.of(entry.graph, entry.slot).keep:
            self.habits.kept(entry.graph, entry.slot, is_alone(entry.held))
