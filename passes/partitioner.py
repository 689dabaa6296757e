"""The partitioner that Inductor and AOTAutograd call: PyTorch's min-cut within our pipeline.

It is copied and pickled into the key of Inductor's cache, so it is a frozen dataclass of plain values. On a cache hit
it does not run, so all that the runtime needs is in the graphs.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ssd_fx.passes import pipeline
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Names, Partition, node_names
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.user_errors import user_errors

Report = Callable[[Partition, Plan, Names], None]
"""Gets every rewritten partition, its plan, and the names of the nodes before the rewrite (`node_names`)."""

Survey = Callable[[Joint, PlanOptions, bool], NoReturn]
"""Gets a joint graph that nobody will run, and whether nothing of it may be offloaded. It ends the compilation."""


@dataclass(frozen=True)
class Partitioner(CustomPartitionerFn):
    """Partitions a joint graph and offloads its saved tensors.

    `keeps_all`: nothing is offloaded, and PyTorch's own partition is used. `survey`: the graph is only looked at.
    `report` and `survey` are pickled, so each is a function of a module, or a partial of one.
    """

    options: PlanOptions
    keeps_all: bool = False
    report: Report | None = None
    survey: Survey | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return (forward, backward), as `min_cut_rematerialization_partition` does, which gets all `kwargs`."""
        joint = pipeline.joint_of(gm, joint_inputs, kwargs)
        keeps_all = self.keeps_all or hooks_are_compiled_in()
        if self.survey is not None:
            with user_errors():
                self.survey(joint, self.options, keeps_all)
        if keeps_all:
            partition = joint.partition()
            pipeline.finish(partition)
            return partition.forward, partition.backward
        with user_errors():
            partition, plan = pipeline.decide_joint(joint, self.options)
        names = node_names(partition)
        pipeline.rewrite(partition, plan, self.options)
        pipeline.finish(partition)
        if self.report is not None:
            self.report(partition, plan, names)
        return partition.forward, partition.backward

    def uuid(self) -> str:
        """The identity of this partitioner in compile caches: all of the package's source, and all options."""
        parts = [repr(self.options), str(self.keeps_all), torch.__version__]
        if self.report is not None:
            parts.append(_PROCESS)  # with a cached result of another process there would be no report
        if self.survey is not None:
            parts.append(uuid.uuid4().hex)  # with any cached result there would be none
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def hooks_are_compiled_in() -> bool:
    """Whether AOTAutograd will compile saved-tensor hooks into the partitioned graphs. They read what is saved."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and isinstance(hooks[0], fx.GraphModule)


_PROCESS = uuid.uuid4().hex
