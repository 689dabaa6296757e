"""Every pass, in the order in which it runs.

    JOINT              on the joint graph, before PyTorch's min-cut partitions it
    AFTER_CUT          on every partition that PyTorch's min-cut makes of it
    FOR_INDUCTOR       the same, if Inductor compiles it
    analyses           facts about a partition, which no decision changes (`decide.py`)
    decisions          keep, offload or recompute each alias group, and where the nodes go (`decide.py`)
    rewrite            puts the nodes of the plan into both graphs
    LAST               on both graphs, whatever was planned
    inductor_passes    within Inductor, on its graph and on its kernels

`proposals.py` runs analyses and decisions for several partitions. The verifier runs after every analysis and every
decision, and after the rewrite. `lowering/audit.py` checks the generated code when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ssd_fx.compat import TAKES_SEVERAL_PASSES, CustomGraphPass, CustomPartitionerFn, inductor_config
from ssd_fx.passes.joint.conv_operands import turn_operands
from ssd_fx.passes.joint.marks import lift
from ssd_fx.passes.joint.mutated_inputs import copy_changed_inputs, save_what_reads_changed_inputs
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.joint.stale_views import merge_equal, rejoin_views
from ssd_fx.passes.notices import warn
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.proposals import cut, decide_for_all, decide_with_room
from ssd_fx.passes.rewrite.insert import insert
from ssd_fx.passes.rewrite.lite_mode import annotate_ours
from ssd_fx.passes.rewrite.refuse import kept_activations, refuse_stand_ins
from ssd_fx.passes.stages import Stages
from ssd_fx.passes.verify.graphs import verify_graphs
from ssd_fx.passes.verify.interface import Before

_UNSEEN = Stages(on=False)

JOINT: tuple[Callable[[fx.Graph], fx.Graph | None], ...] = (
    lift,  # first: marks are nodes that would hide patterns. Under Inductor they are gone already (inductor_passes)
    rejoin_views,  # corrects the metadata of views, which the next passes read
    merge_equal,  # before the cut, which would do it too, but would not rejoin the views of merged nodes
    save_what_reads_changed_inputs,  # tags the nodes that the cut must save
)

AFTER_CUT: tuple[Callable[[Partition], None], ...] = (
    copy_changed_inputs,  # only the cut says which of the inputs that the step changes the backward reads
)

FOR_INDUCTOR: tuple[Callable[[Partition], None], ...] = (
    turn_operands,  # not for interpreted graphs, whose kernels would then return other strides than views expect
)

LAST: tuple[Callable[[Partition], None], ...] = (
    refuse_stand_ins,  # after the rewrite, because it is about kept tensors; also if everything is kept
    annotate_ours,  # behind all passes that add nodes
)


@dataclass(frozen=True)
class OursFirst(CustomGraphPass):
    """Runs our pass over a graph of Inductor's, and then the user's passes. `version`: a digest of our source."""

    ours: Callable[[fx.Graph], None]
    version: str
    then: tuple[Any, ...] = ()

    def __call__(self, graph: fx.Graph) -> None:
        self.ours(graph)
        for other in self.then:
            other(graph)

    def uuid(self) -> Any:
        """The identity in compile caches; None, which turns caching off, if a pass of the user has no identity."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.then]
        return None if None in others else (self.version, *others)


def inductor_passes(partitioner: CustomPartitionerFn, version: str) -> dict[str, Any]:
    """Settings of Inductor that make it run our passes, in the order of the settings below.

    `version`: a digest of the package's source, for compile caches. The passes that the user has set run too.
    """
    # not at the top of the file, because it imports Inductor's scheduler
    from ssd_fx.passes.lowering.order import BeforeFusion, PinOrder

    def first(ours: Callable[[fx.Graph], None], theirs: Any) -> OursFirst:
        return OursFirst(ours, version, _as_tuple(theirs))

    def beside(ours: Callable[[fx.Graph], None], theirs: Any) -> Any:
        """Let Inductor call the user's passes itself if it takes several: some ask it whether this is inference."""
        return (first(ours, None), *_as_tuple(theirs)) if TAKES_SEVERAL_PASSES else first(ours, theirs)

    return {
        # before Inductor's own patterns: an alias between the operators of attention hides them from the pattern for
        # the fused kernel, and Inductor removes an alias anyway
        "joint_custom_pre_pass": first(lift, inductor_config.joint_custom_pre_pass),
        "custom_partitioner_fn": partitioner,  # JOINT to LAST
        # before Inductor merges products with additions, and before it asks what strides an output has
        "post_grad_custom_pre_pass": beside(_before_patterns, inductor_config.post_grad_custom_pre_pass),
        # before fusion, which could reverse operators that communicate
        "_pre_fusion_custom_pass": BeforeFusion(version, inductor_config._pre_fusion_custom_pass),
        # after fusion: makes the planned order the only one that later passes can choose
        "_post_fusion_custom_pass": PinOrder(version, inductor_config._post_fusion_custom_pass),
    }


def joint_of(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    arguments: dict[str, Any],
    stages: Stages = _UNSEEN,
    lasting: frozenset[int] | None = None,
    inner: str = "inductor",
) -> Joint:
    """The joint graph, ready to be cut. `inputs` and `arguments` are those of PyTorch's min-cut, `lasting` of `Joint`.

    `inner`: the compiler of the graphs, as in the options."""
    stages.after("joint", joint=gm)
    for each in JOINT:
        other = each(gm.graph)
        if other is not None:
            gm.graph = other
        stages.after(each.__name__, joint=gm)
    return Joint(gm, inputs, arguments, (*AFTER_CUT, *(FOR_INDUCTOR if inner == "inductor" else ())), lasting)


def decide_joint(joint: Joint, options: PlanOptions) -> tuple[Partition, Plan]:
    """The best partition within the budget, and its plan."""
    own = cut(joint, options)
    if options.room:
        return decide_with_room(joint, own, options)
    return decide_for_all(joint, own, options, [options.budget])[0]


def rewrite(partition: Partition, plan: Plan, options: PlanOptions, stages: Stages = _UNSEEN, about: str = "") -> None:
    """Put the nodes of the plan into both graphs. `about`: the text that the forward carries for reports."""
    warn(partition, plan, options)  # first: if the rewrite fails, the user knows what was planned
    before = Before.of(partition)
    if plan.groups or kept_activations(partition):  # saved outputs have no group, but are in the report
        insert(partition, plan, config=options.runtime_config, about=about)
        stages.after("insert", forward=partition.forward, backward=partition.backward)
        verify_graphs(partition, plan, before)


def finish(partition: Partition, stages: Stages = _UNSEEN) -> None:
    """The last passes, on both graphs."""
    for each in LAST:
        each(partition)
        stages.after(each.__name__, forward=partition.forward, backward=partition.backward)


def _before_patterns(graph: fx.Graph) -> None:
    from ssd_fx.passes.lowering.conv_operands import as_they_are
    from ssd_fx.passes.lowering.sums import write_running_sums

    write_running_sums(graph)
    as_they_are(graph)


def _as_tuple(passes: Any) -> tuple[Any, ...]:
    """The user's passes. Inductor accepts one pass or, from torch 2.12 on, several."""
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, (list, tuple)) else (passes,)
