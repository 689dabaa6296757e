"""Which alias groups to compute again instead of saving them, and the partition that does so.

    1. partition as PyTorch does                          relu, mm, gelu saved
    2. price: the cost of computing each group again      gelu: itself and mm, from saved tensors
    3. keep, recompute or offload, for all groups         the write lane is full: gelu and mm are computed again
    4. partition with PyTorch's min-cut, and tags         relu saved; mm and gelu run in the backward too

Step 4 sets the tags of selective checkpointing. What was chosen must be recomputed, the other saved tensors must be
saved, and PyTorch's min-cut decides the rest. The new partition is planned and simulated like the first one; it is
taken only if it is predicted to be faster. docs/planner.md says why we do not use `activation_memory_budget`.
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
from ssd_fx.passes.partition import (
    RECOMPUTED,
    Partition,
    activation_inputs,
    changed_inputs,
    storage_of,
    tensors_of,
)
from ssd_fx.passes.plan import Plan, Price, Recompute, Recomputed

# A key in the annotations of nodes, from torch 2.13 on.
_REGION_BUDGET = getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "_region_activation_memory_budget")
_DRAWN = ("prims::inductor_random", "prims::inductor_randint")  # on a GPU kernels of other shapes draw other numbers
LONGEST = 200  # nodes of a chain; a longer one is not worth its time
_JUMPS = frozenset(  # operators whose result jumps where their argument changes a little
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "sign", "sgn", "heaviside", "floor", "ceil", "round", "trunc", "frac"),
        *("fmod", "remainder", "floor_divide", "bucketize", "searchsorted"),
    )
)
_JUMPS_WITHIN = frozenset(  # operators of a backward whose kernels compare
    (
        *("_cdist_backward", "_pdist_backward", "_segment_reduce_backward", "threshold_backward", "elu_backward"),
        *("hardtanh_backward", "hardshrink_backward", "softshrink_backward", "leaky_relu_backward"),
        "_prelu_kernel_backward",
    )
)


class Joint:
    """A joint graph that can be partitioned several times, each time with other operators recomputed.

    `module` has been through the passes of a joint graph; `inputs` and `arguments` are those of PyTorch's min-cut.
    `after_cut`: passes that run on every partition.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[object],
        arguments: dict[str, Any],
        after_cut: Sequence[Callable[[Partition], None]],
    ) -> None:
        self._module = module
        self._inputs = inputs
        self._arguments = arguments
        self._after_cut = after_cut
        self._activations = activation_inputs(module, arguments.get("static_lifetime_input_indices"))

    @property
    def has_own_budget(self) -> bool:
        """Whether the model itself sets a memory budget for PyTorch.

        It does so by `region_activation_memory_budget` of torch.autograd.graph, or by the older marker "memory_budget".
        """
        modules = [m for m in self._module.modules() if isinstance(m, fx.GraphModule)]  # regions within regions, too
        metas = [n.meta for m in modules for n in m.graph.nodes]
        return any("memory_budget" in m or _REGION_BUDGET in (m.get("custom") or ()) for m in metas)

    @property
    def is_nested(self) -> bool:
        """Whether it is a region of another graph (`torch.compiler.nested_compile_region`), cut before that one."""
        return not self._inputs

    def partition(self, *, again: bool = False) -> Partition:
        """The partition that PyTorch makes by itself. `again`: the graph may be cut once more later."""
        if again:  # only then: PyTorch later reads its notes from its own module, and not from this one
            self._module = _lazy(self._module)
        return self._cut(self._module)

    def partition_again(self, recomputed: Collection[str], saved: Collection[str]) -> Partition:
        """The partition whose backward computes the nodes `recomputed` again, and saves the nodes `saved` if needed.

        A node keeps a tag that it has already. Views of a recomputed node get its tag too: to PyTorch a cut through a
        view is as cheap, and saves the same bytes. What may not run twice is no view, whatever its FakeTensor says.
        The graph is as the first cut left it: common subexpressions are merged, and PyTorch's own tags are set.
        """
        module = _clone(self._module)
        again = {storage_of(n) for n in module.graph.nodes if n.name in recomputed} - {None}
        for node in module.graph.nodes:
            if node.op != "call_function" or "recompute" in node.meta:
                continue
            if node.name in recomputed or (storage_of(node) in again and _may_run_twice(node)):
                _tag_to_recompute(node)
            elif node.name in saved:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with functorch_config.patch(cse=False):
            return self._cut(module)

    def _cut(self, module: fx.GraphModule) -> Partition:
        forward, backward = min_cut_rematerialization_partition(module, self._inputs, **self._arguments)
        partition = Partition(forward, _lazy(backward), self._arguments["num_fwd_outputs"], self._activations)
        for each in self._after_cut:
            each(partition)
        return partition


def _tag_to_recompute(node: fx.Node) -> None:
    """Tag `node`, and the operator whose result it takes an item of.

    A tuple of tensors cannot be saved, and min-cut recomputes most operators that return one only if they are tagged.
    """
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[RECOMPUTED] = True
    if node.target is operator.getitem:
        made_by = node.all_input_nodes[0]
        if made_by.op == "call_function" and "recompute" not in made_by.meta:
            _tag_to_recompute(made_by)


def _lazy(module: fx.GraphModule) -> fx.GraphModule:
    """`module` as one that generates its Python code on demand, which is the class that Inductor uses.

    Inductor never calls its modules, so it never needs the code. Outside of Inductor `module` stays as it is.
    """
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
    """Fill `plan.prices` for every group that can be computed again from saved tensors or from parameters.

    The graph's outputs are no source: they are alive in the backward, but the caller may have written into them.
    Needs `plan.groups` and `plan.timeline`.
    """
    assert plan.timeline is not None
    nodes = {n.name: n for n in partition.forward.graph.nodes}
    starts = plan.timeline.forward
    seconds = {n: (starts[i + 1] - starts[i]) / 1e3 for i, n in enumerate(nodes.values())}
    slots: dict[int | None, int | None] = {storage_of(n): None for n in partition.saved}
    slots |= {storage_of(nodes[g.base]): g.slot for g in plan.groups}
    slots.pop(None, None)
    callers = {storage_of(n) for n in partition.caller_inputs} - {None}  # sizes, which never change, have none
    unstable = changed_inputs(partition.forward.graph) | (callers - slots.keys())
    exact = partition.once(_needed_exactly)
    found = {}
    for group in plan.groups:
        if group.obstacle or not exact.isdisjoint(m.name for m in group.members):
            continue
        cost = _price(nodes[group.base], slots, unstable, seconds)
        if cost is not None:
            found[group.slot] = cost
    return plan.with_(prices=found)


def recomputed(plan: Plan) -> tuple[Recomputed, ...]:
    """What a plan asks the next partition to compute again."""
    groups = [g for g in plan.groups if isinstance(plan.decisions.get(g.slot), Recompute)]
    return tuple(Recomputed(g.base, plan.modules[g.slot], g.nbytes, plan.prices[g.slot].seconds) for g in groups)


def _price(
    base: fx.Node,
    slots: Mapping[int | None, int | None],
    unstable: Collection[int | None],
    seconds: Mapping[fx.Node, float],
) -> Price | None:
    """The price of the nodes from saved tensors to `base`; None if one of them cannot or should not run twice.

    `slots`: each saved storage, with the slot of its alias group, or None where it is in no group. `unstable`: storages
    that may hold other values in the backward, because the step or its caller writes into them.
    """
    chain: dict[fx.Node, None] = {}
    sources: set[int | None] = set()
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
            if key in unstable:
                return None
            if key in slots and key != storage_of(base):
                sources.add(key)
            elif source.op not in ("placeholder", "get_attr"):
                work.append(source)
    if len(sources) > 1 and any(map(_jumps, chain)):  # one of them may be computed again too; see `_needed_exactly`
        return None
    names = frozenset(n.name for n in chain)
    needs = frozenset(slot for key in sources if (slot := slots[key]) is not None)
    return Price(math.fsum(seconds[n] for n in chain), names, needs)


def _needed_exactly(partition: Partition) -> frozenset[str]:
    """Names of saved tensors that the backward compares with each other or chooses from, or what it makes of them.

    Hazard: what is computed again may be rounded otherwise. Inductor makes one `addmm` of a product and a sum where
    nobody else reads the product, and `index_add` adds up in any order. A saved maximum then equals no element of the
    tensor that it is the maximum of, and the gradient is 0/0. A difference that was 0 has a sign.

    Parameters are as they were, and gradients are no part of the forward's values, so both do not count.
    """
    inputs = {n.name for n in partition.caller_inputs}
    counted = {n.name for n in partition.saved if n.op != "placeholder" or n.name in inputs}
    saved = {n.name for n in partition.saved}
    made_of: dict[fx.Node, frozenset[str]] = {}  # of nodes that are made without gradients
    found: frozenset[str] = frozenset()
    for node in partition.backward.graph.nodes:
        if node.op == "placeholder":
            if node.name in saved:
                made_of[node] = frozenset({node.name} & counted)
            continue
        sources = frozenset[str]().union(*(made_of.get(source, ()) for source in node.all_input_nodes))
        if _chooses(node) or (len(sources) > 1 and _jumps(node)):
            found |= sources
        if all(source in made_of for source in node.all_input_nodes):
            made_of[node] = sources
    return found


def _jumps(node: fx.Node) -> bool:
    """Whether the result may jump where an argument changes a little; so may what other libraries compute."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    name = target._schema.name.rpartition("::")[2]
    if name not in _JUMPS | _JUMPS_WITHIN and target._overloadname != "Tensor_mode":  # that is a rounded quotient
        return False
    return any(t.is_floating_point() for source in node.all_input_nodes for t in tensors_of(source))


def _may_run_twice(node: fx.Node) -> bool:
    """Whether a node calls one of PyTorch's own functional operators that neither draw random numbers nor choose.

    Other libraries' operators may have effects that no tag announces: random numbers, counters, output. The vectors of
    a decomposition (`linalg_eigh`) have any sign.
    """
    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        return True
    if not isinstance(target, torch._ops.OpOverload) or not is_silent(target):
        return False
    if target.name() in _DRAWN or _chooses(node) or "linalg_" in target.name():
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _chooses(node: fx.Node) -> bool:
    """Whether an operator picks indices by values: topk, sort, argmax, max_pool2d_with_indices.

    Hazard: a kernel of the backward is fused otherwise than that of the forward, and rounds otherwise. Then other
    elements are the largest, and the gradient goes to those. Of these PyTorch's own cut computes only argmax and max
    again, and those from what it has saved.
    """
    picked = [t for t in tensors_of(node) if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)]
    by_values = [t for source in node.all_input_nodes for t in tensors_of(source) if t.is_floating_point()]
    return bool(picked and by_values)
