"""Whether a step is predicted to fit a limit of memory: its parts, and the largest tensor at its peak.

Said when a graph is compiled (`told`), and before training (`estimate.py`), by the same figures.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ssd_fx import fake
from ssd_fx.compat import FakeTensor
from ssd_fx.passes.cost.footprint import both_buffers
from ssd_fx.passes.cost.kernels import both_kernels
from ssd_fx.passes.cost.operators import hint
from ssd_fx.passes.joint.modules import enclosing, source_line
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, nodes_by_storage
from ssd_fx.passes.partitioner import About
from ssd_fx.passes.plan import Plan, replay_of
from ssd_fx.runtime.account import limit_of
from ssd_fx.runtime.errors import first_line
from ssd_fx.runtime.memory.gauge import gauge
from ssd_fx.runtime.stats import stats
from ssd_fx.sizes import format_bytes

log = logging.getLogger("ssd_fx")
COPIES = 2  # of what is trained, which an optimizer such as Adam keeps


@dataclass(frozen=True, slots=True)
class Parts:
    """What a graph is predicted to need, in bytes.

    input_bytes: parameters, buffers and inputs. gradient_bytes: gradients that its backward makes. trained_bytes: those
    of parameters. peak_bytes: the most above what was there before it, the gradients included. largest: the largest
    tensor at that peak, with its module and line.
    """

    input_bytes: int
    gradient_bytes: int
    trained_bytes: int
    peak_bytes: int
    largest: str

    def __str__(self) -> str:
        rest = max(0, self.peak_bytes - self.gradient_bytes)
        gradients = f"{format_bytes(min(self.gradient_bytes, self.peak_bytes))} of gradients"
        return f"{gradients}, {format_bytes(rest)} of activations and workspaces at the peak"


@dataclass(frozen=True, slots=True)
class Optimizers:
    """Optimizers of a process.

    names: of their classes. state_bytes: of the state that they are still to make. gradient_bytes: of the gradients
    that are there: where they stay (`zero_grad(set_to_none=False)`), a backward makes a second set. guessed: classes
    whose state is taken to be as large as that of Adam, and why.
    """

    names: str
    state_bytes: int
    gradient_bytes: int
    guessed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Before:
    """What all tensors take beside what a step needs at its peak, in bytes.

    input_bytes: parameters, buffers and inputs of its graphs. trained_bytes: of the parameters that get gradients.
    there_bytes: all tensors before the step. optimizers: those that there are; None if there will be one.
    """

    input_bytes: int
    trained_bytes: int
    there_bytes: int
    optimizers: Optimizers | None

    @property
    def level_bytes(self) -> int:
        """The bytes that are there before the step."""
        return max(self.there_bytes, self.input_bytes)

    @property
    def state_bytes(self) -> int:
        """The bytes of optimizers' state that is not there yet."""
        return COPIES * self.trained_bytes if self.optimizers is None else self.optimizers.state_bytes

    @property
    def total_bytes(self) -> int:
        return self.level_bytes + self.state_bytes

    def __str__(self) -> str:
        before = f"{format_bytes(self.input_bytes)} of parameters, buffers and inputs"
        if self.there_bytes > self.input_bytes:
            before = f"{format_bytes(self.there_bytes)} that are there already"
            if self.optimizers is not None and self.optimizers.gradient_bytes:
                before += f" ({format_bytes(self.optimizers.gradient_bytes)} are gradients, which stay beside new ones)"
        if self.state_bytes:
            whose = "an optimizer such as Adam" if self.optimizers is None else self.optimizers.names
            before += f", {format_bytes(self.state_bytes)} of the state of {whose}"
            if self.optimizers is not None and self.optimizers.guessed:
                before += f" (of {' and '.join(self.optimizers.guessed)} as much as of Adam)"
        return before


def optimizers_of(made: Iterable[torch.optim.Optimizer], device: torch.device | None = None) -> Optimizers | None:
    """What is known of the optimizers that train something; None if there are none.

    `device`: counts only what has memory there.
    """
    names, guessed = set[str](), dict[str, str]()
    state, gradients = dict[int, int](), dict[int, int]()  # by tensor: one optimizer may wrap another
    for optimizer in made:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if device is not None:
            trained = [p for p in trained if p.device.type == device.type and type(p) is not FakeTensor]
        if not trained:
            continue
        name = type(optimizer).__name__
        names.add(name)
        new = [p for p in trained if p not in optimizer.state]
        coming, why = _first_state(optimizer, new) if new else ({}, "")
        guessed |= {name: why} if why else {}
        for p in trained:
            gradients[id(p)] = 0 if p.grad is None else fake.nbytes_of(p.grad)
            state[id(p)] = min(coming.get(id(p), 0), state.get(id(p), sys.maxsize))
    if not names:
        return None
    return Optimizers(" and ".join(sorted(names)), sum(state.values()), sum(gradients.values()), guessed)


def _first_state(optimizer: torch.optim.Optimizer, new: Sequence[torch.Tensor]) -> tuple[dict[int, int], str]:
    """Bytes of the state of tensors that have none yet, by their ids; and why they are a guess, if they are."""
    why = _unsafe(optimizer, new)
    if not why:
        try:
            return fake.first_state(optimizer, new), ""
        except Exception as error:  # anything: it is the optimizer's own code, on tensors without data
            why = f"its step needs data ({type(error).__name__}: {first_line(error)})"
    return {id(p): COPIES * fake.nbytes_of(p) for p in new}, why


def _unsafe(optimizer: torch.optim.Optimizer, new: Iterable[torch.Tensor]) -> str:
    """Why a copy of `optimizer` should not step; empty if it may. Others' may launch kernels, or wait for ranks."""
    if any(type(p) not in fake.PLAIN for p in new):
        return "what it trains is of a class of its own"
    harmless = type(optimizer).__module__.startswith("torch.optim") or all(type(p) is FakeTensor for p in new)
    return "" if harmless else "it is none of torch's own"


def told(
    memory: int | float | str,
    ranks: int,
    device: torch.device,
    about: About,
    partition: Partition,
    plan: Plan,
    options: PlanOptions,
) -> str:
    """Returns what `about` returns. First logs whether the graph is predicted to fit `memory`, as a warning if not.

    `memory`: the option. `ranks`: how many processes share the node.
    """
    found = gauge(device)
    if found is not None:
        limit, graph = limit_of(memory, ranks, found, device), parts(partition, plan, options.roots)
        before = Before(graph.input_bytes, graph.trained_bytes, found.live_bytes(), optimizers_here(device))
        total = before.total_bytes + graph.peak_bytes
        need = f"graph {plan.graph} is predicted to need {format_bytes(total)} at the least: {before}, {graph}"
        if total <= limit:
            log.info("memory=%s: %s; it fits", format_bytes(limit), need)
        else:
            log.warning(
                "memory=%s: %s; that is %s too much. The largest tensor at the peak is %s. Training goes on with the "
                "lowest peak; a smaller micro-batch, a loss in chunks, sharding or an optimizer with less state would "
                "help",
                *(format_bytes(limit), need, format_bytes(total - limit), graph.largest or "none of the model's"),
            )
    return about(partition, plan, options)


def optimizers_here(device: torch.device) -> Optimizers | None:
    """The optimizers of this process. If it has trained and has none of torch's, the state of another one is there."""
    # by `type`: `isinstance` asks the object, which may be a proxy of a dead one
    here = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return optimizers_of(here, device) or (Optimizers("", 0, 0) if stats().steps > 1 else None)


def parts(partition: Partition, plan: Plan, roots: tuple[str, ...]) -> Parts:
    """What a graph that is not rewritten yet needs under its plan."""
    found = replay_of(plan)
    inputs = storage_bytes(partition.forward.graph.find_nodes(op="placeholder"))
    gradients = storage_bytes(partition.backward.graph.output_node().all_input_nodes)
    largest = largest_at(partition, found.peak_node, roots)
    return Parts(inputs, gradients, storage_bytes(partition.lasting_gradients), found.peak, largest)


def storage_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the storages of all these nodes."""
    return sum(hint(same[0].meta["val"].untyped_storage().nbytes()) for same in nodes_by_storage(nodes).values())


def largest_at(partition: Partition, at: int, roots: tuple[str, ...]) -> str:
    """The largest tensor that lives during node `at`, parameters and inputs aside. The backward's nodes are numbered
    after the forward's."""
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
