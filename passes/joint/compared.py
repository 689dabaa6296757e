"""What must have the bits of the forward in the backward, because the backward compares it.

What is computed again, or comes out of a lossy codec, has other bits. A saved maximum then equals no element of the
tensor that it is the maximum of. The backward divides by how many elements equal it, and the gradient is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.partition import Partition, tensors_of
from ssd_fx.passes.plan import Plan

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


def compared(partition: Partition) -> frozenset[str]:
    """Names of saved tensors that the backward compares with each other or chooses from, or what it makes of them.

    Hazard: what is computed again may be rounded otherwise. Inductor makes one `addmm` of a product and a sum where
    nobody else reads the product, and `index_add` adds up in any order. A difference that was 0 has a sign then.

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
        if chooses(node) or (len(sources) > 1 and jumps(node)):
            found |= sources
        if all(source in made_of for source in node.all_input_nodes):
            made_of[node] = sources
    return found


def keep_compared(partition: Partition, plan: Plan) -> Plan:
    """Keep floats that the backward compares: for a lossy codec."""
    names = partition.once(compared)

    def checked(group: AliasGroup) -> AliasGroup:
        exact = group.obstacle or not group.stored.dtype.is_floating_point
        if exact or names.isdisjoint(m.name for m in group.members):
            return group
        return replace(group, obstacle=COMPARED)

    return plan.with_(groups=tuple(map(checked, plan.groups)))


COMPARED = "the backward compares it, and compression is lossy"


def jumps(node: fx.Node) -> bool:
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


def chooses(node: fx.Node) -> bool:
    """Whether an operator picks indices by values: topk, sort, argmax, max_pool2d_with_indices.

    Hazard: a kernel of the backward is fused otherwise than that of the forward, and rounds otherwise. Then other
    elements are the largest, and the gradient goes to those. Of these PyTorch's own cut computes only argmax and max
    again, and those from what it has saved.
    """
    picked = [t for t in tensors_of(node) if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)]
    by_values = [t for source in node.all_input_nodes for t in tensors_of(source) if t.is_floating_point()]
    return bool(picked and by_values)
