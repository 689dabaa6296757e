"""One training step as numbers: what a choice for every alias group costs in time and memory.

    compute   f0 f1 f2 ... | b0 b1 b2 ...        one lane; operators in the order of the graphs
    writes       [A][B]  [C]                     one lane per tier, first in first out
    reads                    [C] [B][A]          one lane per tier, first in first out

Everything is counted in operators of one step, forward and backward behind each other. Memory is a matter of
positions, not of times: what the plan releases at an operator is gone there, because a release that the budget needs
waits for its write. Time is that of the operators, of such waits, and of the waits for loads. There are no tensors
and no graphs here, so a thousand groups take milliseconds.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ssd_fx.passes.cost.machine import TIERS, Machine
from ssd_fx.passes.planner.items import Choice, Step, Transfer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulated step took: seconds, of them stalled in releases and waits; bytes alive during every operator.

    A host that has more to do than the device that runs behind it sets the seconds.

    `written`: bytes to the drives. `host`: bytes in host memory during every operator, empty where none ever are.
    `waits`: seconds that each item was waited for.
    """

    seconds: float
    write_stall_s: float
    read_stall_s: float
    memory: tuple[int, ...]
    written: int
    starts: tuple[float, ...] = field(repr=False, default=())
    ends: tuple[float, ...] = field(repr=False, default=())
    write_ends: Mapping[int, float] = field(repr=False, default_factory=dict)
    host: tuple[int, ...] = ()
    waits: Mapping[int, float] = field(repr=False, default_factory=dict)
    forwarded: Set[int] = frozenset()  # still in memory when their loads come, so nothing is read
    read_ends: Mapping[int, float] = field(repr=False, default_factory=dict)
    idle_lane: bool = False  # an item is forwarded that could have been written while its lane was idle

    @property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def host_peak(self) -> int:
        return max(self.host, default=0)

    @property
    def stall_s(self) -> float:
        return self.write_stall_s + self.read_stall_s


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The items whose nodes stand at an operator, in their order, for the operators that have any.

    `extra`: seconds that choices add to it.
    """

    extra: dict[int, float] = field(default_factory=dict)
    stores: dict[int, list[int]] = field(default_factory=dict)
    releases: dict[int, list[int]] = field(default_factory=dict)
    loads: dict[int, list[int]] = field(default_factory=dict)
    waits: dict[int, list[int]] = field(default_factory=dict)

    def operators(self) -> set[int]:
        return {*self.stores, *self.releases, *self.loads, *self.waits}


def _nodes(
    step: Step, choices: Sequence[Choice], transfers: Mapping[int, Transfer], machine: Machine, firsts: Sequence[int]
) -> _Nodes:
    nodes = _Nodes()
    extra = nodes.extra
    last_use = step.columns.last_use
    own = {tier: step.seconds_of(machine, tier).own for tier in TIERS}
    for first, seconds in again(step, choices, firsts):
        extra[first] = extra.get(first, 0.0) + seconds
    for i, choice in enumerate(choices):
        if choice is not Choice.OFFLOAD:
            continue
        first = firsts[i]
        transfer = transfers[i]
        store, seconds = transfer.store_after, own[transfer.tier][i]
        nodes.stores.setdefault(store, []).append(i)
        nodes.releases.setdefault(transfer.release_after, []).append(i)
        nodes.loads.setdefault(transfer.load_before, []).append(i)
        nodes.waits.setdefault(first, []).append(i)
        extra[store] = extra.get(store, 0.0) + seconds
        extra[first] = extra.get(first, 0.0) + seconds
    for together in nodes.stores.values():
        if len(together) > 1:  # what is waited for first
            together.sort(key=lambda i: (not transfers[i].block, last_use[i]))
    for together in nodes.loads.values():
        if len(together) > 1:  # soonest needed
            together.sort(key=firsts.__getitem__)
    return nodes


def simulate(step: Step, choices: Sequence[Choice], transfers: Mapping[int, Transfer], machine: Machine) -> Outcome:
    """Play one step. `transfers` has an entry for every item that is offloaded."""
    firsts = first_uses(step, choices)
    nodes = _nodes(step, choices, transfers, machine, firsts)
    play = _Play(step, transfers, machine, nodes)
    for p in sorted(nodes.operators()):
        play.compute(p)
        for i in nodes.loads.get(p, ()):
            play.load(i)
        for i in nodes.waits.get(p, ()):
            play.wait(i)
        play.compute(p + 1)
        for i in nodes.stores.get(p, ()):
            play.store(i)
        for i in nodes.releases.get(p, ()):
            play.release(i)
    play.compute(len(step.seconds))
    starts = (*play.starts, play.now)
    return Outcome(
        seconds=max(play.now, machine.host_s(step.kernels, len(transfers))),
        write_stall_s=play.write_stall_s,
        read_stall_s=play.read_stall_s,
        memory=_memory(step, choices, transfers, starts, play.write_ends, firsts),
        written=sum(step.columns.moved[i] for i, t in transfers.items() if t.tier == "ssd"),
        starts=starts,
        ends=tuple(play.ends),
        write_ends=play.write_ends,
        host=_host_memory(step, transfers, firsts),
        waits=play.waits,
        forwarded=play.forwarded,
        read_ends={i: end for i, end in play.read_ends.items() if i not in play.forwarded},
        idle_lane=not play.late.isdisjoint(play.forwarded),
    )


@dataclass(slots=True)
class _Lane:
    """The writes or the reads of one tier, first in first out. `seconds`: of each item."""

    seconds: Sequence[float]
    latency: float
    free: float = 0.0  # the end of the last transfer, without its latency
    idle_until: float = 0.0  # the begin of the last transfer that found the lane idle

    def put(self, i: int, now: float) -> float:
        """Return when the transfer of item `i`, which is asked for now, has ended."""
        if self.free < now:
            self.free = self.idle_until = now
        self.free += self.seconds[i]
        return self.free + self.latency


class _Play:
    """The step so far: `now`, the operators that have run, and what became of every item."""

    def __init__(self, step: Step, transfers: Mapping[int, Transfer], machine: Machine, nodes: _Nodes) -> None:
        self.transfers = transfers
        self.produced = step.columns.produced
        self.costs = list(step.seconds)
        for p, extra in nodes.extra.items():
            self.costs[p] += extra
        seconds = {tier: step.seconds_of(machine, tier) for tier in TIERS}
        self.writes = {tier: _Lane(of.write, of.latency) for tier, of in seconds.items()}
        self.reads = {tier: _Lane(of.read, of.latency) for tier, of in seconds.items()}
        self.now = self.write_stall_s = self.read_stall_s = 0.0
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.write_ends: dict[int, float] = {}
        self.read_ends: dict[int, float] = {}
        self.waits: dict[int, float] = {}
        self.forwarded: set[int] = set()
        self.late: set[int] = set()  # the lane was idle between the end of its operator and its store

    def compute(self, until: int) -> None:
        """Run the operators before `until` that have not run."""
        times = list(itertools.accumulate(self.costs[len(self.ends) : until], initial=self.now))
        self.now = times[-1]
        self.starts += times[:-1]
        self.ends += times[1:]

    def load(self, i: int) -> None:
        if self.write_ends[i] > self.now and not self.transfers[i].block:
            self.forwarded.add(i)
            self.read_ends[i] = self.now
        else:
            self.read_ends[i] = self.reads[self.transfers[i].tier].put(i, self.now)

    def wait(self, i: int) -> None:
        stall = self.read_ends[i] - self.now
        if stall > 0:
            self.read_stall_s += stall
            self.waits[i] = self.waits.get(i, 0.0) + stall
            self.now = self.read_ends[i]

    def store(self, i: int) -> None:
        lane = self.writes[self.transfers[i].tier]
        self.write_ends[i] = lane.put(i, self.now)
        if self.ends[self.produced[i]] < lane.idle_until:
            self.late.add(i)

    def release(self, i: int) -> None:
        stall = self.write_ends[i] - self.now
        if self.transfers[i].block and stall > 0:
            self.write_stall_s += stall
            self.waits[i] = stall
            self.now = self.write_ends[i]


def first_uses(step: Step, choices: Sequence[Choice]) -> list[int]:
    """The operator before which every item must be there in the backward: recomputing one needs others earlier."""
    firsts = step.columns.first_use.copy()
    recomputed = [i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    for i in sorted(recomputed, key=step.columns.produced.__getitem__, reverse=True):  # what needs an item comes later
        for needed in step.items[i].needs:
            firsts[needed] = min(firsts[needed], firsts[i])
    return firsts


def again(step: Step, choices: Sequence[Choice], firsts: Sequence[int]) -> Iterator[tuple[int, float]]:
    """What is recomputed before which operator, in seconds; negative where another item has paid for it before."""
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
    transfers: Mapping[int, Transfer],
    starts: Sequence[float],
    write_end: Mapping[int, float],
    firsts: Sequence[int],
) -> tuple[int, ...]:
    """Bytes alive during every operator: the curve with everything kept, less the items while they are gone."""
    columns = step.columns
    change, nbytes = columns.change.copy(), columns.nbytes
    for i, choice in enumerate(choices):
        if choice is Choice.KEEP:
            continue
        if choice is Choice.RECOMPUTE:
            gone, back = columns.last_use[i], firsts[i]
        else:
            transfer = transfers[i]
            gone, back = transfer.release_after, transfer.load_before
            if not transfer.block:  # the runtime holds it until it is written
                gone = max(gone, min(bisect_left(starts, write_end[i]), back) - 1)
            back = max(back, gone + 1)
        change[gone + 1] -= nbytes[i]
        change[back] += nbytes[i]
    return tuple(itertools.accumulate(change[:-1]))


def _host_memory(step: Step, transfers: Mapping[int, Transfer], firsts: Sequence[int]) -> tuple[int, ...]:
    """Bytes from each store to the wait behind which the backward has them."""
    hosted = [(i, t) for i, t in transfers.items() if t.tier == "host"]
    if not hosted:
        return ()
    change, moved = [0] * (len(step.seconds) + 1), step.columns.moved
    for i, transfer in hosted:
        change[transfer.store_after] += moved[i]
        change[firsts[i] + 1] -= moved[i]
    return tuple(itertools.accumulate(change[:-1]))
