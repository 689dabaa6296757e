"""Choices that are placed and replayed: what each of them costs, the best of all, and how much effort is left.

Effort is counted in operators that are visited, so that a search does not depend on the speed of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner import host_tier
from ssd_fx.passes.planner.compare import EQUAL, better, fits, stalls
from ssd_fx.passes.planner.place import LOAD_MARGIN, Placer
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.schedule import Replay, Schedule

# The effort of a search, in replays. A replay visits all operators and items of the step, so the search takes a
# constant part of the time to compile, which grows with the step too. Small steps cost next to nothing, and get more.
TRIALS, QUICK_TRIALS = 200, 50
LEAST_EFFORT = 120_000
# Margins of placements of the same choices. Each takes its times from the replay of the one before. The last leaves
# most memory free.
MARGINS = (LOAD_MARGIN, LOAD_MARGIN, 1.0)
HOPELESS = 1.1  # later placements are up to 7% faster than the first one

Choices = tuple[Choice, ...]


@dataclass(eq=False)
class Trials:
    """Trials of one step under a limit. `stays`: as in `Limits`.

    `enough_s`: the search ends with a step that takes no more seconds. `waits`: every release waits for its write, so
    that memory is as placed.
    """

    step: Step
    machine: Machine
    limit: float
    share_bytes: float
    prefetch: float
    stays: float = field(default=math.inf, kw_only=True)
    quick: bool = field(default=False, kw_only=True)
    enough_s: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        self.best: Replay | None = None
        self.effort = effort_of(self.step, quick=self.quick) // (2 if self.step.host_budget else 1)
        self.left = self.effort
        self.waits = False
        self.seen: dict[Choices, Replay | None] = {}

    def wait_for_writes(self) -> None:
        """Begin again, with releases that wait."""
        self.waits = True
        self.seen.clear()
        self.left = self.effort

    def solution(self, choices: Choices) -> Replay | None:
        """The choices placed and replayed; None where the budget is not met. The best is remembered."""
        if choices in self.seen:
            self.left -= 1  # `better` is not transitive: without this a circle of ever better ones would not end
            return self.seen[choices]
        found = None
        self.left -= len(choices)  # choices that are not placed take time too
        if self.step.kept_bytes(choices) <= self.share_bytes:
            found = self._filled(choices)
        self.seen[choices] = found
        if found is not None and (self.best is None or better(found, self.best)):
            self.best = found
        return found

    def least_written(self) -> Replay:
        """Of all replays found that are about as fast as the best, the one that writes least."""
        assert self.best is not None
        enough_s = (1 + EQUAL) * self.best.seconds
        near = (found for found in self.seen.values() if found is not None and found.seconds <= enough_s)
        return min((self.best, *near), key=lambda found: (found.written, found.seconds))

    def _filled(self, choices: Choices) -> Replay | None:
        """The best of three fillings of host memory: only the items bound to it, or these and others, in two orders."""
        best = self._placed(choices, host_tier.bound(self.step, choices))
        if not self.step.host_budget or best is None:
            return best
        for hosted in host_tier.fillings(self.step, choices, best.waits):
            found = self._placed(choices, hosted)
            if found is not None and better(found, best):
                best = found
            if not stalls(best):
                break  # other fillings hardly write less
        return best

    def exchange_hosted(self) -> None:
        """Give the best choices other items in host memory, one by one, as long as each makes the step better."""
        if not self.step.host_budget:
            return
        self.left = self.effort // 2
        better_one = self.best
        while better_one is not None:
            now = self.best = better_one
            tries = (self._placed(now.choices, h) for h in host_tier.exchanges(now) if self.left > 0)
            better_one = next((found for found in tries if found is not None and better(found, now)), None)

    def _placed(self, choices: Sequence[Choice], hosted: host_tier.Hosted) -> Replay | None:
        """The best of some placements: one as if nothing stalled, then some with the times of the one before."""
        step, best, played = self.step, None, None
        placer = Placer(step, choices, self.machine, self.limit, self.prefetch, hosted, self.stays)
        for margin in MARGINS:
            schedule = placer.place(played, margin)
            if schedule is None:
                break
            if self.waits:
                schedule = schedule.edited(lambda _, trip: trip.moved(block=True), step.items)
            played = self._played(choices, schedule)
            if played.idle_lane:  # the order was made for other times; storing at once leaves no lane idle
                schedule = schedule.edited(lambda i, trip: trip.moved(store=step.produced[i]), step.items)
                played = self._played(choices, schedule)
            if fits(played, self.limit, self.stays) and (best is None or better(played, best)):
                best = played
            if not stalls(played) or self._is_hopeless(best):
                break
        return best

    def _is_hopeless(self, found: Replay | None) -> bool:
        """Whether other placements of the same choices cannot come near to the best plan."""
        return found is not None and self.best is not None and found.seconds > HOPELESS * self.best.seconds

    def _played(self, choices: Sequence[Choice], schedule: Schedule) -> Replay:
        self.left -= size(self.step)
        return replay(self.step, choices, schedule, self.machine)


def size(step: Step) -> int:
    """The effort of one replay of the step, counted in operators."""
    return len(step.seconds) + 4 * len(step.items)


def effort_of(step: Step, quick: bool = False) -> int:
    return max(LEAST_EFFORT, (QUICK_TRIALS if quick else TRIALS) * size(step))
