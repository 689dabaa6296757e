"""A training step on one axis, as the planner sees it: operators, and the alias groups as items.

    forward    produced ........ last_use
    backward   first_use ....... last_bwd_use

A place on the axis is an index: of a node in a `Plan`, of an operator in the planner, which merges nodes
(`planner/step.py`). The indices of the backward follow those of the forward.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ssd_fx.options import Tier
    from ssd_fx.passes.cost.machine import Machine

T = TypeVar("T")


class Choice(enum.Enum):
    """The choices for an alias group between forward and backward.

    A group that is deferred is offloaded, but it is written when there is nothing else to write, and loaded first. If
    it is still in memory then, it is forwarded: nothing is read.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    DEFER = "defer"

    __hash__ = object.__hash__  # Enum's own is a Python function, and the search looks up tuples of thousands of these


CHOICES = frozenset({Choice.KEEP, Choice.RECOMPUTE, Choice.OFFLOAD})  # these may be allowed; only the search defers


@dataclass(frozen=True, slots=True)
class Item:
    """An alias group of `nbytes`, and its places on the axis: where it is produced and read last in the forward, read
    first and last in the backward.

    `choices`: those that are allowed. To compute the item again takes `recompute_s` seconds and `launches` launches of
    the host, and the items `needs` must be in memory. `tier`: where it goes if it is offloaded, to host memory only if
    that has room for it; None leaves that to the planner.
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
    launches: int = 0

    @property
    def moved_nbytes(self) -> int:
        """Bytes that are written and read back; fewer than `nbytes` where a part of the storage is enough."""
        return self.nbytes if self.stored_nbytes is None else self.stored_nbytes


@dataclass(frozen=True, slots=True)
class Shared:
    """A cost that is in the prices of several items. If some of them are recomputed together, it is paid once."""

    seconds: float
    items: tuple[int, ...]
    launches: int = 0


def _of_items(field: Callable[[Item], int]) -> cached_property[list[int]]:
    """A list with one value for each item. Every replay of the step reads it, so it is made once."""
    return cached_property(lambda step: [field(item) for item in step.items])


@dataclass(frozen=True)
class Arrays:
    """Fields of the items of a step as arrays, and the step's `change`. Bytes are exact up to 2**53."""

    nbytes: npt.NDArray[np.float64]
    change: npt.NDArray[np.float64]
    produced: npt.NDArray[np.intp]
    last_use: npt.NDArray[np.intp]


@dataclass(frozen=True)
class Step:
    """One training step, as the planner sees it.

    `seconds` has the time of every operator; the first `forward` of them are the forward's. `base` has the bytes that
    are alive during every operator, whatever is chosen for the items. Up to `host_budget` bytes of items may be in host
    memory. `launches`: how many launches of the host a step has. `shared`: the costs that several items share. If the
    step is that of a graph, `slots` has the slot of every item, and `nodes` the first and the last node of every
    operator.
    """

    seconds: tuple[float, ...]
    base: tuple[int, ...]
    forward: int
    items: tuple[Item, ...]
    host_budget: int = 0
    launches: int = 0
    shared: tuple[Shared, ...] = ()
    slots: tuple[int, ...] = ()
    nodes: tuple[tuple[int, int], ...] = field(repr=False, default=())

    @cached_property
    def own_again_s(self) -> list[float]:
        """Seconds to recompute every item, without its shared costs. A set of items never costs less than the sum of
        these."""
        own = [item.recompute_s for item in self.items]
        for shared in self.shared:
            for i in shared.items:
                own[i] -= shared.seconds
        return own

    @cached_property
    def fair_again_s(self) -> list[float]:
        """Seconds to recompute every item, with a part of its shared costs: these are split by bytes, as if all items
        that share them were recomputed."""
        fair = list(self.own_again_s)
        for shared in self.shared:
            nbytes = sum(self.items[i].nbytes for i in shared.items)
            for i in shared.items:
                fair[i] += shared.seconds * self.items[i].nbytes / max(nbytes, 1)
        return fair

    def launched(self, recomputed: Collection[int]) -> int:
        """The number of launches of the host if these items are recomputed."""
        together = frozenset(recomputed)
        alone = sum(self.items[i].launches for i in together)
        twice = (s.launches * max(len(together.intersection(s.items)) - 1, 0) for s in self.shared if s.launches)
        return self.launches + alone - sum(twice)

    nbytes = _of_items(lambda item: item.nbytes)
    moved = _of_items(lambda item: item.moved_nbytes)
    produced = _of_items(lambda item: item.produced)
    last_use = _of_items(lambda item: item.last_use)
    first_use = _of_items(lambda item: item.first_use)
    free_bytes = _of_items(lambda item: item.nbytes if len(item.choices) > 1 else 0)  # 0 if the item has no choice

    @cached_property
    def arrays(self) -> Arrays:
        places = (np.array(each, dtype=np.intp) for each in (self.produced, self.last_use))
        return Arrays(np.array(self.nbytes, dtype=np.float64), np.array(self.change, dtype=np.float64), *places)

    @cached_property
    def movable(self) -> list[int]:
        """The items that may be offloaded."""
        return [i for i, item in enumerate(self.items) if Choice.OFFLOAD in item.choices]

    @cached_property
    def least_moved(self) -> float:
        """The smallest share of its bytes that any item writes and reads back."""
        return min((moved / n for moved, n in zip(self.moved, self.nbytes, strict=True) if n), default=0.0)

    @cached_property
    def chains(self) -> list[tuple[int, tuple[int, ...]]]:
        """The items that can be computed again only from others, each with these; the last produced comes first."""
        order = sorted(range(len(self.items)), key=self.produced.__getitem__, reverse=True)
        return [(i, self.items[i].needs) for i in order if self.items[i].needs]

    @cached_property
    def change(self) -> list[int]:
        """With everything kept, how the bytes alive change from each operator to the next."""
        change = [after - before for before, after in itertools.pairwise((0, *self.base, 0))]
        for item in self.items:
            change[item.produced] += item.nbytes
            change[item.last_bwd_use + 1] -= item.nbytes
        return change

    @cached_property
    def everything(self) -> int:
        """The peak in bytes with everything kept."""
        return max(itertools.accumulate(self.change[:-1]), default=0)

    @cached_property
    def floor(self) -> int:
        """The peak in bytes if all items that can be offloaded or recomputed are gone, with infinitely fast I/O."""
        change = self.change.copy()
        for item in self.items:
            if item.choices != {Choice.KEEP}:
                change[item.last_use + 1] -= item.nbytes
                change[item.first_use] += item.nbytes
        return max(itertools.accumulate(change[:-1]), default=0)

    def kept_bytes(self, choices: Sequence[Choice]) -> int:
        """Bytes of the items that are kept although they could be offloaded or recomputed."""
        return sum([nbytes for nbytes, c in zip(self.free_bytes, choices, strict=True) if c is Choice.KEEP])

    def operator(self, node: int) -> int:
        """The operator that a node of the graph belongs to."""
        return bisect_right(self.nodes, (node, math.inf)) - 1

    @cached_property
    def _found(self) -> dict[object, object]:
        return {}

    def once(self, analysis: Callable[[Step, Machine], T], machine: Machine) -> T:
        """The result of `analysis`, computed once for each machine."""
        key = (analysis, machine)
        if key not in self._found:
            self._found[key] = analysis(self, machine)
        return cast(T, self._found[key])
