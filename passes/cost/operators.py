"""What Inductor does with an operator: compute it inside its readers, make it a loop of its own, or call a library.

add, gelu, cat       inside whatever reads them, unless that would be too much to do twice
sum, amax, random    a loop of its own, which others may join
mm, cumsum, sort     a call, which reads and writes buffers; mm takes the addition behind it along
any of them, complex a call: Inductor has no code for complex numbers
"""

from __future__ import annotations

import functools
import operator

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.utils.flop_counter import flop_registry

from ssd_fx.compat import OpOverload  # the module defines prims.inductor_random, too
from ssd_fx.passes.partition import arguments_of, called, tensor_of, tensors_of

aten, prims = torch.ops.aten, torch.ops.prims

_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
# Operators that Inductor computes inside the kernels that read them, besides those that are tagged pointwise.
_INLINED = frozenset(
    {
        aten.full, aten.scalar_tensor, aten.arange, aten.embedding, aten.index, aten.gather, aten.constant_pad_nd,
        aten.slice_scatter, aten.select_scatter, aten.clone, aten._to_copy, aten.copy, aten.cat, aten.where, prims.iota,
        prims.convert_element_type, aten.full_like, aten.zeros_like, aten.ones_like, aten.fill,
        prims.inductor_lookup_seed, aten._unsafe_index,
    }
)  # fmt: skip
REDUCTIONS = frozenset(
    {aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.var, aten.any, aten.all, aten.prod, aten.argmax}
)
# A loop of its own: neither inlined into readers nor a library call.
LOOPS = REDUCTIONS | {prims.inductor_random, aten._unsafe_masked_index_put_accumulate}

# Operators that write into a copy of their first operand, as scattered sums do.
SCATTERS = frozenset(
    {
        aten.scatter, aten.scatter_add, aten.scatter_reduce, aten.index_put, aten._unsafe_index_put,
        aten._unsafe_masked_index_put_accumulate,
    }
)  # fmt: skip

# Inductor on the CPU writes their results to memory, rather than compute them twice (`should_realize_on_reuse`, 2.13).
HEAVY = frozenset({aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh})


def operator_of(node: fx.Node) -> object:
    """The operator without its overload; None for a function that is no `OpOverload`."""
    return getattr(called(node)[0], "overloadpacket", None)


# A graph has few operators and many nodes, so each question about an operator is answered once.


def has_flops(node: fx.Node) -> bool:
    """Whether the node is a matrix product, convolution or attention: a library call that is priced by its flops.

    Calls of other operators (`is_extern` has them all) are priced by memory traffic, as loops are.
    """
    return _has_flops(called(node)[0])


@functools.cache
def _has_flops(target: object) -> bool:
    return getattr(target, "overloadpacket", None) in flop_registry or is_attention(target)


@functools.cache
def is_attention(target: object) -> bool:
    """Whether the operator is one of PyTorch's fused attention operators, whatever the device."""
    own = isinstance(target, OpOverload) and target.namespace == "aten"
    return own and any(name in str(target) for name in _ATTENTION)


def has_complex(node: fx.Node) -> bool:
    """Whether complex numbers go in or come out (`fallback_node_due_to_unsupported_type`, torch 2.13)."""
    return any(t.dtype.is_complex for n in (node, *node.all_input_nodes) for t in tensors_of(n))


def is_inlined(node: fx.Node) -> bool:
    """Whether Inductor can compute the node inside a kernel that reads it."""
    return _is_inlined(node.target) and not has_complex(node)


@functools.cache
def _is_inlined(target: object) -> bool:
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target.overloadpacket in _INLINED)


def is_extern(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own, which reads and writes buffers."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return _is_extern(node.target) or has_complex(node)
    if not isinstance(called(node)[0], OpOverload):
        return node.target is not operator.getitem and bool(tensors_of(node))
    return has_flops(node) or operator_of(node) not in LOOPS


@functools.cache
def _is_extern(target: OpOverload) -> bool:
    return _has_flops(target) or not (_is_inlined(target) or target.overloadpacket in LOOPS)


def adds_in_a_loop(node: fx.Node) -> bool:
    """Whether Inductor adds up values at indices in a loop of its own, and calls no library for it (`index_put_impl_`
    in its lowering.py, torch 2.13): those of float32, or on the CPU of float64, and not at a mask."""
    if operator_of(node) is not aten.index_put or torch.are_deterministic_algorithms_enabled():
        return False
    given, out = arguments_of(node), tensor_of(node)
    indices = [tensor_of(index) for index in given["indices"] if index is not None]
    if out is None or not given["accumulate"] or any(index is None or index.dtype == torch.bool for index in indices):
        return False
    return out.dtype == torch.float32 or (out.dtype == torch.float64 and out.device.type == "cpu")


# In the meta of a contiguous copy that the backward makes of an image for a convolution `is_of_single_channels`.
CONTIGUOUS = "ssd_fx_contiguous"


def is_of_single_channels(node: fx.Node) -> bool:
    """Whether a convolution's backward on the CPU computes with contiguous images, since the strides of its weight, one
    channel a group, fit any order (`joint/conv_operands.py`)."""
    if node.target is not aten.convolution_backward.default:
        return False
    weight = tensor_of(arguments_of(node)["weight"])
    if weight is None or weight.ndim != 4 or weight.device.type != "cpu":
        return False
    return statically_known_true(weight.shape[1] == 1) and not statically_known_true(weight.stride()[1] == 1)


def nbytes_of(node: fx.Node) -> int:
    """Bytes of the elements of the tensor that a node yields, with hints for sizes; 0 if it yields none."""
    tensor = tensor_of(node)
    return 0 if tensor is None else hint(tensor.numel()) * tensor.itemsize


def addmm(node: fx.Node, is_written: bool) -> fx.Node | None:
    """The `mm` that Inductor merges with an addition into an `addmm`. Its operands live until the addition.

    Of two products it is the second, because Inductor tries that pattern first. On a GPU Inductor leaves the addition
    to the loops that read it (`should_prefer_unfused_addmm`, torch 2.13). `is_written`: we have it write this sum.
    """
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    products = [n for n in reversed(node.all_input_nodes) if n.target is aten.mm.default and len(n.users) == 1]
    if not products:
        return None
    first, second = map(tensor_of, node.all_input_nodes)
    if first is None or second is None or first.dtype != second.dtype:
        return None
    if not statically_known_true(sym_eq(tuple(first.shape), tuple(second.shape))):
        return None
    if first.device.type != "cpu" and not is_written and all(map(_is_read_by_loops, node.users)):
        return None
    return products[0]


def _is_read_by_loops(node: fx.Node) -> bool:
    """Whether only what can be computed inside a loop reads a node, or its views."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target.is_view:
        return all(map(_is_read_by_loops, node.users))
    return torch.Tag.pointwise in node.target.tags


def hint(value: int | torch.SymInt) -> int:
    """A size as a number: a symbolic one as it was when the graph was traced."""
    if isinstance(value, torch.SymInt):
        known = value.node.hint  # None where the size depends on data
        return int(known) if known is not None else 0
    return int(value)
