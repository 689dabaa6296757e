"""What the passes need to know of the user's options, and of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.profile import Profile


@dataclass(frozen=True)
class PlanOptions:
    """Plain values: they are a part of the key of compile caches.

    `version` is a digest of the package's source. `runtime_config` is handed through to the nodes unread.
    `budget` is bytes (int), a share of the bytes that can leave (float) or "auto"; `min_bytes`, `prefetch` are bytes;
    `recompute`: whether tensors may be computed again instead. `host_budget` is bytes of host memory, which is a tier
    of its own only where the device has other memory. `keep` and `offload` are module name patterns, `roots` the
    expressions that module names begin behind; `annotations` is a digest of what the graph says beside its code, which
    caches do not look at. `machine`: None for typical rates. `profile`: measured times, of this graph or of others.
    """

    version: str
    budget: int | float | str
    min_bytes: int
    prefetch: int
    machine: Machine | None
    runtime_config: str
    recompute: bool = False
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    annotations: str = ""
    profile: Profile | None = None
    host_budget: int = 0
