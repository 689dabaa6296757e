"""Saved tensors that must have the forward's bits in the backward, because the backward compares them.

A tensor that is computed again, or comes out of a lossy codec, has other bits. Then a saved maximum equals no element
of its tensor. The backward divides by the number of elements that equal it. That number is 0, so the gradient is NaN.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from ssd_fx.compat import HigherOrderOperator, OpOverload
from ssd_fx.passes.cost.operators import is_attention
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.partition import RECOMPUTED, Partition, tensor_of, tensors_of
from ssd_fx.passes.plan import Plan

COMPARED = "the backward compares it, and compression is lossy"
_JUMPS = frozenset(  # operators whose result may jump, whatever its dtype; `jumps` adds all that make bools of floats
    (
        *("eq", "ne", "lt", "le", "gt", "ge", "sign", "sgn", "heaviside", "floor", "ceil", "round", "trunc", "frac"),
        *("fmod", "remainder", "floor_divide", "bucketize", "searchsorted"),
        *("_cdist_backward", "_pdist_backward", "_segment_reduce_backward"),  # the kernels of these compare
    )
)
_COMPARE_WITH_NUMBERS = frozenset(  # their kernels compare an argument with a number, whatever the other arguments are
    (
        *("threshold_backward", "hardtanh_backward", "hardshrink_backward", "softshrink_backward", "elu_backward"),
        *("leaky_relu_backward", "hardswish_backward", "hardsigmoid_backward", "_prelu_kernel_backward"),
    )
)


def compared(partition: Partition) -> frozenset[str]:
    """Names of the saved tensors on whose values the backward decides something. It compares two of them (`jumps`), or
    picks indices by their values (`chooses`).

    Hazard: a tensor that is computed again may be rounded otherwise. Inductor merges a product and a sum into an
    `addmm` if nothing else reads the product, and `index_add` adds up in any order. Then a difference that was 0 has a
    sign. Parameters are not among the names: they do not change. Nor are tensors made of incoming gradients.
    """
    found, varying = functools.reduce(operator.or_, _deciding(partition), 0), _varying(partition)
    return frozenset(n.name for i, n in enumerate(partition.saved) if found & 1 << i and n.name in varying)


def compares_again(partition: Partition) -> bool:
    """Whether the backward compares a tensor that it computes again, by our choice, with one that it reads as saved.

    Hazard: PyTorch's own partition may compare in the forward, and save the mask. `compared` does not see such a
    comparison. If the next cut has the backward compute the tensor again, PyTorch moves the comparison to the backward,
    which then compares the new tensor with the saved maximum. The new tensor has other bits than the one that the
    maximum was taken of.
    """
    again = 1 << len(partition.saved)
    return any(bits & again for bits in _deciding(partition, again))


def _deciding(partition: Partition, again: int = 0) -> Iterator[int]:
    """For each comparison of two tensors in the backward, and each operator that picks indices: what its arguments are
    made of, as bits.

    Each saved tensor has a bit, by its number. All tensors that are computed again by our choice have the bit `again`;
    if it is 0, they have the bits of the saved tensors that they are made of.
    """
    saved = partition.saved
    bits = {n.name: 1 << i if tensor_of(n) is not None else 0 for i, n in enumerate(saved)}  # a size has no bit
    varying = sum(bits[name] for name in _varying(partition)) | again
    made_of: dict[fx.Node, int] = {}  # nodes that are made of gradients are not in it
    for node in partition.backward.graph.nodes:
        if node.op == "placeholder":
            if node.name in bits:
                made_of[node] = bits[node.name]
            continue
        arguments = node.all_input_nodes
        sources = functools.reduce(operator.or_, (made_of.get(source, 0) for source in arguments), 0)
        # an operator of two tensors may compare a parameter with its saved maximum, so parameters count there
        related = sources if _of_two(node) else sources & varying
        several = related & (related - 1)  # 0 unless `related` has more than one bit
        if chooses(node) or (several and jumps(node)):
            yield sources
        if all(source in made_of for source in arguments):
            made_of[node] = again if again and RECOMPUTED in node.meta else sources


def _varying(partition: Partition) -> set[str]:
    """Names of the saved tensors that are activations, and no parameters."""
    inputs = set(partition.caller_inputs)
    return {n.name for n in partition.saved if n.op != "placeholder" or n in inputs}


def _of_two(node: fx.Node) -> bool:
    """Whether an operator that jumps may compare two tensors; else it compares one with a number."""
    return len(node.all_input_nodes) > 1 and _name(node) not in _COMPARE_WITH_NUMBERS


def keep_compared(partition: Partition, plan: Plan) -> Plan:
    """Keep the floats that the backward compares. Needed only if a codec is lossy."""
    names = partition.once(compared)

    def checked(group: AliasGroup) -> AliasGroup:
        exact = group.obstacle or not group.stored.dtype.is_floating_point
        if exact or names.isdisjoint(m.name for m in group.members):
            return group
        return replace(group, obstacle=COMPARED)

    return plan.with_(groups=tuple(map(checked, plan.groups)))


def jumps(node: fx.Node) -> bool:
    """Whether the result may jump if an argument changes a little. Every operator of another library counts as one that
    may."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims"):
        return True
    if not any(t.is_floating_point() or t.is_complex() for n in node.all_input_nodes for t in tensors_of(n)):
        return False
    makes_bools = any(t.dtype == torch.bool for t in tensors_of(node))
    rounds = target._overloadname.endswith("_mode")  # such as div.Tensor_mode, which rounds a quotient
    return makes_bools or rounds or _name(node) in _JUMPS or _name(node) in _COMPARE_WITH_NUMBERS


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, OpOverload) else ""


def chooses(node: fx.Node) -> bool:
    """Whether an operator picks indices by values: topk, sort, argmax, max_pool2d_with_indices.

    Hazard: a kernel of the backward is fused otherwise than that of the forward, and rounds otherwise. Then other
    elements are the largest, and the gradient goes to those. Of these operators PyTorch's own cut computes only argmax
    and max again, and only from saved tensors. Attention picks nothing: its integers are seeds.
    """
    if is_attention(node.target):
        return False
    picked = [t for t in tensors_of(node) if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)]
    by_values = [t for source in node.all_input_nodes for t in tensors_of(source) if t.is_floating_point()]
    return bool(picked and by_values)
