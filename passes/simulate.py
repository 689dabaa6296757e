"""One training step as numbers: what a choice for every alias group costs in time and memory.

    compute   f0 f1 f2 ... | b0 b1 b2 ...        one lane; operators in the order of the graphs
    writes       [A][B]  [C]                     one lane per tier, first in first out
    reads                    [C] [B][A]          one lane per tier, first in first out

Everything is counted in operators of one step, forward and backward behind each other. Memory is a matter of
positions, not of times: what the plan lets go of at an operator is gone there, because a release that the budget needs
waits for its write. Time is what such waits, and the waits for loads, add to the operators. No tensors, no graphs;
thousands of groups in milliseconds.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.machine import Tier


class Choice(enum.Enum):
    """What becomes of an alias group between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"

    __hash__ = object.__hash__  # Enum's own is a Python function, and the search looks up tuples of thousands of these


@dataclass(frozen=True, slots=True)
class Item:
    """An alias group: `nbytes`, and the operators that produce it, read it last in the forward, first and last in the
    backward.

    `choices`: what is allowed. `recompute_s`: seconds to compute it again, for which the items `needs` must be there.
    `tier`: where it goes if it is offloaded, host memory only as far as it fits; None: wherever it is better.
    """

    nbytes: int
    produced: int
    last_use: int
    first_use: int
    last_bwd_use: int
    recompute_s: float = math.inf
    choices: frozenset[Choice] = frozenset({Choice.KEEP, Choice.OFFLOAD})
    needs: tuple[int, ...] = ()
    stored_nbytes: int | None = None
    tier: Tier | None = None

    @property
    def moved_nbytes(self) -> int:
        """Bytes that are written and read back; fewer than `nbytes` where a part of the storage is enough."""
        return self.nbytes if self.stored_nbytes is None else self.stored_nbytes


@dataclass(frozen=True)
class Step:
    """One training step: seconds of every operator, forward then backward; `base`: bytes alive during each that no
    choice touches; `forward`: the number of forward operators; `host_budget`: bytes that may be in host memory."""

    seconds: tuple[float, ...]
    base: tuple[int, ...]
    forward: int
    items: tuple[Item, ...]
    host_budget: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Where the four nodes of an offloaded item stand: store and release behind an operator, load and wait before one.

    `block`: the release returns when the write is done. Without it the memory is gone when the write is. `strict`: the
    load would stand earlier if there was memory for it. `tier`: where the bytes are in between.
    """

    store_after: int
    release_after: int
    block: bool
    load_before: int
    strict: bool = False
    tier: Tier = "ssd"


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
    held_back: bool = False  # something was handed back that could have been written while its lane was idle

    @property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def host_peak(self) -> int:
        return max(self.host, default=0)

    @property
    def stall_s(self) -> float:
        return self.write_stall_s + self.read_stall_s


@dataclass(frozen=True)
class _Nodes:
    """The items whose nodes stand at each operator, in their order; `extra`: seconds that choices add to it."""

    extra: list[float]
    stores: dict[int, list[int]] = field(default_factory=dict)
    releases: dict[int, list[int]] = field(default_factory=dict)
    loads: dict[int, list[int]] = field(default_factory=dict)
    waits: dict[int, list[int]] = field(default_factory=dict)


def _nodes(
    step: Step, choices: Sequence[Choice], transfers: Mapping[int, Transfer], machine: Machine, firsts: Sequence[int]
) -> _Nodes:
    nodes = _Nodes([0.0] * len(step.seconds))
    for i, choice in enumerate(choices):
        item = step.items[i]
        if choice is Choice.RECOMPUTE:
            nodes.extra[firsts[i]] += item.recompute_s
        elif choice is Choice.OFFLOAD:
            transfer = transfers[i]
            nodes.stores.setdefault(transfer.store_after, []).append(i)
            nodes.releases.setdefault(transfer.release_after, []).append(i)
            nodes.loads.setdefault(transfer.load_before, []).append(i)
            nodes.waits.setdefault(firsts[i], []).append(i)
            nodes.extra[transfer.store_after] += machine.own_s(item.moved_nbytes, transfer.tier)
            nodes.extra[firsts[i]] += machine.own_s(item.moved_nbytes, transfer.tier)
    for together in nodes.stores.values():
        together.sort(key=lambda i: (not transfers[i].block, step.items[i].last_use))  # what is waited for first
    for together in nodes.loads.values():
        together.sort(key=lambda i: firsts[i])  # soonest needed
    return nodes


def simulate(step: Step, choices: Sequence[Choice], transfers: Mapping[int, Transfer], machine: Machine) -> Outcome:
    """Play one step. `transfers` has an entry for every item that is offloaded."""
    firsts = first_uses(step, choices)
    nodes = _nodes(step, choices, transfers, machine, firsts)
    now = write_stall = read_stall = 0.0
    write_lane, read_lane = {"ssd": 0.0, "host": 0.0}, {"ssd": 0.0, "host": 0.0}  # when each is free again
    write_end: dict[int, float] = {}
    read_end: dict[int, float] = {}
    waited: dict[int, float] = {}
    starts, ends = [], []
    late: set[int] = set()  # stored while its write lane had been idle before
    idle_until, held_back = {"ssd": 0.0, "host": 0.0}, False  # of the write lanes
    for p, seconds in enumerate(step.seconds):
        for i in nodes.loads.get(p, ()):
            if write_end[i] > now and not transfers[i].block:
                read_end[i] = now  # still in memory: handed back
                held_back |= i in late
                continue
            tier, lanes = transfers[i].tier, machine.lanes(transfers[i].tier)
            read_lane[tier] = max(read_lane[tier], now) + step.items[i].moved_nbytes / lanes.read_bw
            read_end[i] = read_lane[tier] + lanes.latency_s
        for i in nodes.waits.get(p, ()):
            if read_end[i] > now:
                read_stall += read_end[i] - now
                waited[i] = waited.get(i, 0.0) + read_end[i] - now
                now = read_end[i]
        starts.append(now)
        now += seconds + nodes.extra[p]
        ends.append(now)
        for i in nodes.stores.get(p, ()):
            tier, lanes = transfers[i].tier, machine.lanes(transfers[i].tier)
            idle_until[tier] = now if write_lane[tier] < now else idle_until[tier]
            if ends[step.items[i].produced] < idle_until[tier]:
                late.add(i)
            write_lane[tier] = max(write_lane[tier], now) + step.items[i].moved_nbytes / lanes.write_bw
            write_end[i] = write_lane[tier] + lanes.latency_s
        for i in nodes.releases.get(p, ()):
            if transfers[i].block and write_end[i] > now:
                write_stall += write_end[i] - now
                waited[i] = write_end[i] - now
                now = write_end[i]
    starts.append(now)
    memory = _memory(step, choices, transfers, starts, write_end, firsts)
    host = _host_memory(step, transfers, firsts)
    written = sum(step.items[i].moved_nbytes for i, t in transfers.items() if t.tier == "ssd")
    return Outcome(
        now, write_stall, read_stall, memory, written, tuple(starts), tuple(ends), write_end, host, waited, held_back
    )


def first_uses(step: Step, choices: Sequence[Choice]) -> list[int]:
    """The operator before which every item must be there in the backward: recomputing one needs others earlier."""
    firsts = [item.first_use for item in step.items]
    recomputed = [i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE]
    for i in sorted(recomputed, key=lambda i: -step.items[i].produced):  # what needs an item is produced later
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
    change = [0] * (len(step.seconds) + 1)

    def alive(first: int, last: int, nbytes: int) -> None:
        change[first] += nbytes
        change[last + 1] -= nbytes

    for i, choice in enumerate(choices):
        item = step.items[i]
        if choice is Choice.KEEP:
            alive(item.produced, item.last_bwd_use, item.nbytes)
        elif choice is Choice.RECOMPUTE:
            alive(item.produced, item.last_use, item.nbytes)
            alive(firsts[i], item.last_bwd_use, item.nbytes)
        else:
            transfer = transfers[i]
            gone = transfer.release_after
            if not transfer.block:  # the runtime holds it until it is written
                while gone + 1 < transfer.load_before and starts[gone + 1] < write_end[i]:
                    gone += 1
            alive(item.produced, gone, item.nbytes)
            alive(max(transfer.load_before, gone + 1), item.last_bwd_use, item.nbytes)
    total, memory = 0, []
    for p in range(len(step.seconds)):
        total += change[p]
        memory.append(total + step.base[p])
    return tuple(memory)


def _host_memory(step: Step, transfers: Mapping[int, Transfer], firsts: Sequence[int]) -> tuple[int, ...]:
    """Bytes from each store to the wait behind which the backward has them."""
    hosted = [(i, t) for i, t in transfers.items() if t.tier == "host"]
    if not hosted:
        return ()
    change = [0] * (len(step.seconds) + 1)
    for i, transfer in hosted:
        change[transfer.store_after] += step.items[i].moved_nbytes
        change[firsts[i] + 1] -= step.items[i].moved_nbytes
    return tuple(itertools.accumulate(change[:-1]))
