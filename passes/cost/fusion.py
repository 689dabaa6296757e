"""Which kernels of a graph Inductor will fuse because they read the same buffers, and when the fused kernels run.

    norm = f(x)      mm(norm)         both loops read x and go over the same elements: one kernel, which runs when
    ...                               the mm needs `norm`. Its other results, such as `dx`, then take memory much
    dx = g(x, dy)                     earlier than in the graph

Inductor refuses some fusions (`can_fuse` and `can_fuse_horizontal` in its choices.py, torch 2.13). A kernel may not
have too many loops. Loops that do not read each other must share enough bytes and must not be too far apart. We have
Inductor refuse more fusions (`are_apart`). For example, the first layers of an encoder and of a decoder read the same
table. If these layers were one kernel, the results of both would be alive from the encoder on.
"""

from __future__ import annotations

import bisect
import graphlib
import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ssd_fx.compat import inductor_config as config

# Each reader of a buffer is paired with the next so many readers. If all layers read a buffer, its readers would make
# too many pairs otherwise.
NEAR = 8
# Loops that do not read each other are fused only if they are at most so many kernels apart: a number in the code of
# `Scheduler.are_long_distant_nodes`. Inductor counts our own nodes among them, but these are not known yet when fusion
# is predicted.
FARTHEST = 64
# At most so many library calls may stand between two such loops: about as many as a layer has. This limit is ours, and
# `lowering/order.py` has Inductor keep it too.
CALLS_BETWEEN = 8
# The same limit if the backward computes the earlier loop again, such as that of a gelu. Between this loop and the loop
# of gelu's backward stand two products, for the gradients of the next linear layer. Both loops read the same tensor,
# and they would read it twice if they were kept apart.
CALLS_BEHIND_AGAIN = 2


# If a library call stands between two such loops, the bytes that both read must be at least this share of the bytes
# that the later one writes. A loss may be computed in pieces, some rows at a time. The loops of its pieces share only
# the targets and a few numbers. In one kernel the logits of all pieces would be alive at once.
WORTH_SHARING = 1 / 16


def are_apart(calls: int, earlier: bool, later: bool, shared: int, written: int) -> bool:
    """Whether two loops that do not read each other must not be fused, with so many library calls between them.

    `earlier`, `later`: whether the backward computes that loop again by our choice. If they were fused, the later loop
    would move to the place of the earlier one, and recomputing should happen late. `shared`: the bytes that both read.
    `written`: the bytes that the later loop writes.
    """
    most = 0 if later else CALLS_BEHIND_AGAIN if earlier else CALLS_BETWEEN
    return calls > most or (calls > 0 and shared < WORTH_SHARING * written)


@dataclass(frozen=True, slots=True)
class Space:
    """The elements that a loop goes over: their number, and how the loop is nested.

    `outer`: the iterations of the outermost of nested loops. A reduction has an outer loop over its results. On the CPU
    any loop has an outer loop if an input is read again and again, as a row or a column is (broadcast), or if an input
    is not dense in the order of its dimensions. Else one loop goes over all elements, and `outer` is their number.
    """

    elements: int
    outer: int
    reduces: bool
    on_cpu: bool


@dataclass
class Loop:
    """A loop, or a library call. `space`: None for a library call, which is fused with nothing.

    `at`: its place in the graph. `reads`, `writes`: storages, with their bytes. `behind`: the loops whose results it
    reads. `again`: the backward computes it again by our choice. `running`: it is one of the additions of a long sum.
    `onto`: the storages of which it writes over a copy, if it scatters. It does not read them itself, and no kernel
    that writes its result also reads it, since only the data knows the places.
    """

    at: int
    space: Space | None = None
    reads: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)
    again: bool = False
    running: bool = False
    onto: Collection[int] = ()


def fuse(loops: Mapping[int, Loop]) -> Groups:
    """Which loops become one kernel."""
    groups = Groups(loops)
    for (a, b), nbytes in _candidates(loops).items():
        groups.fuse(a, b, nbytes)
    return groups


def _candidates(loops: Mapping[int, Loop]) -> dict[tuple[int, int], int]:
    """Pairs of loops that can be fused, and the bytes that they share: most first, then nearest, as Inductor does."""
    users: dict[int, list[int]] = {}
    spaces = {k: loop.space for k, loop in loops.items() if loop.space is not None}
    for k in sorted(spaces):
        for key in (loops[k].reads.keys() - loops[k].onto) | loops[k].writes.keys():
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
    """Whether two loops can be one kernel. `reads`: the second reads the result of the first."""
    if not a.on_cpu:
        summed, other = (a, b) if a.reduces else (b, a)
        return summed == other or (
            summed.reduces and not other.reduces and other.elements in (summed.elements, summed.outer)
        )
    if a.outer == b.outer:  # they share the outermost loop, and their inner loops follow each other
        return reads or a.elements == b.elements
    return reads and not a.reduces and not b.reduces and a.elements == b.elements == b.outer


@dataclass(slots=True)
class _Group:
    """The loops that became one kernel; `loops` is their number. They stand at the places from `first` to `last`.

    `results`: how many results each of its reductions has; None if it has no reduction. `written`: bytes that it
    writes. `readers`: loops, of any group, that read its results; `barred`: those that read what it scatters. `again`,
    `running`: as in `Loop`, if that holds for one of its loops.
    """

    first: int
    last: int
    results: int | None
    written: int
    loops: int = 1
    readers: set[int] = field(default_factory=set)
    barred: set[int] = field(default_factory=set)
    again: bool = False
    running: bool = False

    def merge(self, other: _Group) -> None:
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)
        self.results = other.results if self.results is None else self.results
        self.written += other.written
        self.loops += other.loops
        self.readers |= other.readers
        self.barred |= other.barred
        self.again |= other.again
        self.running |= other.running


class Groups:
    """The loops by group. A group is named by one of its loops, its root."""

    def __init__(self, loops: Mapping[int, Loop]) -> None:
        self._parent = {k: k for k in loops}  # by loop, one of the same group; a root is its own parent
        self._groups: dict[int, _Group] = {}  # by root
        for k, loop in loops.items():
            results = loop.space.outer if loop.space is not None and loop.space.reduces else None
            written = sum(loop.writes.values())
            self._groups[k] = _Group(loop.at, loop.at, results, written, again=loop.again, running=loop.running)
        for k, loop in loops.items():
            for source in loop.behind:
                self._groups[source].readers.add(k)
                if loops[source].onto:
                    self._groups[source].barred.add(k)
        self._rank = {at: rank for rank, at in enumerate(sorted(loop.at for loop in loops.values()))}
        self._calls = sorted(loop.at for loop in loops.values() if loop.space is None)
        self._spans: list[tuple[int, int]] = []  # (first, last) of every merged group, sorted by `first`

    def fuse(self, a: int, b: int, nbytes: int) -> None:
        """Merge two groups that share `nbytes`, unless that is refused, or one reads the other through other groups."""
        a, b = self.of(a), self.of(b)
        if a == b or self._is_refused(a, b, nbytes) or self._path(a, b) or self._path(b, a):
            return
        self._parent[b] = a
        group = self._groups[a]
        group.merge(self._groups.pop(b))
        bisect.insort(self._spans, (group.first, group.last))

    def _is_refused(self, a: int, b: int, nbytes: int) -> bool:
        """Whether a rule forbids merging two groups. Some rules are for all kernels, others only for kernels that do
        not read each other. A running sum and its reader are not merged if a library call stands between them."""
        one, other = self._groups[a], self._groups[b]
        if one.loops + other.loops > config.max_fusion_size:
            return True
        if None not in (one.results, other.results) and one.results != other.results:
            return True
        between = self._calls_between(one, other)
        for source, reader in ((one, b), (other, a)):
            if any(self.of(n) == reader for n in source.barred):
                return True
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
        """When each loop runs: at the place of the last loop of its kernel, or before a reader whose place is earlier.

        In the second case the kernel gets a place where no other kernel runs, behind all kernels that it reads. If two
        kernels had one place, the tensors that one of them reads would seem alive beside those that the other writes.
        If no place is free, the kernel gets the place of its reader. A kernel never runs before the first loop of any
        kernel that it needs. So if a loop is fused with the loop of a gradient that needs kernels at the end of the
        backward, their kernel runs there too, and its readers run later, each at a place of its own if there is one.
        That is the order of `lowering/order.py`.
        """
        at = {root: group.last for root, group in self._groups.items()}
        readers = {root: {self.of(n) for n in group.readers} - {root} for root, group in self._groups.items()}
        begins, ready = dict.fromkeys(at, -1), dict.fromkeys(at, 0)
        upwards = list(graphlib.TopologicalSorter(readers).static_order())  # readers come before what they read
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
        now, last = -1, max(at.values(), default=0)
        for root in _in_order(at, readers):
            if at[root] < now:
                is_free = now + 1 < last and now + 1 not in taken
                at[root] = now + 1 if is_free else now
            now = at[root]
        return {k: at[self.of(k)] for k in self._parent}

    def of(self, kernel: int) -> int:
        """The root of a loop's group."""
        while self._parent[kernel] != kernel:
            self._parent[kernel] = self._parent[self._parent[kernel]]
            kernel = self._parent[kernel]
        return kernel

    def _path(self, start: int, end: int) -> bool:
        """Whether the group `end` reads the group `start` through other groups."""
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
        """The last place where a group on a path to `end` may begin. A path goes from a loop to a later one that reads
        it. Within a group it may arrive at the last loop and leave from the first, which stands before it."""
        latest = self._groups[end].last
        for first, last in self._spans:
            if first > latest:
                break
            latest = max(latest, last)
        return latest


def _in_order(at: Mapping[int, int], readers: Mapping[int, set[int]]) -> Iterator[int]:
    """Kernels behind those that they read, and else by their places."""
    inputs = Counter(reader for found in readers.values() for reader in found)
    heap = [(place, root) for root, place in at.items() if not inputs[root]]
    heapq.heapify(heap)
    while heap:
        _, root = heapq.heappop(heap)
        yield root
        for reader in readers[root]:
            inputs[reader] -= 1
            if not inputs[reader]:
                heapq.heappush(heap, (at[reader], reader))
