"""The partitioner that Inductor and AOTAutograd call: PyTorch's min-cut, then our pipeline on its result.

It is copied and pickled into the key of Inductor's cache, so it is a frozen dataclass of plain values; on a cache hit
it does not run at all, which is why all that the runtime needs stands in the graphs.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ssd_fx.passes import pipeline
from ssd_fx.passes.joint.marks import lift
from ssd_fx.passes.joint.mutated_inputs import save_what_reads_changed_inputs
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.joint.stale_views import rejoin_views
from ssd_fx.passes.rewrite.insert import refuse_stand_ins
from ssd_fx.passes.user_errors import user_errors
from ssd_fx.report import dump


@dataclass(frozen=True)
class Partitioner(CustomPartitionerFn):
    """Partitions a joint graph and puts its saved activations on disk.

    `write` gets the dump of every graph, texts by the names of their files; None where none is wanted. `arguments` are
    what the dump calls the inputs of the Dynamo graph, in their order. `keeps_all`: nothing leaves, and PyTorch's own
    partition is taken.
    """

    options: pipeline.PlanOptions
    keeps_all: bool = False
    write: Callable[[Mapping[str, str]], None] | None = None
    arguments: tuple[str, ...] = ()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Returns (forward, backward), as `min_cut_rematerialization_partition` does, which gets all `kwargs`."""
        lift(gm.graph)  # under Inductor it has run: LiftMarks
        rejoin_views(gm.graph)
        save_what_reads_changed_inputs(gm.graph)
        if self.keeps_all or hooks_are_compiled_in():
            partition = Joint(gm, joint_inputs, kwargs).partition()
            refuse_stand_ins(partition)
            return partition.forward, partition.backward
        with user_errors():
            partition, plan = pipeline.decide_joint(Joint(gm, joint_inputs, kwargs), self.options)
        names = dump.node_names(partition)
        pipeline.rewrite(partition, plan, self.options)
        if self.write is not None:
            self.write(dump.files(partition, plan, names, self.arguments))
        refuse_stand_ins(partition)
        return partition.forward, partition.backward

    def uuid(self) -> str:
        """The identity of this partitioner in compile caches: all of the package's source, and all options."""
        parts = [repr(self.options), str(self.keeps_all), torch.__version__]
        if self.write is not None:
            parts.append(_PROCESS)  # a dump must be written: a cached result of another process would write none
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def hooks_are_compiled_in() -> bool:
    """Whether AOTAutograd will put saved-tensor hooks into the partitioned graphs. They compute with what is saved."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and isinstance(hooks[0], fx.GraphModule)


_PROCESS = uuid.uuid4().hex
