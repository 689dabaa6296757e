"""The user's options as far as the passes read them, and what else a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.options import Options
from ssd_fx.passes.cost.machine import Machine, Rates


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The options of `Options.view(PLAN)`, and fields that the user does not set; other options have their defaults.

    All values are plain, because they are in the keys of compile caches. A budget in bytes is one for all graphs: the
    runtime spends it, and each plan leaves room for it. `host_budget` is a separate tier only if the device has other
    memory than the host. The fields that the user does not set:

    * `version`: a digest of the package's source.
    * `rates`: the rates of the machine; None takes typical ones. `source` says in words where they come from.
    * `runtime_config`: the runtime's configuration. It goes into the nodes unread.
    * `roots`: the expressions for the outermost modules, after which module names begin (`joint/modules.py`).
    * `annotations`: a digest of the graph's annotations, which caches ignore otherwise.
    * `shrinks`: for some dtypes, the share of a tensor's bytes that is written after compression.
    * `lossy`: whether an offloaded tensor may come back with other bits.
    * `room`: memory that measured steps under `memory` left free, as a share of the way from the lowest peak to the
      peak with everything kept; 0 before that is known.
    * `chosen`: a digest of the user's options, which is part of the graph's name. So the runtime has its own figures
      and plan for a graph under each set of options.
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
