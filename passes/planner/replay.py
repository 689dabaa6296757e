"""One training step as numbers: the time and the memory that it takes with one choice for every alias group.

    compute   f0 f1 f2 ... | b0 b1 b2 ...        one lane; operators in the order of the graphs
    writes       [A][B]  [C]                     one lane per tier, first in first out
    reads                    [C] [B][A]          one lane per tier, first in first out

Everything is counted in operators of one step, the backward's behind the forward's. An offloaded item is gone from its
release on if that blocks, which means that the release waits for the write. Otherwise the item is gone once it is
released and its write is predicted to have ended. Time is that of the operators, of blocking releases, and of waits for
loads. There are no tensors and no graphs here, so a thousand groups take milliseconds.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ssd_fx.options import TIERS, Tier
from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.schedule import LOAD, RELEASE, STORE, Event, Interval, Replay, Schedule


def replay(step: Step, choices: Sequence[Choice], schedule: Schedule, machine: Machine) -> Replay:
    """Play one step. `schedule` has the events of every item that is offloaded."""
    firsts = first_uses(step, choices)
    play = _Play(step, machine, _costs(step, choices, schedule, machine, firsts))
    for event in schedule.events:
        kind, at = event.kind, event.at
        if kind is STORE:
            play.compute(at + 1)
            play.store(event)
        elif kind is RELEASE:
            play.compute(at + 1)
            play.release(event)
        elif kind is LOAD:
            play.compute(at)
            play.load(event)
        else:
            play.compute(at)
            play.wait(event)
    play.compute(len(step.seconds))
    starts = (*play.starts, play.now)
    return Replay(
        step=step,
        choices=choices,
        schedule=schedule,
        seconds=max(play.now, host_s(step, choices, len(play.writes), machine)),
        write_stall_s=play.write_stall_s,
        read_stall_s=play.read_stall_s,
        memory=_memory(step, choices, schedule, starts, play.writes, firsts),
        starts=starts,
        ends=tuple(play.ends),
        host=_host_memory(step, schedule),
        writes=play.writes,
        reads=play.reads,
        stalls=play.stalls,
        forwarded=play.forwarded,
        idle_lane=not play.late.isdisjoint(play.forwarded),
    )


def host_s(step: Step, choices: Sequence[Choice], transfers: int, machine: Machine) -> float:
    """The host's seconds for a step, if the device runs behind the host; else 0."""
    if not (machine.launch_s or machine.host_node_s):
        return 0.0
    recomputed = [i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    return machine.host_s(step.launched(recomputed), transfers)


def _costs(
    step: Step, choices: Sequence[Choice], schedule: Schedule, machine: Machine, firsts: Sequence[int]
) -> list[float]:
    """Seconds of every operator: its own, those of recomputing before it, and those of our nodes there."""
    extra: dict[int, float] = {}
    for first, seconds in again(step, choices, firsts):
        extra[first] = extra.get(first, 0.0) + seconds
    own = step.once(own_s, machine)
    for i, trip in schedule.items():
        for at in (trip.store.at, trip.wait.at):
            extra[at] = extra.get(at, 0.0) + own[trip.store.tier][i]
    costs = list(step.seconds)
    for at, seconds in extra.items():
        costs[at] += seconds
    return costs


def own_s(step: Step, machine: Machine) -> dict[Tier, list[float]]:
    """Seconds of the compute lane at either end of a transfer, for every item, by tier."""
    return {tier: [machine.own_s(nbytes, tier) for nbytes in step.moved] for tier in TIERS}


def _lane_s(step: Step, machine: Machine) -> dict[Tier, tuple[list[float], list[float], float]]:
    """Seconds of the write lane and of the read lane for every item, and the latency, by tier."""
    rates = {tier: machine.lanes(tier) for tier in TIERS}
    return {
        tier: ([n / rate.write_bw for n in step.moved], [n / rate.read_bw for n in step.moved], rate.latency_s)
        for tier, rate in rates.items()
    }


@dataclass(slots=True)
class _Lane:
    """The writes or the reads of one tier, first in first out. `seconds`: those of each item's transfer."""

    seconds: Sequence[float]
    latency: float
    free: float = 0.0  # the end of the last transfer, without its latency
    idle_until: float = 0.0  # the start of the last transfer that found the lane idle

    def put(self, i: int, now: float) -> Interval:
        """Return when the transfer of item `i`, which is asked for now, begins and has ended."""
        if self.free < now:
            self.free = self.idle_until = now
        self.free += self.seconds[i]
        end = self.free + self.latency
        return end - self.latency - self.seconds[i], end


class _Play:
    """The step so far: `now`, the operators that have run, and what became of every item."""

    def __init__(self, step: Step, machine: Machine, costs: list[float]) -> None:
        self.produced, self.costs = step.produced, costs
        seconds = step.once(_lane_s, machine)
        self.write_lanes = {tier: _Lane(write, latency) for tier, (write, _, latency) in seconds.items()}
        self.read_lanes = {tier: _Lane(read, latency) for tier, (_, read, latency) in seconds.items()}
        self.now = self.write_stall_s = self.read_stall_s = 0.0
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.writes: dict[int, Interval] = {}
        self.reads: dict[int, Interval] = {}
        self.stalls: dict[Event, float] = {}
        self.blocking: set[int] = set()  # the items whose releases wait for their writes
        self.forwarded: set[int] = set()
        self.late: set[int] = set()  # the items that an idle lane could have written before their stores

    def compute(self, until: int) -> None:
        """Run the operators before `until` that have not run."""
        done = len(self.ends)
        if done == until:
            return
        times = list(itertools.accumulate(self.costs[done:until], initial=self.now))
        self.now = times[-1]
        self.starts += times[:-1]
        self.ends += times[1:]

    def store(self, event: Event) -> None:
        lane = self.write_lanes[event.tier]
        self.writes[event.slot] = lane.put(event.slot, self.now)
        if self.ends[self.produced[event.slot]] < lane.idle_until:
            self.late.add(event.slot)

    def release(self, event: Event) -> None:
        if event.flag:
            self.blocking.add(event.slot)
            stall = self.writes[event.slot][1] - self.now
            if stall > 0:
                self.write_stall_s += stall
                self.stalls[event] = stall
                self.now = self.writes[event.slot][1]

    def load(self, event: Event) -> None:
        if self.writes[event.slot][1] > self.now and event.slot not in self.blocking:
            self.forwarded.add(event.slot)
        else:
            self.reads[event.slot] = self.read_lanes[event.tier].put(event.slot, self.now)

    def wait(self, event: Event) -> None:
        """An item that is forwarded is there from its load on, which comes no later than its wait."""
        if event.slot in self.forwarded:
            return
        stall = self.reads[event.slot][1] - self.now
        if stall > 0:
            self.read_stall_s += stall
            self.stalls[event] = stall
            self.now = self.reads[event.slot][1]


def first_uses(step: Step, choices: Sequence[Choice]) -> list[int]:
    """By item, the operator of the backward before which it must be there. Recomputing an item needs others earlier."""
    firsts = step.first_use.copy()
    for i, needs in step.chains:  # those produced last come first, so every item comes before the items that it needs
        if choices[i] is Choice.RECOMPUTE:
            first = firsts[i]
            for needed in needs:
                if first < firsts[needed]:
                    firsts[needed] = first
    return firsts


def again(step: Step, choices: Sequence[Choice], firsts: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Operators, and the seconds of recomputing before each; negative where another item has paid a shared cost."""
    recomputed = [i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    for i in recomputed:
        yield firsts[i], step.items[i].recompute_s
    if not recomputed:
        return
    for shared in step.shared:
        together = sorted(firsts[i] for i in shared.items if choices[i] is Choice.RECOMPUTE)
        for first in together[1:]:
            yield first, -shared.seconds


def _memory(
    step: Step,
    choices: Sequence[Choice],
    schedule: Schedule,
    starts: Sequence[float],
    writes: Mapping[int, Interval],
    firsts: Sequence[int],
) -> tuple[int, ...]:
    """Bytes alive during every operator: the curve with everything kept, less the items while they are gone."""
    change, nbytes = step.change.copy(), step.nbytes
    spans = [(i, step.last_use[i], firsts[i]) for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    for i, trip in schedule.items():
        gone, back = trip.release.at, trip.load.at
        if not trip.blocks:  # the runtime holds the item until it is written
            gone = max(gone, min(bisect_left(starts, writes[i][1]), back) - 1)
        spans.append((i, gone, max(back, gone + 1)))
    for i, gone, back in spans:
        change[gone + 1] -= nbytes[i]
        change[back] += nbytes[i]
    return tuple(itertools.accumulate(change[:-1]))


def _host_memory(step: Step, schedule: Schedule) -> tuple[int, ...]:
    """Bytes in host memory during every operator. An item is there from its store to its wait, behind which the
    backward has it."""
    hosted = [(i, trip) for i, trip in schedule.items() if trip.tier == "host"]
    if not hosted:
        return ()
    change = [0] * (len(step.seconds) + 1)
    for i, trip in hosted:
        change[trip.store.at] += step.moved[i]
        change[trip.wait.at + 1] -= step.moved[i]
    return tuple(itertools.accumulate(change[:-1]))
