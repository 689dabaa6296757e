"""The plan: the decision for every alias group, and where its nodes go.

    alias -> keep_compared -> mark -> merge_copies -> lay_out -> time -> lifetime -> price -> select -> insert

Each pass reads a `Partition` and returns a `Plan` with more of its fields filled. `insert` obeys the plan and decides
nothing. Node names are opaque keys, shared by forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ssd_fx.options import Tier
from ssd_fx.passes.axis import Item
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.schedule import EMPTY, Interval, Replay, Schedule

if TYPE_CHECKING:
    from ssd_fx.passes.partition import Partition

PlanPass = Callable[["Partition", "Plan"], "Plan"]  # it decides, and never edits a graph


@dataclass(frozen=True, slots=True)
class Keep:
    """The group stays in memory between forward and backward."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offload:
    """The group is stored once, released in the forward, and loaded again in the backward.

    `tier`: where it is stored, empty if the runtime decides. `binding`: the user marked it, so it is written even if it
    could stay resident under a budget of bytes.
    """

    tier: Tier | Literal[""] = ""
    binding: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """The group is computed again in the backward, by running the nodes of these names again.

    Only a plan that proposes another partition has this decision. In that other partition the group is not saved.
    """

    nodes: frozenset[str]


Decision = Keep | Offload | Recompute


@dataclass(frozen=True, slots=True)
class Mark:
    """What the user decided for a group; `reason` names the call, option or policy.

    `tier`: where the group is to be stored, in host memory only if that has room for it; empty if the planner decides.
    `itself`: the tensor was marked, not its module.
    """

    decision: Literal["keep", "offload", "prefer_offload", "recompute"]
    reason: str
    tier: Tier | Literal[""] = ""
    itself: bool = True


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of computing a group again.

    `nodes`: the names of the nodes that must run again. `needs`: the slots of the groups that they read. `launches`:
    how many of the nodes are a launch of their own.
    """

    seconds: float
    nodes: frozenset[str]
    needs: frozenset[int] = frozenset()
    launches: int = 0


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A tensor that is computed again, although PyTorch's own partition saves it; `base`: the node that makes it."""

    base: str
    module: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a budget sets, in bytes.

    The planner obeys three. `memory`: the peak, above the level before the step. `kept`: the groups that are kept
    although they could leave memory. `stays`: the groups that could leave memory, but are there when the backward
    begins, kept or not written yet. The runtime obeys the other two. `resident`: the tensors that may stay in memory in
    addition to the peak. That is the host budget, if the device is the CPU, and else 0. `shared`: the tensors that may
    stay in memory, counted over all graphs. Those stored last stay.
    """

    memory: float
    kept: float
    stays: float = math.inf
    resident: int = 0
    shared: int = 0


NodeTimes = tuple[tuple[float, ...], tuple[float, ...]]
"""The predicted start of every node in ms, for the forward and for the backward. The last entry of each is the end of
that graph."""


@dataclass(frozen=True, slots=True)
class Launches:
    """The kernels and library calls that the host launches on a device.

    `step`: their number in a step, with one for each gradient that autograd adds up. `again`: names of the forward's
    nodes that are a launch each if the backward computes them again. The other nodes become parts of the kernels that
    read them.
    """

    step: int = 0
    again: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Plan:
    """Everything that was decided for one partitioned graph. Each pass fills its fields; mappings are by slot.

    `graph`: the graph's name. `items`: the groups that can be offloaded, on the axis of nodes. `schedule`: where their
    nodes go, on the same axis. `gone_by`: some groups are still being written in the backward, and other tensors need
    their memory before the load. For these, the event of the backward at which their memory goes, given by its position
    in `schedule.backward` (`planner/freed_by_copies.py`). `replay` is the predicted step, `baseline` the step with
    everything kept, both on the axis of operators. If the partition recomputes more than PyTorch's own, `proposal` is
    the plan that asked for that, and `own` a plan of PyTorch's own partition.
    """

    graph: str
    groups: tuple[AliasGroup, ...] = ()
    marks: MappingProxyType[int, Mark] = field(default_factory=lambda: MappingProxyType({}))
    modules: MappingProxyType[int, str] = field(default_factory=lambda: MappingProxyType({}))
    node_ms: NodeTimes | None = None
    launches: Launches = Launches()
    items: MappingProxyType[int, Item] = field(default_factory=lambda: MappingProxyType({}))
    prices: MappingProxyType[int, Price] = field(default_factory=lambda: MappingProxyType({}))
    decisions: MappingProxyType[int, Decision] = field(default_factory=lambda: MappingProxyType({}))
    schedule: Schedule = EMPTY
    gone_by: MappingProxyType[int, int] = field(default_factory=lambda: MappingProxyType({}))
    limits: Limits = Limits(math.inf, math.inf)
    replay: Replay | None = None
    baseline: Replay | None = None
    proposal: Plan | None = None
    own: Plan | None = None

    @property
    def origin(self) -> Plan:
        """A plan of PyTorch's own partition, whose baseline is the step without ssd_fx."""
        return self.own or self

    @property
    def recomputed(self) -> tuple[Recomputed, ...]:
        """The tensors that this partition was made to compute again, in the order of production."""
        asked = self.proposal
        if asked is None:
            return ()
        # those that were computed again before this proposal: for the user's policy, or in a selective partition
        before = asked.recomputed
        groups = [g for g in asked.groups if isinstance(asked.decisions.get(g.slot), Recompute)]
        return before + tuple(
            Recomputed(g.base, asked.modules[g.slot], g.nbytes, asked.prices[g.slot].seconds) for g in groups
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages that the forward saves, without parameters, buffers and outputs, which stay anyway."""
        return sum(g.nbytes for g in self.groups)

    @property
    def offloaded(self) -> tuple[AliasGroup, ...]:
        return tuple(g for g in self.groups if isinstance(self.decisions.get(g.slot), Offload))

    def tier(self, slot: int) -> str:
        """The tier of an offloaded group; empty if the group is not offloaded, or the runtime decides."""
        decision = self.decisions.get(slot)
        return decision.tier if isinstance(decision, Offload) else ""

    @property
    def recomputed_nodes(self) -> frozenset[str]:
        """Names of the nodes that run again for the recomputed groups, and of those groups' members."""
        names: set[str] = set()
        for group in self.groups:
            decision = self.decisions.get(group.slot)
            if isinstance(decision, Recompute):
                names |= decision.nodes
                names |= {member.name for member in group.members}
        return frozenset(names)

    @property
    def saved_nodes(self) -> frozenset[str]:
        """Names of the members and bases of the groups that are not recomputed."""
        stay = [g for g in self.groups if not isinstance(self.decisions.get(g.slot), Recompute)]
        return frozenset(name for g in stay for name in (g.base, *(m.name for m in g.members)))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of all storages of offloaded groups."""
        return sum(g.nbytes for g in self.offloaded)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all storages that stay in memory between forward and backward."""
        return self.saved_bytes - self.offloaded_bytes

    @property
    def inflight_bytes(self) -> int:
        """The most bytes that are on their way out of memory at a time: stored, and not written yet."""
        found, edges = replay_of(self), list[tuple[float, int]]()
        for i, trip in found.schedule.items():
            if self.schedule[found.step.slots[i]].is_later:
                continue  # only another forward begins the write
            nbytes = found.step.moved[i]
            edges += (found.ends[trip.store.at], nbytes), (found.writes[i][1], -nbytes)
        return max(itertools.accumulate(nbytes for _, nbytes in sorted(edges)), default=0)

    def times(self, slot: int) -> dict[str, Interval]:
        """The predicted times of a group that can be offloaded: begin and end in seconds from the start of the step.

        `store`: it is produced. `release`: the forward reads it no more, and may wait for its write. `wait`: the step
        waits for its read until the backward uses it. `last`: the backward has used it. Only if they happen: `write`
        and `read`, its transfers, and `gone`, while its memory is free.
        """
        found, item = replay_of(self), self.items[slot]
        step, starts, ends = found.step, found.starts, found.ends
        produced, last = ends[step.operator(item.produced)], ends[step.operator(item.last_bwd_use)]
        used, released = starts[step.operator(item.first_use)], ends[step.operator(item.last_use)]
        i = step.slots.index(slot) if slot in self.schedule else -1
        trip = found.schedule.get(i)
        if trip is None:
            return {"store": (produced, produced), "release": (released,) * 2, "wait": (used,) * 2, "last": (last,) * 2}
        released, load, write = ends[trip.release.at], starts[trip.load.at], found.writes[i]
        until = max(released, write[1]) if trip.blocks else released
        waited_s, wait_s = (found.stalls.get(event, 0.0) for event in (trip.release, trip.wait))
        spans = {
            "store": (produced, produced),
            "release": (until - waited_s, until),  # other releases at its place may wait before it
            "wait": (used - wait_s, used),
            "last": (last, last),
        }
        if i in found.reads:
            gone = max(released, write[1])
            spans |= {"write": write, "read": found.reads[i], "gone": (gone, max(load, gone))}
        elif not self.schedule[slot].is_later:  # the load cuts the write short
            spans["write"] = (min(write[0], load), load)
        return spans

    def undecided(self) -> Plan:
        """The plan as it was after the analyses, with nothing decided."""
        return self.with_(prices={}, decisions={}, schedule=EMPTY, gone_by={}, replay=None, baseline=None)

    def with_(self, **changes: object) -> Plan:
        """A copy with some fields replaced; dictionaries become read-only."""
        frozen = {k: MappingProxyType(v) if isinstance(v, dict) else v for k, v in changes.items()}
        return replace(self, **frozen)  # type: ignore[arg-type]


def replay_of(plan: Plan) -> Replay:
    """The replay of a plan that is decided."""
    assert plan.replay is not None, "select fills it"
    return plan.replay
