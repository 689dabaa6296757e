"""Pauses between attempts to do again what has failed."""

import math
import time


class Pause:
    """How long nothing is tried after a failure: 30 s, twice as long after each further one, at most an hour.

    After an hour without a failure it is 30 s again. Failures during a pause do not count: they began before it.
    """

    FIRST_S, LONGEST_S = 30.0, 3600.0

    def __init__(self) -> None:
        self._next_s = self.FIRST_S
        self._until = -math.inf

    def __bool__(self) -> bool:
        return time.monotonic() < self._until

    def begin(self, *, for_good: bool = False) -> None:
        now = time.monotonic()
        if for_good:
            self._until = math.inf
        if now < self._until:
            return
        if now > self._until + self.LONGEST_S:
            self._next_s = self.FIRST_S
        self._until = now + self._next_s
        self._next_s = min(2 * self._next_s, self.LONGEST_S)
