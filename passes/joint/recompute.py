"""Which alias groups to compute again instead of saving them, and the partition that does so.

    1. partition as PyTorch does                          relu, mm, gelu saved
    2. price: what would it cost to compute each again    gelu: itself and mm behind it, from saved inputs
    3. choose keep, recompute or offload for all          the write lane is full: gelu and mm are computed again
    4. partition again with PyTorch's min-cut, told which operators it may recompute

Step 4 tags the nodes as selective checkpointing does: what is chosen must be recomputed, what else was saved must be
saved, and PyTorch's min-cut does the rest. What comes out is planned and simulated like the first partition, and taken
only if it is predicted to be faster. docs/planner.md has why the knapsack of `activation_memory_budget` is not asked.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._functorch import config as functorch_config
from torch.fx import traceback
from torch.fx._lazy_graph_module import _get_graph_module_cls, _make_graph_module
from torch.utils.checkpoint import CheckpointPolicy

from ssd_fx.passes.joint.collectives import is_silent
from ssd_fx.passes.partition import Partition, activation_inputs, changed_inputs, storage_of
from ssd_fx.passes.plan import Plan, Price, Recompute, Recomputed

# In the annotations of nodes, from torch 2.13 on.
_REGION_BUDGET = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "_region_activation_memory_budget")
LONGEST = 200  # nodes of a chain: what depends on more is not worth it


class Joint:
    """A joint graph that can be partitioned several times, each time with other operators recomputed.

    `module` has been through the passes of a joint graph; `inputs` and `arguments` are those of PyTorch's min-cut.
    `behind_cut`: passes that run on every partition.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[object],
        arguments: dict[str, Any],
        behind_cut: Sequence[Callable[[Partition], None]],
    ) -> None:
        self._module, self._inputs, self._arguments = module, inputs, arguments
        self._behind_cut = behind_cut
        self._activations = activation_inputs(module, arguments.get("static_lifetime_input_indices"))

    @property
    def has_own_budget(self) -> bool:
        """Whether the model itself gives PyTorch a memory budget: by `region_activation_memory_budget` of
        torch.autograd.graph, or by the marker that was before it."""
        modules = [m for m in self._module.modules() if isinstance(m, fx.GraphModule)]  # regions within regions, too
        metas = [n.meta for m in modules for n in m.graph.nodes]
        return any("memory_budget" in m or _REGION_BUDGET in (m.get("custom") or ()) for m in metas)

    def partition(self, *, again: bool = False) -> Partition:
        """As PyTorch cuts it. `again`: it may be cut once more."""
        if again:  # otherwise PyTorch looks for what it notes at the graph of its own module
            self._module = _lazy(self._module)
        return self._cut(self._module)

    def partition_again(self, recomputed: Collection[str], saved: Collection[str]) -> Partition:
        """With the nodes of these names computed again in the backward, and those other ones saved if it needs them.

        The tags are those of selective checkpointing; what is tagged already stays as it is. Views of what is computed
        again are tagged with it: a cut through one of them is as cheap to PyTorch, and saves the same bytes. The graph
        is as the first cut left it: without what is computed twice, and with the tags that PyTorch sets itself.
        """
        module = _clone(self._module)
        again = {storage_of(n) for n in module.graph.nodes if n.name in recomputed} - {None}
        for node in module.graph.nodes:
            if node.op != "call_function" or "recompute" in node.meta:
                continue
            if node.name in recomputed or storage_of(node) in again:
                _recompute(node)
            elif node.name in saved:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with functorch_config.patch(cse=False):
            return self._cut(module)

    def _cut(self, module: fx.GraphModule) -> Partition:
        forward, backward = min_cut_rematerialization_partition(module, self._inputs, **self._arguments)
        partition = Partition(forward, _lazy(backward), self._arguments["num_fwd_outputs"], self._activations)
        for each in self._behind_cut:
            each(partition)
        return partition


def _recompute(node: fx.Node) -> None:
    """Tags `node`, and the operator whose result it takes: several tensors at once can be neither saved nor, of most
    operators, recomputed without a tag."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    if node.target is operator.getitem:
        made_by = node.all_input_nodes[0]
        if made_by.op == "call_function" and "recompute" not in made_by.meta:
            _recompute(made_by)


def _lazy(module: fx.GraphModule) -> fx.GraphModule:
    """`module` with Python code only once it is asked for, as Inductor has its modules, which it never calls. Anybody
    else's modules stay what they are."""
    if isinstance(module, _get_graph_module_cls()):
        return module
    lazy = _make_graph_module(module, module.graph)
    lazy.meta.update(module.meta)
    return lazy


def _clone(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph over the same attributes and FakeTensors."""
    with warnings.catch_warnings():  # torch's own treespecs, copied by torch
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
        clone = _make_graph_module(module, copy.deepcopy(module.graph))
    clone.meta.update(module.meta)
    return clone


def price(partition: Partition, plan: Plan) -> Plan:
    """Fill `plan.prices` for every group that can be computed again from what is saved, or from parameters. The graph's
    outputs live on too, but the caller has them and may write into them.

    Needs `plan.groups` and `plan.timeline`.
    """
    assert plan.timeline is not None
    nodes = list(partition.forward.graph.nodes)
    starts = plan.timeline.forward
    seconds = {n: (starts[i + 1] - starts[i]) / 1e3 for i, n in enumerate(nodes)}
    by_name = {n.name: n for n in nodes}
    there = {storage_of(n): -1 for n in partition.saved}
    there |= {storage_of(by_name[g.base]): g.slot for g in plan.groups}
    there.pop(None, None)
    anew = {storage_of(n) for n in partition.activation_inputs}
    found, others = {}, changed_inputs(partition.forward.graph) | (anew - there.keys())
    for group in plan.groups:
        cost = None if group.obstacle else _price(by_name[group.base], there, seconds, others)
        if cost is not None:
            found[group.slot] = cost
    return plan.with_(prices=found)


def recomputed(plan: Plan) -> tuple[Recomputed, ...]:
    """What a plan asks the next partition to compute again."""
    groups = [g for g in plan.groups if isinstance(plan.decisions.get(g.slot), Recompute)]
    return tuple(Recomputed(g.base, plan.modules[g.slot], g.nbytes, plan.prices[g.slot].seconds) for g in groups)


def _price(
    base: fx.Node, there: Mapping[int | None, int], seconds: Mapping[fx.Node, float], others: Collection[int | None]
) -> Price | None:
    """The chain from `base` up to what is there anyway; None if it cannot or should not run twice.

    `there`: storages, with the slot of their group or -1. `others`: those that have or may have other values in the
    backward: inputs that the step changes, or that the caller may change before it.
    """
    chain: dict[fx.Node, None] = {}
    needs = set()
    work = [base]
    while work:
        node = work.pop()
        if node in chain:
            continue
        if node.op == "placeholder" or not _may_run_twice(node) or len(chain) > LONGEST:
            return None
        chain[node] = None
        for source in node.all_input_nodes:
            key = storage_of(source)
            if key in others:
                return None
            if key in there and key != storage_of(base):
                needs.add(there[key])
            elif source.op not in ("placeholder", "get_attr"):
                work.append(source)
    names = frozenset(n.name for n in chain)
    return Price(math.fsum(seconds[n] for n in chain), names, frozenset(needs - {-1}))


def _may_run_twice(node: fx.Node) -> bool:
    """PyTorch's own functional operators without random numbers. What others do besides is nobody's promise: few custom
    operators that draw random numbers, count or print carry a tag."""
    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        return True
    if not isinstance(target, torch._ops.OpOverload) or not is_silent(target):
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable
