"""The plan: what is decided for every alias group, and where its nodes go.

Analyses read a `Partition` and return a new `Plan`; rewrites obey the plan and decide nothing. Node names are opaque
keys, shared by forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ssd_fx.passes.groups import AliasGroup

if TYPE_CHECKING:
    from ssd_fx.passes.partition import Partition
    from ssd_fx.passes.planner.solution import Solution
    from ssd_fx.passes.planner.step import Modelled

PlanPass = Callable[["Partition", "Plan"], "Plan"]  # decides, never edits FX


@dataclass(frozen=True, slots=True)
class Keep:
    """The group stays in memory between forward and backward."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offload:
    """The group is stored once, released in the forward, and loaded again in the backward.

    `tier`: where it is in between, empty where the runtime decides. `binding`: marked to leave, so it does not rest in
    memory where a budget of bytes has room.
    """

    tier: Literal["host", "ssd", ""] = ""
    binding: bool = False


@dataclass(frozen=True, slots=True)
class Recompute:
    """The group is computed again in the backward, by running the nodes of these names again.

    Only a plan that says how to partition once more has such groups; in the one that is carried out nobody saves them.
    """

    nodes: frozenset[str]


Decision = Keep | Offload | Recompute


@dataclass(frozen=True, slots=True)
class Mark:
    """What the user wants of a group, and who said so.

    `tier`: where it goes if it leaves, to host memory only as far as it fits; empty: wherever it is better. `itself`:
    the tensor was named, not its module.
    """

    decision: Literal["keep", "offload", "prefer_offload"]
    reason: str
    tier: Literal["host", "ssd", ""] = ""
    itself: bool = True


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Positions are indices of nodes in their graph; times are predicted, in ms from the start of their graph."""

    produced: int
    last_fwd_use: int
    first_bwd_use: int
    last_bwd_use: int
    idle_ms: float


@dataclass(frozen=True, slots=True)
class Points:
    """Where the four nodes of an offloaded group go, as indices into the graphs before insertion.

    `block`: the release waits for its write, because the budget needs the memory there. `strict`: there is no memory to
    load it earlier.
    """

    store_after: int
    release_after: int
    load_before: int
    wait_before: int
    block: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted start of every node of a graph in ms, one entry more than nodes: the last one is the end.

    `backward_begin` is the index of the first node of the backward that is no input. `scale`: how much longer than the
    roofline compute was found to take, 1 where nothing was measured.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_begin: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Price:
    """What computing a group again costs: predicted seconds, the names of the nodes that must run again, and the slots
    of the groups that they read."""

    seconds: float
    nodes: frozenset[str]
    needs: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A tensor that is computed again where PyTorch's own partition saves it: the node that makes it, its module, bytes
    and predicted seconds."""

    base: str
    module: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """A budget in bytes: of the memory curve above the level before the step, and of what may be kept of what can
    leave."""

    memory: float
    kept: float


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of a plan. Bytes are above the level before the step: parameters do not count.

    `limits`: what the budget allows; `floor`: the peak that infinitely fast I/O would leave; `everything`:
    the peak with everything kept. `resting`: bytes that the runtime may let rest in the same memory beyond the peak.
    `shared`: a budget in bytes, up to which the runtime lets the latest tensors of all graphs stay.
    """

    modelled: Modelled
    solution: Solution
    limits: Limits
    floor: int
    everything: int
    resting: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything that was decided for one partitioned graph; each pass fills one field.

    `recomputed`: what the partition was made to compute again, in the order of production.
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
    prediction: Prediction | None = None
    recomputed: tuple[Recomputed, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages that the forward saves; parameters, buffers, outputs live anyway: not counted."""
        return sum(g.nbytes for g in self.groups)

    @property
    def offloaded(self) -> tuple[AliasGroup, ...]:
        return tuple(g for g in self.groups if isinstance(self.decisions.get(g.slot), Offload))

    def tier(self, slot: int) -> str:
        """Where a group goes, as its decision says; empty if it stays, or where the runtime decides."""
        decision = self.decisions.get(slot)
        return decision.tier if isinstance(decision, Offload) else ""

    @property
    def recomputed_nodes(self) -> frozenset[str]:
        """Names of the nodes that run again for the groups that are to be recomputed, and of those groups' members."""
        chains = [(g, d) for g in self.groups if isinstance(d := self.decisions.get(g.slot), Recompute)]
        members = (m.name for g, _ in chains for m in g.members)
        return frozenset().union(members, *(d.nodes for _, d in chains))

    @property
    def saved_nodes(self) -> frozenset[str]:
        """Names of the saved nodes and of the bases of what is not to be recomputed."""
        stay = [g for g in self.groups if not isinstance(self.decisions.get(g.slot), Recompute)]
        return frozenset(name for g in stay for name in (g.base, *(m.name for m in g.members)))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave memory between forward and backward."""
        return sum(g.nbytes for g in self.offloaded)

    @property
    def stored_bytes(self) -> int:
        """Bytes that are written and read back for it."""
        return sum(g.stored_nbytes for g in self.offloaded)

    def undecided(self) -> Plan:
        """What the analyses found, with nothing decided."""
        return self.with_(decisions={}, points={}, prices={}, prediction=None)

    def with_(self, **changes: object) -> Plan:
        """A copy with some fields replaced; dictionaries are frozen on the way."""
        frozen = {k: MappingProxyType(v) if isinstance(v, dict) else v for k, v in changes.items()}
        return replace(self, **frozen)  # type: ignore[arg-type]
