"""The partitioner that Inductor and AOTAutograd call: PyTorch's min-cut within our pipeline.

It is copied and pickled into the key of Inductor's cache, so it is a frozen dataclass of plain values. On a cache hit
it does not run, so all that the runtime needs is in the graphs.
"""

from __future__ import annotations

import gc
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from ssd_fx.compat import CustomPartitionerFn, saved_tensors_hooks, syncs_decisions, trace_log
from ssd_fx.passes import pipeline
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Names, Partition, node_names
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.stages import Stages
from ssd_fx.passes.user_errors import user_errors

GRAPH_NAME = "ssd_fx_graph"
"""In the `meta` of both rewritten modules: the graph's name in reports. Inductor's compiler gets these modules."""


@dataclass(frozen=True)
class Rewritten:
    """A rewritten partition with all that reports need.

    `names`: those of the nodes before the rewrite (`node_names`). `about`: the text that `About` returned.
    """

    partition: Partition
    plan: Plan
    names: Names
    stages: Stages
    about: str


Report = Callable[[Rewritten], None]

About = Callable[[Partition, Plan, PlanOptions], str]
"""Returns the text about its plan that the graph carries, for reports (`runtime/plans.py`)."""

Survey = Callable[[Joint, PlanOptions, bool], NoReturn]
"""Looks at a joint graph, and ends the compilation. The `bool` says that nothing of the graph may be offloaded."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """In the body, Python looks for garbage among all of its objects thirty times as rarely.

    A process with torch has a million objects, and making a partition adds as many. Most of these live until it is
    made, so looking through them finds little (docs/results/measurements.md, "Partition and planning beside the whole
    compilation"). The setting is one for the whole process, but Dynamo compiles in one thread at a time.
    """
    young, middle, all_objects = gc.get_threshold()
    gc.set_threshold(young, middle, 30 * all_objects)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, all_objects)


@dataclass(frozen=True)
class Partitioner(CustomPartitionerFn):
    """Partitions a joint graph and offloads its saved tensors.

    `keeps_all`: nothing is offloaded, and PyTorch's own partition is used. `survey`: it gets the graph, and nothing is
    compiled. `report` gets every rewritten partition. So does `log`, but not if the graph comes from a compile cache,
    and it wants the code only if `is_traced`. `lasting`: as in `activation_names`. `during`: a context in which the
    planning runs. `about`: None if the graph carries no text. `report`, `log`, `during`, `survey` and `about` are
    pickled, so each is a function of a module, or a partial of one.
    """

    options: PlanOptions
    keeps_all: bool = False
    report: Report | None = None
    log: Report | None = None
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    survey: Survey | None = None
    about: About | None = None
    lasting: frozenset[int] | None = None

    @rare_collections()
    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return (forward, backward), as `min_cut_rematerialization_partition` does, which gets all `kwargs`."""
        stages = Stages(on=self.report is not None or (self.log is not None and is_traced()))
        joint = pipeline.joint_of(gm, joint_inputs, kwargs, stages, self.lasting, self.options.inner)
        keeps_all = self.keeps_all or hooks_are_compiled_in()
        if self.survey is not None:
            with user_errors():
                self.survey(joint, self.options, keeps_all)
        if keeps_all:
            partition = joint.partition()
            pipeline.finish(partition)
            return partition.forward, partition.backward
        with user_errors(), self.during():
            partition, plan = pipeline.decide_joint(joint, self.options)
        names = node_names(partition)
        about = self.about(partition, plan, self.options) if self.about is not None else ""
        stages.after("partition", forward=partition.forward, backward=partition.backward)
        pipeline.rewrite(partition, plan, self.options, stages, about)
        pipeline.finish(partition, stages)
        for module in (partition.forward, partition.backward):
            module.meta[GRAPH_NAME] = plan.graph
        for report in filter(None, (self.report, self.log)):
            report(Rewritten(partition, plan, names, stages, about))
        return partition.forward, partition.backward

    def __getstate__(self) -> dict[str, Any]:
        """Leave out `log` and `about`, which only report. They hold lines of the model, which no cache key may have."""
        return self.__dict__ | {"log": None, "about": None}

    def uuid(self) -> str:
        """The identity of this partitioner in compile caches: all of the package's source, and all options."""
        lasting = None if self.lasting is None else sorted(self.lasting)
        parts = [repr(self.options), str(self.keeps_all), str(lasting), torch.__version__]
        policy = self.options.policy
        if self.report is not None or syncs_decisions() or (policy is not None and not policy.uuid):
            # Another process has no report of ours, and its policy may be another function of the same name. And if
            # ranks exchange what they save, all must partition: a rank with a cached result would go on to a collective
            # of the forward, while others wait in the exchange.
            parts.append(_PROCESS)
        if self.survey is not None:
            parts.append(uuid.uuid4().hex)  # with a cached result nothing would be surveyed
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_traced() -> bool:
    """Whether PyTorch writes a structured trace, as for `tlparse` (`TORCH_TRACE`)."""
    return bool(trace_log.handlers)  # a handler without a directory removes itself when Dynamo begins


def hooks_are_compiled_in() -> bool:
    """Whether AOTAutograd will compile saved-tensor hooks into the partitioned graphs. They read the saved tensors."""
    hooks = saved_tensors_hooks()
    return hooks is not None and isinstance(hooks[0], fx.GraphModule)


_PROCESS = uuid.uuid4().hex


def _is_another_process() -> None:
    global _PROCESS
    _PROCESS = uuid.uuid4().hex


os.register_at_fork(after_in_child=_is_another_process)
