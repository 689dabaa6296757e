"""Moves our nodes out of the C++ functions of Inductor's code for the CPU, to places between these functions.

    planned   mm -> loops_1 -> wait_load_ -> loops_2 -> store -> loops_3 -> mm    three functions
    here      mm -> wait_load_ -> loops_1 -> loops_2 -> loops_3 -> store -> mm    one

Inductor writes all loops between two calls into one C++ function. A node of ours is a call, so it cuts a function in
two. Every layer has its own transfers, so equal layers are cut at different places, and share no code. The C++ compiler
compiles each piece, and that is most of the first step.

So a node of ours moves to the beginning or to the end of the loops around it. Dependencies stay, and so does the order
among our nodes. Nothing moves past a library call. Loops stay as planned in two cases:

- Moving would raise the peak of the graph, by Inductor's estimate. A function has all of its results in memory before
  any tensor that it reads is freed. Sizes that only the run knows count as 0.
- A node among them waits for memory (`block`, `strict`): the plan has it there for its limit.

What it costs: a store, a release or a load comes later by the time of some loops, or a wait comes earlier by as much. A
load that comes later costs nothing where the runtime reads ahead.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import networkx as nx

from ssd_fx.compat import inductor_config as config
from ssd_fx.compat.inductor import BaseSchedulerNode, NopKernelSchedulerNode, OrderedSet, V, memory

Kernel: TypeAlias = BaseSchedulerNode  # not Inductor's own `Kernel`, which writes the code of one


def move_out_of_functions(
    order: list[Kernel], ours: AbstractSet[Kernel], stay: AbstractSet[Kernel], needs: nx.DiGraph[Kernel]
) -> list[Kernel]:
    """`order`, with `ours` moved out of C++ functions, except from loops that have one of `stay` among them.

    `needs` has an edge to every kernel from what must run before it. `order` keeps these edges, and so does the result.
    """
    planned = list(_split(order, lambda kernel: kernel not in ours and not _is_loops(kernel)))
    moved = [run if stay & set(run) else _Loops(run, ours, needs).with_ours_outside() for run in planned]
    if moved == planned:
        return order
    buffers = _buffers(order, ours)
    limit = max(_peaks(planned, ours, buffers))
    peaks = _peaks(moved, ours, buffers)
    chosen = (m if peak <= limit else p for p, m, peak in zip(planned, moved, peaks, strict=True))
    return list(itertools.chain.from_iterable(chosen))


def _split(kernels: Iterable[Kernel], alone: Callable[[Kernel], bool]) -> Iterator[list[Kernel]]:
    """Each kernel that is `alone`, and the runs of others between them."""
    for is_alone, group in itertools.groupby(kernels, alone):
        run = list(group)
        yield from ([kernel] for kernel in run) if is_alone else [run]


def _is_loops(kernel: Kernel) -> bool:
    """Whether a kernel becomes a part of a C++ function."""
    device = kernel.get_device()
    cpp = device is not None and device.type == "cpu" and config.cpu_backend == "cpp"
    return cpp and not kernel.is_extern() and not kernel.is_template()


class _Loops:
    """Kernels that would be one C++ function without ours. A kernel's place is the number of loops before it."""

    def __init__(self, kernels: list[Kernel], ours: AbstractSet[Kernel], needs: nx.DiGraph[Kernel]) -> None:
        self.kernels, self.needs = kernels, needs
        counts = list(itertools.accumulate((kernel not in ours for kernel in kernels), initial=0))
        places = dict(zip(kernels, counts[:-1], strict=True))
        self.loops = {kernel: place for kernel, place in places.items() if kernel not in ours}
        self.planned = {kernel: place for kernel, place in places.items() if kernel in ours}
        # kernels that only name memory are no code: nothing is cut before the first of the others or behind the last
        code = [place for kernel, place in self.loops.items() if not isinstance(kernel, NopKernelSchedulerNode)]
        self.code = code or [0]
        self.begin, self.end = self.code[0], self.code[-1] + 1

    def with_ours_outside(self) -> list[Kernel]:
        """The kernels in an order with as few cuts as can be; in the planned order if that has no more."""
        places = self._places()
        if self._cuts(places.values()) >= self._cuts(self.planned.values()):
            return self.kernels
        # Ours come before the loops of their place, and in their own order: the sort is stable.
        at: dict[Kernel, float] = {kernel: place + 0.5 for kernel, place in self.loops.items()}
        at |= places
        return sorted(self.kernels, key=at.__getitem__)

    def _cuts(self, places: Iterable[int]) -> int:
        before = {bisect_left(self.code, place) for place in places}
        return len(before - {0, len(self.code)})

    def _places(self) -> dict[Kernel, int]:
        """Where each of our nodes goes, from the first to the last one.

        A node that is planned at the beginning stays there. Another goes to the end if no loop needs it earlier. Else
        it goes to the place of our node before it (at first, to the beginning) if the loops that it needs have run by
        then. Else it goes as late as it may, so that the next ones can share its cut.
        """
        places, place = dict[Kernel, int](), 0
        for (kernel, planned), first, last in zip(self.planned.items(), self._first(), self._last(), strict=True):
            if planned <= self.begin:
                place = planned
            elif last >= self.end or first > max(place, self.begin):
                place = last
            else:
                place = max(place, min(self.begin, last))
            places[kernel] = place
        return places

    def _first(self) -> list[int]:
        """The first place where each of our nodes may be."""
        needed = ([self.loops[p] + 1 for p in self.needs.predecessors(k) if p in self.loops] for k in self.planned)
        return list(itertools.accumulate((max(each, default=0) for each in needed), max))

    def _last(self) -> list[int]:
        """The last place where each of our nodes may be."""
        needing = ([self.loops[s] for s in self.needs.successors(k) if s in self.loops] for k in reversed(self.planned))
        return list(itertools.accumulate((min(each, default=len(self.loops)) for each in needing), min))[::-1]


@dataclass(frozen=True)
class _Buffer:
    """A buffer, by Inductor's estimate. `freed`: the bytes that the last of its `users` frees, 0 for an output.

    `made_by`: None for an input. `overwritten`: whether loops that read it last may write a result in its place.
    """

    allocated: int
    freed: int
    made_by: Kernel | None
    users: AbstractSet[Kernel]
    overwritten: bool


def _buffers(order: list[Kernel], ours: AbstractSet[Kernel]) -> list[_Buffer]:
    """The buffers that Inductor allocates and frees, by its own estimate.

    It takes a handle to be as large as its tensor, so buffers that only `ours` use are left out. A load is two kernels,
    the call and the item of its result. Inductor counts the bytes as allocated for the first and freed for the second.
    """
    scheduler = order[0].scheduler
    outputs = OrderedSet(V.graph.get_output_names())
    _, inputs = memory.prepare_planning_info(
        order, scheduler.name_to_buf, scheduler.name_to_fused_node, OrderedSet(V.graph.graph_inputs), outputs
    )
    made: list[tuple[Any, Kernel]] = [(buffer, kernel) for kernel in order for buffer in kernel.get_outputs()]
    found = []
    for buffer, kernel in [*((each, None) for each in inputs.values()), *made]:
        name, info = buffer.get_name(), buffer.mpi_buffer
        users = set(info.succ_nodes) | ({kernel} if kernel else set())
        if not users <= ours:
            freed = 0 if name in outputs else info.size_free
            allocated = info.size_free if kernel is None or kernel in ours else info.size_alloc
            overwritten = config.inplace_buffers and (kernel is not None or name in scheduler.name_to_donated_buffer)
            found.append(_Buffer(allocated, freed, kernel, users, overwritten))
    return found


def _peaks(runs: Sequence[list[Kernel]], ours: AbstractSet[Kernel], buffers: Sequence[_Buffer]) -> list[int]:
    """The most bytes that are alive in each of `runs`."""
    calls = [list(_split(run, ours.__contains__)) for run in runs]  # all loops of a function are one call
    at = {kernel: i for i, call in enumerate(itertools.chain.from_iterable(calls)) for kernel in call}
    index = {kernel: i for i, kernel in enumerate(at)}
    change = [0] * (max(at.values()) + 2)
    made: Counter[tuple[Kernel, int]] = Counter()
    dead: Counter[tuple[Kernel, int]] = Counter()
    for buffer in buffers:
        last = max(buffer.users, key=index.__getitem__)
        change[at[buffer.made_by] if buffer.made_by else 0] += buffer.allocated
        change[at[last] + 1] -= buffer.freed
        if buffer.made_by:
            made[buffer.made_by, buffer.allocated] += 1
        dead[last, buffer.freed] += buffer.overwritten and _is_loops(last)
    for (kernel, nbytes), count in (made & dead).items():
        change[at[kernel]] -= nbytes * count
        change[at[kernel] + 1] += nbytes * count
    alive = itertools.accumulate(change)
    return [max(itertools.islice(alive, len(each))) for each in calls]
