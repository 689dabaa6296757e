"""Which kernels of a graph Inductor will fuse because they read the same buffers, and when the fused ones run.

    norm = f(x)      mm(norm)         both loops read x and go over the same elements: one kernel, which runs when
    ...                               the mm needs `norm`; what else it computes is there, and takes memory, that
    dx = g(x, dy)                     much earlier than in the graph

Inductor refuses some (`can_fuse` and `can_fuse_horizontal` in its choices.py, torch 2.13): kernels of too many loops,
and where the one does not read the other, those that share next to nothing or are too far apart. It is made to refuse
more (`are_apart`): the first layers of an encoder and of a decoder read the same table, and if they were one kernel,
both would be alive from the first on.
"""

from __future__ import annotations

import bisect
import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ssd_fx.compat import inductor_config as config

# Of the readers of a buffer so many behind each are looked at: what all layers read would be a square of pairs.
NEAR = 8
# Kernels from the first to the last of one that is fused of loops that do not read each other: a number in the code of
# `Scheduler.are_long_distant_nodes`. Our own nodes count there too, but are not known yet when this is asked.
FARTHEST = 64
# Library calls between two loops that do not read each other and are fused all the same: about those of a layer. This
# limit is ours, and holds in Inductor too (`lowering/order.py`).
CALLS_BETWEEN = 8
# The same if the backward computes the earlier one again. The products for both gradients of a linear layer stand
# between that, which one of them reads, and the loop that turns the other's result back. These two loops read the same:
# to keep them apart would be to read it twice.
CALLS_BEHIND_AGAIN = 2


# Of what the later of two such loops writes, the least part that both must read if a library call stands between them.
# The pieces of a loss share its targets and a few numbers. In one kernel the logits of all would be alive at once.
WORTH_SHARING = 1 / 16


def are_apart(calls: int, earlier: bool, later: bool, shared: int, written: int) -> bool:
    """Whether two loops that do not read each other must not be fused, with so many library calls between them.

    `earlier`, `later`: the backward computes that one again by our choice. The later one would move to the earlier, and
    what is computed again is to happen late. `shared`: bytes that both read; `written`: those that the later writes.
    """
    most = 0 if later else CALLS_BEHIND_AGAIN if earlier else CALLS_BETWEEN
    return calls > most or (calls > 0 and shared < WORTH_SHARING * written)


@dataclass(frozen=True, slots=True)
class Space:
    """What a loop goes over: so many elements in all.

    `outer`: of a reduction, its results. On the CPU of any loop, the iterations of the outermost of the nested loops
    that it needs, where it reads a row or a column again and again; one loop goes over all elements, if it can.
    """

    elements: int
    outer: int
    reduces: bool
    on_cpu: bool


@dataclass
class Loop:
    """`space`: what it goes over; None for a library call, which is fused with nothing.

    `at`: its place in the graph; `reads`, `writes`: storages, with their bytes; `behind`: loops that it reads from.
    `again`: the backward computes it again by our choice. `running`: it is one of the additions of a long sum.
    """

    at: int
    space: Space | None = None
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)
    again: bool = False
    running: bool = False


def fuse(loops: Mapping[int, Loop]) -> Groups:
    """Which loops become one kernel."""
    groups = Groups(loops)
    for (a, b), nbytes in _candidates(loops).items():
        groups.fuse(a, b, nbytes)
    return groups


def _candidates(loops: Mapping[int, Loop]) -> dict[tuple[int, int], int]:
    """Pairs that can be one, with the bytes that they share: most first, then the nearest, as Inductor scores."""
    users: dict[int, list[int]] = {}
    spaces = {k: loop.space for k, loop in loops.items() if loop.space is not None}
    for k in sorted(spaces):
        for key in loops[k].reads.keys() | loops[k].writes.keys():
            users.setdefault(key, []).append(k)
    shared: dict[tuple[int, int], int] = {}
    for key, together in users.items():
        for i, a in enumerate(together):
            for b in together[i + 1 : i + 1 + NEAR]:
                if _are_alike(spaces[a], spaces[b], a in loops[b].behind):
                    used = loops[a].reads if key in loops[a].reads else loops[a].writes
                    shared[a, b] = shared.get((a, b), 0) + used[key]
    return {pair: shared[pair] for pair in sorted(shared, key=lambda p: (-shared[p], p[1] - p[0], p)) if shared[pair]}


def _are_alike(a: Space, b: Space, reads: bool) -> bool:
    """Whether two loops can be one. `reads`: the second reads what the first writes."""
    if not a.on_cpu:
        summed, other = (a, b) if a.reduces else (b, a)
        return summed == other or (
            summed.reduces and not other.reduces and other.elements in (summed.elements, summed.outer)
        )
    if a.outer == b.outer:  # the outermost loop is one, and what is in it runs one behind the other
        return reads or a.elements == b.elements
    return reads and not a.reduces and not b.reduces and a.elements == b.elements == b.outer


@dataclass(slots=True)
class _Group:
    """Loops that became one kernel, so many. `first`, `last`: of their places in the graph.

    `results`: of its reductions, all of which have as many; None where it has none. `written`: bytes that it writes.
    `readers`: loops, of any group, that read what it writes. `again`, `running`: as in `Loop`, of any of them.
    """

    first: int
    last: int
    results: int | None
    written: int
    loops: int = 1
    readers: set[int] = field(default_factory=set)
    again: bool = False
    running: bool = False

    def merge(self, other: _Group) -> None:
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)
        self.results = other.results if self.results is None else self.results
        self.written += other.written
        self.loops += other.loops
        self.readers |= other.readers
        self.again |= other.again
        self.running |= other.running


class Groups:
    """The loops by group. A group is named by one of its loops, its root."""

    def __init__(self, loops: Mapping[int, Loop]) -> None:
        self._parent = {k: k for k in loops}  # a loop of the same group; the root is its own
        self._groups: dict[int, _Group] = {}  # by root
        for k, loop in loops.items():
            results = loop.space.outer if loop.space is not None and loop.space.reduces else None
            written = sum(loop.writes.values())
            self._groups[k] = _Group(loop.at, loop.at, results, written, again=loop.again, running=loop.running)
        for k, loop in loops.items():
            for source in loop.behind:
                self._groups[source].readers.add(k)
        self._rank = {at: rank for rank, at in enumerate(sorted(loop.at for loop in loops.values()))}
        self._calls = sorted(loop.at for loop in loops.values() if loop.space is None)
        self._spans: list[tuple[int, int]] = []  # first and last of every group that was made, by the first

    def fuse(self, a: int, b: int, nbytes: int) -> None:
        """Makes two that share `nbytes` one kernel, unless refused, or something between reads one for the other."""
        a, b = self.of(a), self.of(b)
        if a == b or self._is_refused(a, b, nbytes) or self._path(a, b) or self._path(b, a):
            return
        self._parent[b] = a
        group = self._groups[a]
        group.merge(self._groups.pop(b))
        bisect.insort(self._spans, (group.first, group.last))

    def _is_refused(self, a: int, b: int, nbytes: int) -> bool:
        """By what holds for all kernels, or by what holds for those that do not read each other."""
        one, other = self._groups[a], self._groups[b]
        if one.loops + other.loops > config.max_fusion_size:
            return True
        if None not in (one.results, other.results) and one.results != other.results:
            return True
        between = self._calls_between(one, other)
        for source, reader in ((one, b), (other, a)):
            if any(self.of(n) == reader for n in source.readers):
                return source.running and between > 0
        span = self._rank[max(one.last, other.last)] - self._rank[min(one.first, other.first)]
        earlier, later = sorted((one, other), key=lambda group: group.first)
        apart = are_apart(between, earlier.again, later.again, nbytes, later.written)
        return span > FARTHEST or nbytes < config.score_fusion_memory_threshold or apart

    def _calls_between(self, one: _Group, other: _Group) -> int:
        """How many library calls stand between two groups; 0 or less if none does."""
        end, begin = min(one.last, other.last), max(one.first, other.first)
        return bisect.bisect(self._calls, begin) - bisect.bisect(self._calls, end)

    def places(self) -> dict[int, int]:
        """When each loop runs: at the last one of its kernel, or before a kernel that reads it and runs earlier.

        Before is a place where no other kernel runs, behind all that it reads itself: where both were at one, what the
        one reads would seem alive beside what the other writes. If there is no such place, it is that of the reader.
        No kernel runs before the first loops of all that it needs: what a gradient at the end of the backward is fused
        with waits for it. That is the order of `lowering/order.py`.
        """
        at = {root: group.last for root, group in self._groups.items()}
        readers = {root: {self.of(n) for n in group.readers} - {root} for root, group in self._groups.items()}
        begins, ready = dict.fromkeys(at, -1), dict.fromkeys(at, 0)
        upwards = list(graphlib.TopologicalSorter(readers).static_order())  # readers first
        for root in reversed(upwards):
            group = self._groups[root]
            for reader in readers[root]:
                begins[reader] = max(begins[reader], group.last)
                ready[reader] = max(ready[reader], ready[root], group.first)
        taken = set(at.values())
        for root in upwards:
            need = min((at[r] for r in readers[root]), default=at[root] + 1)
            if need <= at[root]:
                begin = max(begins[root] + 1, self._groups[root].first)
                free = (place for place in range(need - 1, begin - 1, -1) if place not in taken)
                at[root] = max(next(free, need), ready[root])
                taken.add(at[root])
        for root in reversed(upwards):
            for reader in readers[root]:
                at[reader] = max(at[reader], at[root])
        return {k: at[self.of(k)] for k in self._parent}

    def of(self, kernel: int) -> int:
        """The root of a loop's group."""
        while self._parent[kernel] != kernel:
            self._parent[kernel] = self._parent[self._parent[kernel]]
            kernel = self._parent[kernel]
        return kernel

    def _path(self, start: int, end: int) -> bool:
        """Whether there is a way from one to the other that is no single step."""
        latest = self._latest(end)
        work = [root for n in self._groups[start].readers if (root := self.of(n)) not in (start, end)]
        seen = set(work)
        while work:
            for n in self._groups[work.pop()].readers:
                root = self.of(n)
                if root == end:
                    return True
                if root not in seen and root != start and self._groups[root].first <= latest:
                    seen.add(root)
                    work.append(root)
        return False

    def _latest(self, end: int) -> int:
        """No way to `end` goes through a group that begins later: ways go forward, but back from the last member of a
        group to its first."""
        latest = self._groups[end].last
        for first, last in self._spans:
            if first > latest:
                break
            latest = max(latest, last)
        return latest
