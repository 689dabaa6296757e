"""The step clock: where training steps begin, and how fast they come."""

import itertools
from collections import deque
from collections.abc import Callable

from ssd_fx.compat import _current_graph_task_id

PACE_STEPS = 16
_numbers = itertools.count(1)


class StepClock:
    """Counts the steps of the process, and what drives got by the time they began.

    A step starts with the first forward behind a backward: a step of many graphs, or of one graph many times, is one.
    A forward within a backward is a checkpoint's, and starts none.

    `steps`: that have begun. `step`: the number of the last forward's step, which no other step of the process has; 0
    if it was a checkpoint's. `starts`: seconds and bytes; the first step, which compiles, is left out.
    """

    def __init__(self) -> None:
        self.starts: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS + 1)
        self.steps = 0
        self.step = 0
        self._number = 0
        self._turned = False

    def turn(self) -> None:
        """A node of a backward ran."""
        self._turned = True

    def begin(self, now_s: float, written: Callable[[], int]) -> None:
        """A forward starts. `written`: says how many bytes drives got so far."""
        within = _current_graph_task_id() >= 0
        new = not self.steps or (self._turned and not within)
        if new:
            self._number, self._turned = next(_numbers), within
            self.steps += 1
            if self.steps > 1:
                self.starts.append((now_s, written()))
        self.step = 0 if within and not new else self._number

    def bytes_s(self) -> float:
        """Bytes that drives get in a second, over the steps between the starts; 0 for fewer than two."""
        if len(self.starts) < 2:
            return 0.0
        (first_s, before), (last_s, after) = self.starts[0], self.starts[-1]
        return (after - before) / (last_s - first_s)

    def step_s(self) -> float:
        """The mean time from start to start; 0 for fewer than two."""
        return (self.starts[-1][0] - self.starts[0][0]) / (len(self.starts) - 1) if len(self.starts) > 1 else 0.0
