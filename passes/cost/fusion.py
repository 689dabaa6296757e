"""Which kernels of a graph Inductor will fuse because they read the same buffers, and when the fused ones run.

    norm = f(x)      mm(norm)         both loops read x and go over the same elements: one kernel, which runs when
    ...                               the mm needs `norm`; what else it computes is there, and takes memory, that
    dx = g(x, dy)                     much earlier than in the graph

Inductor refuses some (`can_fuse` and `can_fuse_horizontal` in its choices.py, torch 2.13): kernels of too many loops,
and where the one does not read the other, those that share next to nothing or are too far apart.
"""

from __future__ import annotations

import bisect
import graphlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch._inductor import config

# Of the readers of a buffer so many behind each are looked at: what all layers read would be a square of pairs.
NEAR = 8
# Kernels from the first to the last of one that is fused of loops that do not read each other: a number in the code of
# `Scheduler.are_long_distant_nodes`. Our own nodes count there too, but are not known yet when this is asked.
FARTHEST = 64


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
    """

    at: int
    space: Space | None = None
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)


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
        return summed == other or (summed.reduces > other.reduces and other.elements in (summed.elements, summed.outer))
    if a.outer == b.outer:  # the outermost loop is one, and what is in it runs one behind the other
        return reads or a.elements == b.elements
    return reads and not a.reduces and not b.reduces and a.elements == b.elements == b.outer


class Groups:
    """Loops that became one kernel; `next` has the groups that read what a group wrote."""

    def __init__(self, loops: Mapping[int, Loop]) -> None:
        self._group = {k: k for k in loops}
        self._at = {k: loop.at for k, loop in loops.items()}  # by group: the last of its members
        self._first = dict(self._at)
        self._rank = {at: rank for rank, at in enumerate(sorted(self._at.values()))}
        self._loops = dict.fromkeys(loops, 1)
        self._results = {k: loop.space.outer for k, loop in loops.items() if loop.space and loop.space.reduces}
        self._spans: list[tuple[int, int]] = []  # first and last member of every group that was made, by the first
        self._next: dict[int, set[int]] = {k: set() for k in loops}
        for k, loop in loops.items():
            for source in loop.behind:
                self._next[source].add(k)

    def fuse(self, a: int, b: int, nbytes: int) -> None:
        """Makes two that share `nbytes` one kernel, unless refused, or something between reads one for the other."""
        a, b = self.of(a), self.of(b)
        if a == b or self._is_refused(a, b, nbytes) or self._path(a, b) or self._path(b, a):
            return
        self._group[b] = a
        self._loops[a] += self._loops[b]
        if b in self._results:
            self._results[a] = self._results[b]
        self._at[a] = max(self._at[a], self._at[b])
        self._first[a] = min(self._first[a], self._first[b])
        self._next[a] |= self._next.pop(b)
        bisect.insort(self._spans, (self._first[a], self._at[a]))

    def _is_refused(self, a: int, b: int, nbytes: int) -> bool:
        """By what holds for all kernels, or by what holds for those that do not read each other."""
        if self._loops[a] + self._loops[b] > config.max_fusion_size:
            return True
        if len({self._results[g] for g in (a, b) if g in self._results}) > 1:
            return True
        span = self._rank[max(self._at[a], self._at[b])] - self._rank[min(self._first[a], self._first[b])]
        if span <= FARTHEST and nbytes >= config.score_fusion_memory_threshold:
            return False
        return not any(self.of(n) == reader for read, reader in ((a, b), (b, a)) for n in self._next[read])

    def places(self) -> dict[int, int]:
        """When each loop runs: at the last one of its kernel, or earlier where a kernel that reads it does."""
        at, readers = dict(self._at), {g: {self.of(n) for n in after} - {g} for g, after in self._next.items()}
        for group in graphlib.TopologicalSorter(readers).static_order():
            at[group] = min([at[group], *(at[r] for r in readers[group])])
        return {k: at[self.of(k)] for k in self._group}

    def of(self, kernel: int) -> int:
        while self._group[kernel] != kernel:
            self._group[kernel] = self._group[self._group[kernel]]
            kernel = self._group[kernel]
        return kernel

    def _path(self, start: int, end: int) -> bool:
        """Whether there is a way from one to the other that is no single step."""
        latest = self._latest(end)
        work = [g for n in self._next[start] if (g := self.of(n)) not in (start, end)]
        seen = set(work)
        while work:
            for n in self._next[work.pop()]:
                group = self.of(n)
                if group == end:
                    return True
                if group not in seen and group != start and self._first[group] <= latest:
                    seen.add(group)
                    work.append(group)
        return False

    def _latest(self, end: int) -> int:
        """No way to `end` goes through a group that begins later: ways go forward, but back from the last member of a
        group to its first."""
        latest = self._at[end]
        for first, last in self._spans:
            if first > latest:
                break
            latest = max(latest, last)
        return latest
