"""Insert the nodes of the plan into both graphs.

    before    forward                              backward
                relu = ...; view = view(relu)        relu, view = placeholders
                mm = mm(relu, w)                     ...
                return (mm, relu, view)              use(relu); use(view)

    after     forward                              backward
                relu = ...; view = view(relu)        handle, other = placeholders
                handle = store(relu)                 x = load(handle, size, stride, ...)
                other = stand_in(size of view)
                mm = mm(relu, w)                     ...
                wait_store_(handle, relu)            wait_load_(x, handle)
                return (mm, handle, other)           use(x); use(as_strided(x, ...))

The handle is saved instead of the first member of a group, a stand-in instead of each other member. So autograd and
its hooks see the same list of shapes, dtypes and devices as without us. Each node has its planned position as an
argument, so that the trace of a run can be compared with the plan.
"""

from __future__ import annotations

from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.rewrite.backward import BackwardWriter
from ssd_fx.passes.rewrite.forward import ForwardWriter


def insert(partition: Partition, plan: Plan, *, config: str, about: str = "") -> None:
    """Rewrite both graphs.

    `config`: the runtime's configuration as JSON, an argument of the nodes. `about`: the plan for reports, an argument
    of the first node.
    """
    forward = ForwardWriter(partition, plan, config, about)
    backward = BackwardWriter(partition, plan)
    forward.write()
    backward.write(forward.replacements)
    partition.recompile()
