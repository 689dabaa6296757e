"""Which kernels of a graph Inductor will fuse because they read the same buffers, and when the fused ones run.

norm = f(x)      mm(norm)         both loops read x and go over the same elements: one kernel, which runs when
...                               the mm needs `norm`; what else it computes is there, and takes memory, that
dx = g(x, dy)                     much earlier than in the graph
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Of the readers of a buffer so many behind each are looked at: what all layers read would be a square of pairs.
NEAR = 8


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
    for a, b in _candidates(kernels):
        groups.fuse(a, b)
    return groups.places()


def _candidates(kernels: Mapping[int, Kernel]) -> list[tuple[int, int]]:
    """Pairs that share bytes and iterate alike: most bytes first, then the nearest, as Inductor scores them."""
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
    return sorted(shared, key=lambda pair: (-shared[pair], pair[1] - pair[0], pair))


class _Groups:
    """Kernels that became one; `next` has the groups that read what a group wrote."""

    def __init__(self, kernels: Mapping[int, Kernel]) -> None:
        self._group = {k: k for k in kernels}
        self._at = {k: kernel.at for k, kernel in kernels.items()}  # by group: the last of its members
        self._first = dict(self._at)
        self._spans: list[tuple[int, int]] = []  # first and last member of every group that was made, by the first
        self._next: dict[int, set[int]] = {k: set() for k in kernels}
        for k, kernel in kernels.items():
            for source in kernel.behind:
                self._next[source].add(k)

    def fuse(self, a: int, b: int) -> None:
        """Makes the two one kernel unless something in between reads the one and is read by the other."""
        a, b = self._of(a), self._of(b)
        if a == b or self._path(a, b) or self._path(b, a):
            return
        self._group[b] = a
        self._at[a] = max(self._at[a], self._at[b])
        self._first[a] = min(self._first[a], self._first[b])
        self._next[a] |= self._next.pop(b)
        bisect.insort(self._spans, (self._first[a], self._at[a]))

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
