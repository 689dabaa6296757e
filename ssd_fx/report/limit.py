"""Whether a step is predicted to fit a limit of memory: its parts, and the largest tensor at its peak."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import fx

from ssd_fx.passes.cost.footprint import both_buffers
from ssd_fx.passes.cost.kernels import both_kernels
from ssd_fx.passes.cost.operators import hint
from ssd_fx.passes.joint.modules import enclosing, source_line
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, nodes_by_storage, tensor_of
from ssd_fx.passes.partitioner import About
from ssd_fx.passes.plan import Plan, replay_of
from ssd_fx.runtime.account import limit_of
from ssd_fx.runtime.memory.gauge import gauge
from ssd_fx.sizes import format_bytes

log = logging.getLogger("ssd_fx")
COPIES = 2  # of what is trained, which an optimizer such as Adam keeps


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step is predicted to need at its peak, in bytes.

    input_bytes: parameters, buffers and inputs of the graph. gradient_bytes: which its backward makes. state_bytes: of
    the optimizer. there_bytes: all tensors before the step, as counted; 0 if nothing counts them. peak_bytes: the most
    above that, the gradients included. largest: the largest tensor then, with its module and line.
    """

    input_bytes: int
    gradient_bytes: int
    state_bytes: int
    there_bytes: int
    peak_bytes: int
    largest: str

    @property
    def total_bytes(self) -> int:
        return max(self.there_bytes, self.input_bytes + self.state_bytes) + self.peak_bytes

    def __str__(self) -> str:
        before = f"{format_bytes(self.input_bytes)} of parameters, buffers and inputs"
        before += f", {format_bytes(self.state_bytes)} of an optimizer's state such as Adam's"
        if self.there_bytes > self.input_bytes + self.state_bytes:
            before = f"{format_bytes(self.there_bytes)} that are there already"
        rest = max(0, self.peak_bytes - self.gradient_bytes)
        gradients = f"{format_bytes(min(self.gradient_bytes, self.peak_bytes))} of gradients"
        return f"{before}, {gradients}, {format_bytes(rest)} of activations and workspaces at the peak"


def told(
    memory: int | float | str,
    ranks: int,
    device: torch.device,
    about: About,
    partition: Partition,
    plan: Plan,
    options: PlanOptions,
) -> str:
    """What `about` returns. Logs before whether the graph is predicted to fit the option `memory`, as a warning if not.

    `memory`: the option. `ranks`: how many processes share the node.
    """
    found = gauge(device)
    if found is not None:
        limit = limit_of(memory, ranks, found, device)
        made = parts(partition, plan, options.roots, found.live_bytes())
        over = made.total_bytes - limit
        need = f"graph {plan.graph} is predicted to need {format_bytes(made.total_bytes)} at the least: {made}"
        if over <= 0:
            log.info("memory=%s: %s; it fits", format_bytes(limit), need)
        else:
            log.warning(
                "memory=%s: %s; that is %s too much. The largest tensor at the peak is %s. Training goes on with the "
                "lowest peak; a smaller micro-batch, a loss in chunks, sharding or an optimizer with less state would "
                "help",
                *(format_bytes(limit), need, format_bytes(over), made.largest or "none of the model's"),
            )
    return about(partition, plan, options)


def parts(partition: Partition, plan: Plan, roots: tuple[str, ...], there_bytes: int) -> Parts:
    """Of a graph that is not rewritten yet, and its plan. The state is that of an optimizer such as Adam."""
    found = replay_of(plan)
    owners = nodes_by_storage(partition.forward.graph.find_nodes(op="placeholder")).values()
    inputs = {nodes[0]: _bytes(nodes[0]) for nodes in owners}
    made = partition.backward.graph.output_node().all_input_nodes
    gradients = sum(_bytes(nodes[0]) for nodes in nodes_by_storage(made).values())
    lasting = sum(nbytes for node, nbytes in inputs.items() if node not in partition.activation_inputs)
    state = COPIES * min(gradients, lasting)
    largest = largest_at(partition, found.peak_node, roots)
    return Parts(sum(inputs.values()), gradients, state, there_bytes, found.peak, largest)


def _bytes(node: fx.Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else int(hint(tensor.untyped_storage().nbytes()))


def largest_at(partition: Partition, at: int, roots: tuple[str, ...]) -> str:
    """The largest tensor that lives during a node, parameters and inputs aside; nodes of the backward follow those of
    the forward."""
    pairs = zip(partition.once(both_kernels), partition.once(both_buffers), strict=True)
    for kernels, buffers in pairs:
        if at < len(kernels.nodes):
            made = [n for n in partition.forward.graph.nodes if n.op != "placeholder"]
            names = {n.name: n for n in made}  # what is saved has the same name in the backward, and no module there
            alive = [
                (buffers.nbytes[key], names.get(kernels.nodes[i].name, kernels.nodes[i]))
                for key, i in kernels.maker.items()
                if buffers.first[key] <= at <= buffers.last[key]
            ]
            own = [(nbytes, node) for nbytes, node in alive if node.op != "placeholder"]
            if not own:
                return ""
            nbytes, node = max(own, key=lambda each: each[0])
            where = " ".join(filter(None, (enclosing(node, roots)[-1], source_line(node))))
            return f"{node.name} ({', '.join(filter(None, (where, format_bytes(nbytes))))})"
        at -= len(kernels.nodes)
    return ""
