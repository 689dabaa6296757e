"""The step clock: where training steps begin, and how fast they come."""

import itertools
import math
from collections import deque
from collections.abc import Callable

from ssd_fx.compat import _current_graph_task_id

PACE_STEPS = 16
_numbers = itertools.count(1)


class StepClock:
    """Counts the steps of the process, and the bytes that drives got in the last ones.

    A step starts with the first forward behind a backward: a step of many graphs, or of one graph many times, is one.
    A forward within a backward is a checkpoint's, and starts none.

    `steps`: how many have begun. `step`: the number of the last forward's step, which no other step of the process has;
    0 if it was a checkpoint's. `lasted`: seconds and bytes of each of the last steps. Steps in which a graph was
    compiled or first ran are left out.
    """

    def __init__(self) -> None:
        self.lasted: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)
        self.steps = 0
        self.step = 0
        self._start = (0.0, 0)
        self._left_out = 2  # the number of coming starts that end no step to count
        self._number = 0
        self._turned = False

    def turn(self) -> None:
        """Notes that a node of a backward ran."""
        self._turned = True

    def compiled(self) -> None:
        """Leaves out the steps around a compilation, which comes before a forward that may start the next step."""
        self._left_out = 2

    def begin(self, now_s: float, written: Callable[[], int]) -> None:
        """Notes that a forward starts. `written` returns the bytes that drives got so far."""
        within = _current_graph_task_id() >= 0
        new = not self.steps or (self._turned and not within)
        if new:
            self._number, self._turned = next(_numbers), within
            self.steps += 1
            start_s, before = self._start
            self._start = now_s, written()
            if not self._left_out:
                self.lasted.append((now_s - start_s, self._start[1] - before))
            self._left_out = max(0, self._left_out - 1)
        self.step = 0 if within and not new else self._number

    def bytes_s(self) -> float:
        """Bytes that drives get in a second, over these steps; 0 for none."""
        seconds = math.fsum(seconds for seconds, _ in self.lasted)
        return sum(nbytes for _, nbytes in self.lasted) / seconds if seconds else 0.0

    def step_s(self) -> float:
        """The mean time from start to start; 0 for none."""
        return math.fsum(seconds for seconds, _ in self.lasted) / len(self.lasted) if self.lasted else 0.0
