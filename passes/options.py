"""The user's options as far as the passes need them, and the machine."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.passes.cost.machine import Machine, Rates


@dataclass(frozen=True)
class PlanOptions:
    """Plain values, because they are part of the key of compile caches.

    * `version`: a digest of the package's source.
    * `budget`: bytes (int), a share (float), or "auto": `planner/budget.py`.
    * `slowdown`: the share of a step by which it may become longer under "auto".
    * `min_bytes`, `prefetch`: bytes.
    * `machine`: None for typical rates.
    * `runtime_config`: goes into the nodes unread.
    * `recompute`: whether tensors may be computed again instead.
    * `keep`, `offload`: module name patterns.
    * `roots`: the expressions for the outermost modules, after which module names begin (`joint/modules.py`).
    * `annotations`: a digest of the graph's annotations, which caches ignore otherwise.
    * `spare`: whether what does not lower the peak of a whole step stays in memory.
    * `host_budget`: bytes of host memory. It is a separate tier only if the device has other memory.
    * `shrinks`: the shares of their bytes in which tensors of a dtype are written, with compression, by dtype.
    * `lossy`: whether what is offloaded may come back with other bits.
    * `rates`: where the rates of `machine` come from, in words for reports.
    * `copied`: whether a device's tensors go to host memory and no further, as with the engine "memory".
    * `digest`: of what the user has chosen, for the graph's name. The runtime counts by it, and has a plan for each.
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
    host_budget: int = 0
    slowdown: float = 0.0
    spare: bool = False
    shrinks: Rates = ()
    lossy: bool = False
    rates: str = "typical"
    copied: bool = False
    digest: str = ""
