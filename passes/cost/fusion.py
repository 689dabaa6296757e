"""Which kernels of a graph Inductor will fuse because they read the same buffers, and when the fused ones run.

    norm = f(x)      mm(norm)         both loops read x and go over the same elements: one kernel, which runs when
    ...                               the mm needs `norm`; what else it computes is there, and takes memory, that
    dx = g(x, dy)                     much earlier than in the graph

Inductor refuses some (`can_fuse` and `can_fuse_horizontal` in its choices.py, torch 2.13): kernels of too many loops,
and where the one does not read the other, those that share next to nothing or are too far apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch._inductor import config

# Of the readers of a buffer so many behind each are looked at: what all layers read would be a square of pairs.
NEAR = 8
# Kernels from the first to the last of one that is fused of loops that do not read each other: a number in the code of
# `Scheduler.are_long_distant_nodes`. Our own nodes count there too, but are not known yet when this is asked.
FARTHEST = 64


@dataclass
class Kernel:
    """`space`: what it iterates over, equal for kernels that can be one; None for one that cannot be fused.

    `at`: its place in the graph; `reads`, `writes`: storages, with their bytes; `behind`: kernels that it reads from.
    """

    at: int
    space: object
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)


def places(kernels: Mapping[int, Kernel]) -> dict[int, int]:
    """When each kernel runs: at its place, or, fused, at the last one of its group, or earlier where a reader does."""
    groups = _Groups(kernels)
    for (a, b), nbytes in _candidates(kernels).items():
        groups.fuse(a, b, nbytes)
    return groups.places()


def _candidates(kernels: Mapping[int, Kernel]) -> dict[tuple[int, int], int]:
    """Pairs that iterate alike, with the bytes that they share: most first, then the nearest, as Inductor scores."""
    users: dict[int, list[int]] = {}
    for k, kernel in kernels.items():
        if kernel.space is not None:
            for key in kernel.reads.keys() | kernel.writes.keys():
                users.setdefault(key, []).append(k)
    shared: dict[tuple[int, int], int] = {}
    for key, together in users.items():
        together.sort()
        for i, a in enumerate(together):
            for b in together[i + 1 : i + 1 + NEAR]:
                if kernels[a].space == kernels[b].space:
                    used = kernels[a].reads if key in kernels[a].reads else kernels[a].writes
                    shared[a, b] = shared.get((a, b), 0) + used[key]
    return {pair: shared[pair] for pair in sorted(shared, key=lambda p: (-shared[p], p[1] - p[0], p)) if shared[pair]}


class _Groups:
    """Kernels that became one; `next` has the groups that read what a group wrote."""

    def __init__(self, kernels: Mapping[int, Kernel]) -> None:
        self._group = {k: k for k in kernels}
        self._at = {k: kernel.at for k, kernel in kernels.items()}  # by group: the last of its members
        self._first = dict(self._at)
        self._rank = {at: rank for rank, at in enumerate(sorted(self._at.values()))}
        self._loops = dict.fromkeys(kernels, 1)
        self._spans: list[tuple[int, int]] = []  # first and last member of every group that was made, by the first
        self._next: dict[int, set[int]] = {k: set() for k in kernels}
        for k, kernel in kernels.items():
            for source in kernel.behind:
                self._next[source].add(k)

    def fuse(self, a: int, b: int, nbytes: int) -> None:
        """Makes two that share `nbytes` one kernel, unless refused, or something between reads one for the other."""
        a, b = self._of(a), self._of(b)
        if a == b or self._is_refused(a, b, nbytes) or self._path(a, b) or self._path(b, a):
            return
        self._group[b] = a
        self._loops[a] += self._loops[b]
        self._at[a] = max(self._at[a], self._at[b])
        self._first[a] = min(self._first[a], self._first[b])
        self._next[a] |= self._next.pop(b)
        bisect.insort(self._spans, (self._first[a], self._at[a]))

    def _is_refused(self, a: int, b: int, nbytes: int) -> bool:
        """By what holds for all kernels, or by what holds for those that do not read each other."""
        if self._loops[a] + self._loops[b] > config.max_fusion_size:
            return True
        span = self._rank[max(self._at[a], self._at[b])] - self._rank[min(self._first[a], self._first[b])]
        if span <= FARTHEST and nbytes >= config.score_fusion_memory_threshold:
            return False
        return not (self._reads(b, a) or self._reads(a, b))

    def _reads(self, reader: int, group: int) -> bool:
        return any(self._of(n) == reader for n in self._next[group])

    def places(self) -> dict[int, int]:
        at = dict(self._at)
        for group in self._readers_first():
            at[group] = min([at[group], *(at[self._of(n)] for n in self._next[group] if self._of(n) != group)])
        return {k: at[self._of(k)] for k in self._group}

    def _of(self, kernel: int) -> int:
        while self._group[kernel] != kernel:
            self._group[kernel] = self._group[self._group[kernel]]
            kernel = self._group[kernel]
        return kernel

    def _path(self, start: int, end: int) -> bool:
        """Whether there is a way from one to the other that is no single step."""
        latest = self._latest(end)
        work = [g for n in self._next[start] if (g := self._of(n)) not in (start, end)]
        seen = set(work)
        while work:
            for n in self._next[work.pop()]:
                group = self._of(n)
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

    def _readers_first(self) -> Sequence[int]:
        """Groups, each behind all that read it."""
        order, done = [], set[int]()
        for root in self._next:
            work = [(root, iter(sorted({self._of(n) for n in self._next[root]} - {root})))]
            if root in done:
                continue
            done.add(root)
            while work:
                group, rest = work[-1]
                reader = next((r for r in rest if r not in done), None)
                if reader is None:
                    order.append(group)
                    work.pop()
                else:
                    done.add(reader)
                    work.append((reader, iter(sorted({self._of(n) for n in self._next[reader]} - {reader}))))
        return order
