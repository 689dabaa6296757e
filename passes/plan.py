"""The plan: what is decided for every alias group, and where its nodes go.

Analyses read a `Partition` and return a new `Plan`; rewrites obey the plan and decide nothing. Node names are opaque
keys, shared by forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ssd_fx.passes.partition import Partition
    from ssd_fx.passes.refine import Solution
    from ssd_fx.passes.step import Modelled

PlanPass = Callable[["Partition", "Plan"], "Plan"]  # decides, never edits FX
RewritePass = Callable[["Partition", "Plan"], None]  # edits FX, never decides


@dataclass(frozen=True, slots=True)
class Keep:
    """The group stays in memory between forward and backward."""

    reason: str


@dataclass(frozen=True, slots=True)
class Offload:
    """The group is stored once, released in the forward, and loaded again in the backward."""


Decision = Keep | Offload


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, strides and storage offset in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(
            tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype, tensor.device
        )


@dataclass(frozen=True, slots=True)
class Member:
    """One saved tensor of a group: a forward output and the backward placeholder of the same name."""

    name: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """All saved tensors that share one storage: the unit of every decision.

    `base` is the forward node that owns the storage (it is what a store writes); `obstacle` says why the group cannot
    be offloaded, or is empty. `nbytes` is the size of the storage.
    """

    slot: int
    base: str
    layout: Layout | None
    members: tuple[Member, ...]
    nbytes: int
    obstacle: str = ""


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

    `block`: the release waits for its write, because the budget needs the memory there.
    """

    store_after: int
    release_after: int
    load_before: int
    wait_before: int
    block: bool = False


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted start of every node of a graph in ms, one entry more than nodes: the last one is the end.

    `backward_begin` is the index of the first node of the backward that is no input.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_begin: int = 0


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of a plan. Bytes are above the level before the step: parameters do not count.

    `limit`: the memory that the budget allows; `floor`: the peak that infinitely fast I/O would leave; `everything`:
    the peak with everything kept.
    """

    modelled: Modelled
    solution: Solution
    limit: float
    floor: int
    everything: int


@dataclass(frozen=True)
class Plan:
    """Everything that was decided for one partitioned graph; each pass fills one field."""

    graph: str
    groups: tuple[AliasGroup, ...] = ()
    timeline: Timeline | None = None
    lifetimes: MappingProxyType[int, Lifetime] = field(default_factory=lambda: MappingProxyType({}))
    decisions: MappingProxyType[int, Decision] = field(default_factory=lambda: MappingProxyType({}))
    points: MappingProxyType[int, Points] = field(default_factory=lambda: MappingProxyType({}))
    prediction: Prediction | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes of all storages that the forward saves; parameters, buffers, outputs live anyway: not counted."""
        return sum(g.nbytes for g in self.groups)

    @property
    def offloaded(self) -> tuple[AliasGroup, ...]:
        return tuple(g for g in self.groups if isinstance(self.decisions.get(g.slot), Offload))

    @property
    def offloaded_bytes(self) -> int:
        return sum(g.nbytes for g in self.offloaded)

    def with_(self, **changes: object) -> Plan:
        """A copy with some fields replaced; dictionaries are frozen on the way."""
        frozen = {k: MappingProxyType(v) if isinstance(v, dict) else v for k, v in changes.items()}
        return replace(self, **frozen)  # type: ignore[arg-type]
