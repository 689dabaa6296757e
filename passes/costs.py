"""Predicted time of every node: a roofline over flops and bytes, from the FakeTensors.

The figures only place nodes; a wrong one costs a stall or some memory, never a wrong value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ssd_fx.passes.partition import Partition, storage_key, tensor_of
from ssd_fx.passes.plan import Plan, Timeline


@dataclass(frozen=True)
class Machine:
    """Rates of the machine that runs the graph: flops/s, bytes/s, and seconds of latency per transfer."""

    flops: float
    memory_bw: float
    write_bw: float
    read_bw: float
    latency_s: float = 1e-3
    node_s: float = 0.0
    drag_s_per_byte: float = 0.0

    @staticmethod
    def default(device: torch.device, threads: int) -> Machine:
        """Typical rates: a CPU core at 50 Gflop/s; a drive at 1.5 GB/s write and 1.0 GB/s read beside compute."""
        if device.type == "cpu":
            return Machine(50e9 * threads, 5e9 * threads, 1.5e9, 1.0e9)
        return Machine(100e12, 1.5e12, 5e9, 6e9)


def time(partition: Partition, plan: Plan, *, machine: Machine) -> Plan:
    """Fill `plan.timeline`."""
    forward, backward = partition.forward.graph, partition.backward.graph
    begin = next(i for i, n in enumerate(backward.nodes) if n.op != "placeholder")
    return plan.with_(timeline=Timeline(_starts(forward, machine), _starts(backward, machine), begin))


def _starts(graph: fx.Graph, machine: Machine) -> tuple[float, ...]:
    starts = [0.0]
    for node in graph.nodes:
        starts.append(starts[-1] + 1e3 * seconds(node, machine))
    return tuple(starts)


def seconds(node: fx.Node, machine: Machine) -> float:
    """Predicted seconds of one node; 0 for views and for what Inductor fuses into its consumer."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    flops = _flops(node)
    if flops:
        return max(flops / machine.flops, (_read(node) + _written(node)) / machine.memory_bw)
    # A pointwise node is fused: only what some kernel must write for another one to read costs memory traffic.
    return _written(node) / machine.memory_bw if _is_materialized(node) else 0.0


def _flops(node: fx.Node) -> float:
    count = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if count is None:
        return 0.0
    args = torch.utils._pytree.tree_map(lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a, node.args)
    kwargs = torch.utils._pytree.tree_map(lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a, node.kwargs)
    return float(hint(count(*args, **kwargs, out_val=node.meta.get("val"))))


def _is_materialized(node: fx.Node) -> bool:
    return any(user.op == "output" or has_flops(user) for user in node.users)


def has_flops(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in flop_registry


def _written(node: fx.Node) -> float:
    """Bytes of the outputs that are not views of an input."""
    inputs = {storage_key(t) for n in node.all_input_nodes if (t := tensor_of(n)) is not None}
    outputs = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    return sum(_nbytes(t) for t in outputs if storage_key(t) not in inputs)


def _read(node: fx.Node) -> float:
    return sum(_nbytes(t) for n in node.all_input_nodes if (t := tensor_of(n)) is not None)


def _nbytes(tensor: torch.Tensor) -> float:
    return float(hint(tensor.numel())) * tensor.itemsize


def hint(value: object) -> float:
    if isinstance(value, torch.SymInt):
        hint = value.node.hint  # None where the size depends on data
        return float(hint) if hint is not None else 0.0
    return float(value)  # type: ignore[arg-type]
