"""The plan: what is decided for every alias group, and where its nodes go.

    Plan(graph) -> alias -> mark -> merge_copies -> time -> lifetime -> select -> insert

Each pass reads a `Partition` and returns a `Plan` with more of its fields filled. `insert` obeys the plan and decides
nothing. Node names are opaque keys, shared by forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ssd_fx.passes.groups import AliasGroup

if TYPE_CHECKING:
    from ssd_fx.passes.partition import Partition

PlanPass = Callable[["Partition", "Plan"], "Plan"]  # decides, never edits FX


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

    tier: Literal["host", "ssd", ""] = ""
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
    """What the user wants of a group; `reason` names the call, option or policy.

    `tier`: where it is to be stored, in host memory only as far as it fits; empty if the planner decides. `itself`: the
    tensor was marked, not its module.
    """

    decision: Literal["keep", "offload", "prefer_offload", "recompute"]
    reason: str
    tier: Literal["host", "ssd", ""] = ""
    itself: bool = True


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Positions are indices of nodes in their graph."""

    produced: int
    last_fwd_use: int
    first_bwd_use: int
    last_bwd_use: int


@dataclass(frozen=True, slots=True)
class Points:
    """Where the four nodes of an offloaded group go, as indices into the graphs before insertion.

    `block`: the release waits for the write, because the budget needs the memory then. `strict`: the budget has no
    memory for an earlier load. `later`: the write begins only if another forward does before the load.
    """

    store_after: int
    release_after: int
    load_before: int
    wait_before: int
    block: bool = False
    strict: bool = False
    later: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted start of every node in ms, for both graphs. The last entry, one more than nodes, is the end."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """What it costs to compute a group again.

    `nodes`: the names of the nodes that must run again. `needs`: the slots of the groups that they read.
    """

    seconds: float
    nodes: frozenset[str]
    needs: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A tensor that is computed again, although PyTorch's own partition saves it; `base`: the node that makes it."""

    base: str
    module: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """A budget in bytes.

    `memory`: the peak, above the level before the step. `kept`: what may be kept although it could be offloaded.
    """

    memory: float
    kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the simulator predicts for a plan. Bytes are above the level before the step: parameters do not count.

    `seconds`: of the step, of them `compute_s` without transfers and recomputing. `peak_node`: the index of the node at
    the peak; nodes of the backward follow those of the forward. `kept`: what is kept although it could be offloaded.
    `written`: bytes to the drives, those included whose write the backward may cut short.
    `limits`: what the budget allows. `floor`: the peak with infinitely fast I/O. `everything`: the peak with everything
    kept. `resident`: bytes that may stay resident in the same memory beyond the peak. `shared`: a budget in bytes for
    the latest tensors of all graphs, which stay resident. `host_speedup`: how many times as fast as the drives host
    memory would be, beside a device with memory of its own; 0 without one, and where there is a `host_budget`.
    """

    seconds: float
    compute_s: float
    write_stall_s: float
    read_stall_s: float
    peak: int
    peak_node: int
    kept: int
    written: int
    limits: Limits
    floor: int
    everything: int
    host_peak: int
    host_budget: int
    resident: int
    shared: int
    host_speedup: float

    @property
    def transfer_s(self) -> float:
        """What the step takes beyond computing and waiting: starting transfers, and computing slower beside them."""
        return max(0.0, self.seconds - self.compute_s - self.write_stall_s - self.read_stall_s)


@dataclass(frozen=True, slots=True)
class Stock:
    """PyTorch's own partition with everything kept, which is the step without ssd_fx.

    `saved_bytes`: as in `Plan`. `floor`, `peak`: bytes above the level before the step. `starts`: seconds at which
    the operators of forward and backward start, and the end. `memory`: bytes alive during each. `forward`: how many of
    them are the forward's.
    """

    saved_bytes: int
    floor: int
    peak: int
    starts: tuple[float, ...]
    memory: tuple[int, ...]
    forward: int


@dataclass(frozen=True, slots=True)
class Life:
    """The predicted times of one group, in seconds from the start of the step; None for what does not happen.

    `released`: the forward reads it no more. `used`, `last_used`: by the backward. `write`, `read`: begin and end.
    `gone`: begin and end of the time in which its memory is free. `write_wait_s`, `read_wait_s`: what the step waits
    behind `released`, and before `used`.
    """

    produced: float
    released: float
    used: float
    last_used: float
    write: tuple[float, float] | None = None
    read: tuple[float, float] | None = None
    gone: tuple[float, float] | None = None
    write_wait_s: float = 0.0
    read_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Course:
    """The predicted step over time: as `Stock` has it, with the transfers of the plan.

    `lives`: by slot, of the groups that have a lifetime.
    """

    starts: tuple[float, ...]
    memory: tuple[int, ...]
    forward: int
    lives: MappingProxyType[int, Life]


@dataclass(frozen=True)
class Plan:
    """Everything that was decided for one partitioned graph. Each pass fills its fields; mappings are by slot.

    `graph`: the graph's name. `stock`: stays that of PyTorch's own partition in a partition that recomputes.
    `recomputed`: what this partition was made to compute again, in the order of production.
    """

    graph: str
    groups: tuple[AliasGroup, ...] = ()
    marks: MappingProxyType[int, Mark] = field(default_factory=lambda: MappingProxyType({}))
    modules: MappingProxyType[int, str] = field(default_factory=lambda: MappingProxyType({}))
    timeline: Timeline | None = None
    lifetimes: MappingProxyType[int, Lifetime] = field(default_factory=lambda: MappingProxyType({}))
    decisions: MappingProxyType[int, Decision] = field(default_factory=lambda: MappingProxyType({}))
    points: MappingProxyType[int, Points] = field(default_factory=lambda: MappingProxyType({}))
    prices: MappingProxyType[int, Price] = field(default_factory=lambda: MappingProxyType({}))
    forecast: Forecast | None = None
    course: Course | None = None
    stock: Stock | None = None
    recomputed: tuple[Recomputed, ...] = ()

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

    def undecided(self) -> Plan:
        """What the analyses found, with nothing decided."""
        return self.with_(decisions={}, points={}, prices={}, forecast=None, course=None)

    def with_(self, **changes: object) -> Plan:
        """A copy with some fields replaced; dictionaries become read-only."""
        frozen = {k: MappingProxyType(v) if isinstance(v, dict) else v for k, v in changes.items()}
        return replace(self, **frozen)  # type: ignore[arg-type]
