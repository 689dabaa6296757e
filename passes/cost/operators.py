"""What Inductor does with an operator: compute it inside its readers, make it a loop of its own, or call a library.

add, gelu, cat     inside whatever reads them, unless that would be too much to do twice
sum, amax          a loop of its own, which others may join
mm, attention      a call, which reads and writes buffers; mm takes the addition behind it along
"""

from __future__ import annotations

import torch
from torch import fx

from ssd_fx.passes.cost.kernels import has_flops
from ssd_fx.passes.partition import tensor_of

aten, prims = torch.ops.aten, torch.ops.prims

# What Inductor computes inside whatever kernel reads it, besides what is tagged pointwise.
_INLINED = frozenset(
    {
        aten.full, aten.scalar_tensor, aten.arange, aten.embedding, aten.index, aten.gather, aten.constant_pad_nd,
        aten.slice_scatter, aten.select_scatter, aten.clone, aten._to_copy, aten.copy, aten.cat, aten.where, prims.iota,
        prims.convert_element_type, aten.full_like, aten.zeros_like, aten.ones_like, aten.fill,
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.var, aten.any, aten.all, aten.prod, aten.argmax}
)

# Inductor's rules of what is written to memory instead of computed again (`should_realize_on_reuse`, and thresholds in
# its configuration, torch 2.13). It counts operations, of which a node has about two.
HEAVY = frozenset({aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh})  # on the CPU
REUSED_READS = 4


def is_inlined(node: fx.Node) -> bool:
    """Whether Inductor can compute the node inside a kernel that reads it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _INLINED


def is_extern(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own, which reads and writes buffers."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return not _is_getitem(node) and tensor_of(node) is not None
    return has_flops(node) or not (is_inlined(node) or node.target.overloadpacket in _REDUCTIONS)


def addmm(node: fx.Node) -> fx.Node | None:
    """The addition with which Inductor makes an `mm` an `addmm`; the matmul moves there, and its operands live on."""
    user = next(iter(node.users), None)
    if node.target is not aten.mm.default or user is None or len(node.users) > 1 or user.kwargs:
        return None
    shapes = [t.shape for n in user.all_input_nodes if (t := tensor_of(n)) is not None]
    same = user.target is aten.add.Tensor and len(shapes) == 2 and shapes[0] == shapes[1]
    return user if same else None


def reduces_in_a_loop(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in _REDUCTIONS


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
