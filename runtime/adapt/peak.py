"""How many bytes a step has outstanding at its peak: stored, and not asked for yet."""

from ssd_fx.runtime.states import Entry


class Peak:
    """Forecasts the peak of a step: it is that of the step before.

    Here a step ends when the bytes outstanding have fallen to half of their peak or less and rise again: several
    micro-batches may have one peak. They need not fall to 0, because a caller may keep a graph for ever.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.nbytes = 0
        self._entries: dict[Entry, None] = {}  # no set: a call may be interrupted before the sum follows
        self._highest_bytes = 0  # of this step
        self._falling = False

    def add(self, entry: Entry) -> int:
        """The bytes that are expected to be stored from this entry on until the peak, the entry included."""
        before = self.nbytes
        if self._falling and 2 * before <= self._highest_bytes:  # a new step
            self.peak_bytes = self._highest_bytes
            self._highest_bytes = before
        self._falling = False
        self._entries[entry] = None
        self.nbytes += entry.nbytes
        self._highest_bytes = max(self._highest_bytes, self.nbytes)
        return self.peak_bytes - before

    def remove(self, entry: Entry) -> None:
        """The entry is outstanding no longer; an entry that was never added, or removed before, is ignored."""
        if entry in self._entries:
            del self._entries[entry]
            self.nbytes -= entry.nbytes
            self._falling = True
