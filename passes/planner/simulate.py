"""One training step as numbers: what a choice for every alias group costs in time and memory.

    compute   f0 f1 f2 ... | b0 b1 b2 ...        one lane; operators in the order of the graphs
    writes       [A][B]  [C]                     one lane per tier, first in first out
    reads                    [C] [B][A]          one lane per tier, first in first out

Everything is counted in operators of one step, forward and backward behind each other. Memory is a matter of
positions, not of times: what the plan releases at an operator is gone there, because a release that the budget needs
waits for its write. Time is that of the operators and of such waits and of the waits for loads. There are no tensors
and no graphs here, so a thousand groups take milliseconds.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from ssd_fx.passes.cost.machine import TIERS, Machine
from ssd_fx.passes.planner.items import Choice, Step, Transfer


@dataclass(frozen=True)
class Outcome:
    """What a simulated step took: seconds, of them stalled in releases and waits; bytes alive during every operator.

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
    nodes, columns = _Nodes(), step.columns
    extra, own = nodes.extra, {tier: step.seconds_of(machine, tier).own for tier in TIERS}
    for i, choice in enumerate(choices):
        if choice is Choice.KEEP:
            continue
        first = firsts[i]
        if choice is Choice.RECOMPUTE:
            extra[first] = extra.get(first, 0.0) + step.items[i].recompute_s
            continue
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
            together.sort(key=lambda i: (not transfers[i].block, columns.last_use[i]))
    for together in nodes.loads.values():
        if len(together) > 1:  # soonest needed
            together.sort(key=firsts.__getitem__)
    return nodes


def simulate(step: Step, choices: Sequence[Choice], transfers: Mapping[int, Transfer], machine: Machine) -> Outcome:
    """Play one step. `transfers` has an entry for every item that is offloaded.

    One loop over local names, long as it is: the search spends most of its time in it.
    """
    firsts, columns = first_uses(step, choices), step.columns
    nodes = _nodes(step, choices, transfers, machine, firsts)
    costs = list(step.seconds)
    for p, extra in nodes.extra.items():
        costs[p] += extra
    lanes = {tier: step.seconds_of(machine, tier) for tier in TIERS}
    now = write_stall = read_stall = 0.0
    write_lane, read_lane = dict.fromkeys(TIERS, 0.0), dict.fromkeys(TIERS, 0.0)  # when each is free again
    write_end: dict[int, float] = {}
    read_end: dict[int, float] = {}
    waited: dict[int, float] = {}
    starts: list[float] = []
    ends: list[float] = []
    forwarded: set[int] = set()
    late: set[int] = set()  # stored while its write lane had been idle before
    idle_until, idle_lane = dict.fromkeys(TIERS, 0.0), False  # of the write lanes
    busy = nodes.operators()
    for p, seconds in enumerate(costs):
        if p not in busy:
            starts.append(now)
            now += seconds
            ends.append(now)
            continue
        for i in nodes.loads.get(p, ()):
            if write_end[i] > now and not transfers[i].block:
                read_end[i] = now
                forwarded.add(i)
                idle_lane |= i in late
                continue
            tier = transfers[i].tier
            read_lane[tier] = max(read_lane[tier], now) + lanes[tier].read[i]
            read_end[i] = read_lane[tier] + lanes[tier].latency
        for i in nodes.waits.get(p, ()):
            if read_end[i] > now:
                read_stall += read_end[i] - now
                waited[i] = waited.get(i, 0.0) + read_end[i] - now
                now = read_end[i]
        starts.append(now)
        now += seconds
        ends.append(now)
        for i in nodes.stores.get(p, ()):
            tier = transfers[i].tier
            idle_until[tier] = now if write_lane[tier] < now else idle_until[tier]
            if ends[columns.produced[i]] < idle_until[tier]:
                late.add(i)
            write_lane[tier] = max(write_lane[tier], now) + lanes[tier].write[i]
            write_end[i] = write_lane[tier] + lanes[tier].latency
        for i in nodes.releases.get(p, ()):
            if transfers[i].block and write_end[i] > now:
                write_stall += write_end[i] - now
                waited[i] = write_end[i] - now
                now = write_end[i]
    starts.append(now)
    memory = _memory(step, choices, transfers, starts, write_end, firsts)
    host = _host_memory(step, transfers, firsts)
    written = sum(columns.moved[i] for i, t in transfers.items() if t.tier == "ssd")
    return Outcome(
        now,
        write_stall,
        read_stall,
        memory,
        written,
        tuple(starts),
        tuple(ends),
        write_end,
        host,
        waited,
        forwarded,
        {i: end for i, end in read_end.items() if i not in forwarded},
        idle_lane,
    )


def first_uses(step: Step, choices: Sequence[Choice]) -> list[int]:
    """The operator before which every item must be there in the backward: recomputing one needs others earlier."""
    firsts = step.columns.first_use.copy()
    recomputed = [i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    for i in sorted(recomputed, key=step.columns.produced.__getitem__, reverse=True):  # what needs an item comes later
        for needed in step.items[i].needs:
            firsts[needed] = min(firsts[needed], firsts[i])
    return firsts


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
