"""What a plan decides about: the alias groups of one training step as numbers, and what may become of each."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ssd_fx.passes.cost.machine import Machine, Tier


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


@dataclass(frozen=True, slots=True)
class Shared:
    """What the prices of several items have in common: those that are recomputed together compute it once."""

    seconds: float
    items: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One training step: seconds of every operator, forward then backward; `base`: bytes alive during each that no
    choice touches; `forward`: the number of forward operators; `host_budget`: bytes that may be in host memory;
    `shared`: seconds that are in the price of more than one item."""

    seconds: tuple[float, ...]
    base: tuple[int, ...]
    forward: int
    items: tuple[Item, ...]
    host_budget: int = 0
    shared: tuple[Shared, ...] = ()

    def again_s(self, recomputed: Collection[int]) -> float:
        """Seconds to recompute these items together."""
        together = frozenset(recomputed)
        alone = math.fsum(self.items[i].recompute_s for i in together)
        return alone - math.fsum(s.seconds * max(len(together.intersection(s.items)) - 1, 0) for s in self.shared)

    @cached_property
    def own_again_s(self) -> list[float]:
        """Seconds to recompute every item, without what it shares with others: no set of items costs less."""
        own = [item.recompute_s for item in self.items]
        for shared in self.shared:
            for i in shared.items:
                own[i] -= shared.seconds
        return own

    @cached_property
    def fair_again_s(self) -> list[float]:
        """Seconds to recompute every item, with its part of what it shares: by bytes, as if all were recomputed."""
        fair = list(self.own_again_s)
        for shared in self.shared:
            nbytes = sum(self.items[i].nbytes for i in shared.items)
            for i in shared.items:
                fair[i] += shared.seconds * self.items[i].nbytes / max(nbytes, 1)
        return fair

    @cached_property
    def kernels(self) -> int:
        """How many operators take time."""
        return sum(seconds > 0 for seconds in self.seconds)

    @cached_property
    def columns(self) -> Columns:
        """What is read of every item each time that the step is played."""
        items = self.items
        change = [after - before for before, after in itertools.pairwise((0, *self.base, 0))]
        for item in items:
            change[item.produced] += item.nbytes
            change[item.last_bwd_use + 1] -= item.nbytes
        return Columns(
            nbytes=[item.nbytes for item in items],
            moved=[item.moved_nbytes for item in items],
            produced=[item.produced for item in items],
            last_use=[item.last_use for item in items],
            first_use=[item.first_use for item in items],
            free_bytes=[item.nbytes if len(item.choices) > 1 else 0 for item in items],
            change=change,
        )

    @cached_property
    def _seconds_of(self) -> dict[tuple[Machine, Tier], LaneSeconds]:
        return {}

    def seconds_of(self, machine: Machine, tier: Tier) -> LaneSeconds:
        """What transfers to a tier and back take, computed once."""
        found = self._seconds_of.get((machine, tier))
        if found is None:
            moved, lanes = self.columns.moved, machine.lanes(tier)
            found = self._seconds_of[machine, tier] = LaneSeconds(
                own=[machine.own_s(nbytes, tier) for nbytes in moved],
                write=[nbytes / lanes.write_bw for nbytes in moved],
                read=[nbytes / lanes.read_bw for nbytes in moved],
                latency=lanes.latency_s,
            )
        return found


@dataclass(frozen=True, slots=True)
class Columns:
    """The items of a step, field by field.

    `free_bytes`: bytes of an item that has a choice, else 0. `change`: how the bytes alive with everything kept change
    from each operator to the next.
    """

    nbytes: list[int]
    moved: list[int]
    produced: list[int]
    last_use: list[int]
    first_use: list[int]
    free_bytes: list[int]
    change: list[int]


@dataclass(frozen=True, slots=True)
class LaneSeconds:
    """Seconds of every item: of the compute lane at either end of its transfer, of the write lane, of the read lane."""

    own: list[float]
    write: list[float]
    read: list[float]
    latency: float


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
