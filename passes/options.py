"""The user's options as far as the passes read them, and what else a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.options import Options
from ssd_fx.passes.cost.machine import Machine, Rates


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The options of `Options.view(PLAN)`; the others have their defaults. Below is what no user says.

    Plain values, because they are part of the key of compile caches. A budget in bytes is one over all graphs, which
    the runtime keeps; plans leave room. `host_budget` is a separate tier only if the device has other memory.

    * `version`: a digest of the package's source.
    * `rates`: of the machine; None for typical ones. `source`: where they come from, in words for reports.
    * `runtime_config`: goes into the nodes unread.
    * `roots`: the expressions for the outermost modules, after which module names begin (`joint/modules.py`).
    * `annotations`: a digest of the graph's annotations, which caches ignore otherwise.
    * `shrinks`: the shares of their bytes in which tensors of a dtype are written, with compression, by dtype.
    * `lossy`: whether what is offloaded may come back with other bits.
    * `room`: what steps under `memory` were measured to leave, as a share of the way from the lowest peak to the one
      with everything kept; 0 before that is known.
    * `chosen`: a digest of the user's options, for the graph's name. The runtime counts by it, and has a plan for each.
    """

    version: str
    rates: Machine | None = None
    source: str = "typical"
    runtime_config: str
    roots: tuple[str, ...] = ()
    annotations: str = ""
    shrinks: Rates = ()
    lossy: bool = False
    room: float = 0.0
    chosen: str = ""
