"""Whether a step is predicted to fit a limit of memory: its parts, and the largest tensor at its peak."""

from __future__ import annotations

import gc
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

    input_bytes: parameters, buffers and inputs of the graph. gradient_bytes: which its backward makes, and
    trained_bytes: those of parameters. there_bytes: all tensors before the step, as counted; 0 if nothing counts them.
    peak_bytes: the most above that, the gradients included. largest: the largest tensor then, with its module and line.
    optimizers: those that there are.
    """

    input_bytes: int
    gradient_bytes: int
    trained_bytes: int
    there_bytes: int
    peak_bytes: int
    largest: str
    optimizers: Optimizers | None

    @property
    def before_bytes(self) -> int:
        return max(self.there_bytes, self.input_bytes)

    @property
    def state_bytes(self) -> int:
        """Of optimizers' state that is not there yet. If there is no optimizer, what is there beside the inputs may be
        the state of one."""
        if self.optimizers is not None:
            return self.optimizers.state_bytes
        return max(0, self.input_bytes + COPIES * self.trained_bytes - self.before_bytes)

    @property
    def total_bytes(self) -> int:
        return self.before_bytes + self.state_bytes + self.peak_bytes

    def __str__(self) -> str:
        before = f"{format_bytes(self.input_bytes)} of parameters, buffers and inputs"
        if self.there_bytes > self.input_bytes:
            before = f"{format_bytes(self.there_bytes)} that are there already"
            if self.optimizers is not None and self.optimizers.gradient_bytes:
                before += f" ({format_bytes(self.optimizers.gradient_bytes)} are gradients, which stay beside new ones)"
        if self.state_bytes:
            whose = "an optimizer such as Adam" if self.optimizers is None else self.optimizers.names
            before += f", {format_bytes(self.state_bytes)} of the state of {whose}"
        rest = max(0, self.peak_bytes - self.gradient_bytes)
        gradients = f"{format_bytes(min(self.gradient_bytes, self.peak_bytes))} of gradients"
        return f"{before}, {gradients}, {format_bytes(rest)} of activations and workspaces at the peak"


@dataclass(frozen=True, slots=True)
class Optimizers:
    """The optimizers of a process that train tensors of a device.

    names: of their classes. state_bytes: of the state that they are still to make. gradient_bytes: of the gradients
    that are there: where they stay (`zero_grad(set_to_none=False)`), a backward makes a second set.
    """

    names: str
    state_bytes: int
    gradient_bytes: int


def optimizers_of(device: torch.device) -> Optimizers | None:
    """None if there are none yet."""
    names, state, gradients = set[str](), dict[int, int](), dict[int, int]()  # by tensor: one may wrap another
    # by `type`: `isinstance` asks the object, which may be a proxy of a dead one
    for optimizer in [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]:
        for group in optimizer.param_groups:
            copies = int(bool(group.get("momentum"))) if isinstance(optimizer, torch.optim.SGD) else COPIES
            for p in group["params"]:
                if p.device.type != device.type or not p.requires_grad:
                    continue
                names.add(type(optimizer).__name__)
                gradients[id(p)] = 0 if p.grad is None else _own_bytes(p.grad)
                missing = 0 if p in optimizer.state else copies * _own_bytes(p)
                state[id(p)] = min(missing, state.get(id(p), missing))
    return Optimizers(" and ".join(sorted(names)), sum(state.values()), sum(gradients.values())) if names else None


def _own_bytes(x: torch.Tensor) -> int:
    """Of a sharded tensor those of this rank."""
    return int(getattr(x, "_local_tensor", x).nbytes)


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
        made = parts(partition, plan, options.roots, found.live_bytes(), optimizers_of(device))
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


def parts(
    partition: Partition, plan: Plan, roots: tuple[str, ...], there_bytes: int, optimizers: Optimizers | None
) -> Parts:
    """Of a graph that is not rewritten yet, and its plan."""
    found = replay_of(plan)
    owners = nodes_by_storage(partition.forward.graph.find_nodes(op="placeholder")).values()
    inputs = {nodes[0]: _bytes(nodes[0]) for nodes in owners}
    made = partition.backward.graph.output_node().all_input_nodes
    gradients = sum(_bytes(nodes[0]) for nodes in nodes_by_storage(made).values())
    lasting = sum(nbytes for node, nbytes in inputs.items() if node not in partition.activation_inputs)
    largest, trained = largest_at(partition, found.peak_node, roots), min(gradients, lasting)
    return Parts(sum(inputs.values()), gradients, trained, there_bytes, found.peak, largest, optimizers)


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
