"""Predicted time of every node: a roofline over flops and bytes, from the FakeTensors.

    extern      the longer of flops / rate of its kind and dtype, and bytes / memory bandwidth
    fused       bytes that its kernel reads and writes because of it, special functions and random numbers
    view        nothing

    mm -> mul -> add -> mm      mul reads mm; add, of the same kernel, is written for the second mm
            \\-> sum             sum reads mul in registers, and is written

A kernel reads each storage once, and writes what another kernel or the caller reads. The figures only place nodes; a
wrong one costs a stall or some memory, never a wrong value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ssd_fx.compat import tree_map
from ssd_fx.passes.cost.kernels import Kernels, both_kernels, count
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.operators import has_flops, hint, is_attention, operator_of
from ssd_fx.passes.partition import Partition, arguments_of, called, tensors_of
from ssd_fx.passes.plan import Launches, Plan

aten, prims = torch.ops.aten, torch.ops.prims

# Keys per step of fused attention: blocks wholly above the diagonal are skipped.
_CAUSAL_BLOCK_CPU = 512
_CAUSAL_BLOCK_GPU = 128
# On the CPU the fused kernel sets up each block of queries, which takes as long as so many more keys. The calibrated
# rate is that of 1024 keys. Measured rates, as parts of it: 0.82 at 512 keys, 0.75 at 256, 0.6 at 128, 0.35 at 64 (2
# cores of an EPYC, heads of 64).
_KEYS_OF_SETUP = 200
_CALIBRATED_KEYS = 1024
# The time of a special function as a multiple of that of an error function, for vectors of float32 in cache. With
# AVX-512, 1.0 is 0.71 ns an element, 0.5 is 0.36 ns, and 0.3 is 0.22 ns.
_SPECIAL: dict[object, float] = {
    aten.erf: 1.0,
    aten.erfc: 1.0,
    aten.gelu: 1.0,
    aten.gelu_backward: 1.5,
    aten.tanh: 0.5,
    aten.sigmoid: 0.5,
    aten.silu: 0.5,
    aten.sin: 0.5,
    aten.cos: 0.5,
    aten.pow: 0.5,
    aten.exp: 0.3,
    aten.exp2: 0.3,
    aten.log: 0.3,
    aten.log1p: 0.5,
    aten.expm1: 0.5,
    aten.log2: 0.3,
    aten._softmax: 0.3,
    aten._log_softmax: 0.3,
}
_RANDOM = (prims.inductor_random, aten.native_dropout, aten.rand, aten.randn, aten.bernoulli, aten.rand_like)


@dataclass
class Traffic:
    """The cost that one node adds: bytes read and written, the kernels that begin with it, how often it is computed."""

    read: int = 0
    written: int = 0
    first: int = 0
    times: int = 1


def time(partition: Partition, plan: Plan, *, machine: Machine) -> Plan:
    """Fill `plan.node_ms` and `plan.launches`."""
    both = forward, backward = partition.once(both_kernels)
    added = traffic(forward), traffic(backward)
    return plan.with_(
        node_ms=(_starts(forward, added[0], machine), _starts(backward, added[1], machine)),
        launches=_launches(partition, both, added),
    )


def _launches(
    partition: Partition, both: tuple[Kernels, Kernels], added: Iterable[Mapping[fx.Node, Traffic]]
) -> Launches:
    kernels = sum(one.first for found in added for one in found.values()) + sum(len(k.split()) for k in both)
    functions = [node for k in both for node in k.nodes if node.op == "call_function"]
    kernels += 2 * sum(called(node)[0] is not node.target for node in functions)  # the generator's state, read and set
    gradients = len(partition.backward.graph.output_node().all_input_nodes)  # autograd adds each to what there is
    return Launches(kernels + gradients, frozenset(both[0].nodes[i].name for i in both[0].alone()))


def _starts(kernels: Kernels, found: Mapping[fx.Node, Traffic], machine: Machine) -> tuple[float, ...]:
    starts = [0.0]
    for node in kernels.nodes:
        starts.append(starts[-1] + (1e3 * seconds(node, found[node], machine) if node in found else 0.0))
    return tuple(starts)


def seconds(node: fx.Node, adds: Traffic, machine: Machine) -> float:
    """Predicted seconds of one node that computes, in all kernels that compute it."""
    fixed = adds.first * machine.kernel_s
    moved = (adds.read + adds.written) / machine.memory_bw
    if has_flops(node):
        return fixed + max(_flops(node) / _rate(node, machine), moved) + _bias_s(node, machine)
    return fixed + moved + adds.times * _special_s(node, machine)


def _flops(node: fx.Node) -> float:
    """Flops by PyTorch's own formulas; by ours for attention, as PyTorch's lack the CPU's, and ignore causality."""
    target, *given = called(node)
    formula = flop_registry.get(operator_of(node))
    if formula is None or (is_attention(target) and "_scaled_dot_product" in str(target)):
        return _attention_flops(node)
    args, kwargs = tree_map(lambda a: _of_numbers(a.meta.get("val")) if isinstance(a, fx.Node) else a, given)
    return hint(formula(*args, **kwargs, out_val=tree_map(_of_numbers, node.meta.get("val"))))


def _of_numbers(value: object) -> object:
    """A value whose sizes are numbers: a formula that asks about symbols would have the graph compiled for these."""
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape):
        return torch.empty([hint(n) for n in value.shape], dtype=value.dtype, device="meta")
    return value


def _attention_flops(node: fx.Node) -> float:
    """Two products in the forward, five in the backward. A causal mask leaves out blocks wholly above the diagonal."""
    given = arguments_of(node)
    query, key, value = (given[name].meta["val"] for name in ("query", "key", "value"))
    pairs = hint(math.prod(query.shape[:-1])) * hint(key.shape[-2])  # [..., heads, length, size]; numel() would guard
    sizes = (3.0, 2.0) if _is_backward(node) else (1.0, 1.0)
    share = 1.0
    if given.get("is_causal"):
        share = causal_share(hint(key.shape[-2]), query.device)
    return 2.0 * share * pairs * (sizes[0] * hint(query.shape[-1]) + sizes[1] * hint(value.shape[-1]))


def causal_share(length: float, device: torch.device) -> float:
    """The share of the pairs that the fused kernel computes under a causal mask."""
    block = _CAUSAL_BLOCK_CPU if device.type == "cpu" else _CAUSAL_BLOCK_GPU
    return min(1.0, 0.5 + 0.5 * block / max(length, 1.0))


def _is_backward(node: fx.Node) -> bool:
    return "backward" in str(called(node)[0])


def _rate(node: fx.Node, machine: Machine) -> float:
    dtype = next((t.dtype for t in tensors_of(node) if t.dtype.is_floating_point), torch.float32)
    if not is_attention(called(node)[0]):
        return machine.product_flops(dtype)
    query, key = (arguments_of(node)[name].meta["val"] for name in ("query", "key"))
    rate = machine.fused_attention_flops(dtype, hint(query.shape[-1]), backward=_is_backward(node))
    # a machine that is described by its products alone, such as a GPU that is not here, has no calibrated attention
    calibrated = query.device.type == "cpu" and machine.attention_flops
    return rate * (_short_rows(hint(key.shape[-2])) if calibrated else 1.0)


def _short_rows(length: float) -> float:
    """The rate of the CPU's fused attention over rows of so many keys, as a part of the calibrated rate."""

    def setup(keys: float) -> float:
        return keys / (keys + _KEYS_OF_SETUP)

    return min(setup(length) / setup(_CALIBRATED_KEYS), 1.0)


def _bias_s(node: fx.Node, machine: Machine) -> float:
    """On the CPU `addmm` fills its output with the bias before the product adds to it."""
    outputs = tensors_of(node)
    if node.target is not aten.addmm.default or outputs[0].device.type != "cpu":
        return 0.0
    return count(outputs[0]) * outputs[0].itemsize / machine.memory_bw


def _special_s(node: fx.Node, machine: Machine) -> float:
    each = machine.random_s if operator_of(node) in _RANDOM else machine.erf_s * _SPECIAL.get(operator_of(node), 0.0)
    return max(map(count, tensors_of(node)), default=0) * each


def traffic(kernels: Kernels) -> dict[fx.Node, Traffic]:
    """The traffic of every node that is computed."""
    found = {n: Traffic() for n, computed in zip(kernels.nodes, kernels.computes, strict=True) if computed}
    begun = set[int]()
    read = set[tuple[int, int]]()  # a storage, and a kernel that has read it
    written = {key for arg in kernels.nodes[-1].all_input_nodes for key in kernels.storages[kernels.index[arg]]}
    for node, one in found.items():
        i = kernels.index[node]
        inside = kernels.kernels(i)
        one.times = len(inside)
        if node.all_input_nodes:  # a constant begins no kernel
            one.first = len(inside - begun)
            begun |= inside
        for key, nbytes in kernels.reads[i].items():
            others = {k for k in inside if k != kernels.kernel.get(kernels.maker[key])}
            new = {(key, k) for k in others} - read
            one.read += nbytes * len(new)
            read |= new
            if others:
                written.add(key)
    for key in written & kernels.maker.keys():
        node = kernels.nodes[kernels.maker[key]]
        if node in found:
            found[node].written += kernels.storages[kernels.maker[key]][key]
    return found
