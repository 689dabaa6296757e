"""Which alias groups to compute again instead of saving them, and the partition that does so.

    1. partition as PyTorch does                          relu, mm, gelu saved
    2. price: the cost of computing each group again      gelu: itself and mm, from saved tensors
    3. keep, recompute or offload, for all groups         the write lane is full: gelu and mm are computed again
    4. partition with PyTorch's min-cut, and tags         relu saved; mm and gelu run in the backward too

Step 4 sets the tags of selective checkpointing. What was chosen must be recomputed, the other saved tensors must be
saved, and PyTorch's min-cut decides the rest. The new partition is planned and simulated like the first one; it is
taken only if it is predicted to be faster. docs/decisions.md says why we do not use `activation_memory_budget`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ssd_fx.compat import (
    REGION_BUDGET,
    OpOverload,
    _get_graph_module_cls,
    _make_graph_module,
    functorch_config,
    min_cut_rematerialization_partition,
)
from ssd_fx.passes.cost.operators import is_attention
from ssd_fx.passes.joint.collectives import is_silent
from ssd_fx.passes.joint.compared import chooses, compared, jumps
from ssd_fx.passes.joint.spread import spread
from ssd_fx.passes.partition import (
    RECOMPUTED,
    Partition,
    activation_names,
    arguments_of,
    changed_inputs,
    storage_of,
    tensors_of,
    untrained_names,
)
from ssd_fx.passes.plan import Plan, Price

_DRAWN = ("prims::inductor_random", "prims::inductor_randint")  # from a seed
_SEEDS = (
    "prims::inductor_seed",
    "prims::inductor_seeds",
)  # a few bytes, which the cut saves
_SPARING = {  # PyTorch's min-cut without the heuristics by which it saves more, to compute less again
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
    "ban_recompute_reductions": False,
}
LONGEST = 200  # nodes of a chain; a longer one is not worth its time


class CutError(Exception):
    """PyTorch cannot make a partition with these tags."""


class Joint:
    """A joint graph that can be partitioned several times, each time with other operators recomputed.

    `module` has been through the passes of a joint graph; `inputs` and `arguments` are those of PyTorch's min-cut.
    `after_cut`: passes that run on every partition. `lasting`: as in `activation_names`.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[object],
        arguments: dict[str, Any],
        after_cut: Sequence[Callable[[Partition], None]],
        lasting: frozenset[int] | None = None,
    ) -> None:
        self._module = module
        self._inputs = inputs
        self._arguments = arguments
        self._after_cut = after_cut
        self._lasting = lasting
        self._activations = activation_names(module, arguments.get("static_lifetime_input_indices"), lasting)
        self._untrained = untrained_names(module)

    @property
    def has_own_budget(self) -> bool:
        """Whether the model itself sets a memory budget for PyTorch.

        It does so by `region_activation_memory_budget` of torch.autograd.graph, or by the older marker "memory_budget".
        """
        modules = [m for m in self._module.modules() if isinstance(m, fx.GraphModule)]  # regions within regions, too
        metas = [n.meta for m in modules for n in m.graph.nodes]
        return any("memory_budget" in m or REGION_BUDGET in (m.get("custom") or ()) for m in metas)

    @property
    def is_nested(self) -> bool:
        """Whether it is a region of another graph (`torch.compiler.nested_compile_region`), cut before that one."""
        return not self._inputs

    def copy(self) -> Joint:
        """A joint graph over the same FakeTensors, which can be cut without a change of this one."""
        return Joint(_clone(self._module), self._inputs, self._arguments, self._after_cut, self._lasting)

    def partition(self, *, again: bool = False) -> Partition:
        """The partition that PyTorch makes by itself. `again`: the graph may be cut once more later."""
        if again:  # else the cut writes its notes into PyTorch's own module, which PyTorch later reads
            self._module = _lazy(self._module)
        return self._partition(*self._cut(self._module))

    def partition_again(
        self, recomputed: Collection[str], saved: Collection[str], maybe: Collection[str] = ()
    ) -> Partition:
        """The partition whose backward computes the nodes `recomputed` again, and saves the nodes `saved` if needed.

        With `maybe` it saves the fewest bytes, and computes any of these nodes again for that.

        A node keeps a tag that it has already. Views of a recomputed node get its tag too: to PyTorch a cut through a
        view is as cheap, and saves the same bytes. A node that may not run twice counts as no view, whatever its
        FakeTensor says. The graph is as the first cut left it: common subexpressions are merged, and PyTorch's own tags
        are set. Attention may draw random numbers, but tagged nodes draw none, so this hides them from the cut: it
        would save and set the state of the generator around them. The partition loses the tags that are set here,
        because proposals may begin from it.

        Raises:
            CutError: PyTorch cannot partition it so.
        """
        module = _clone(self._module)
        tagged = {n.name for n in module.graph.nodes if "recompute" in n.meta}
        again = {storage_of(n) for n in module.graph.nodes if n.name in recomputed} - {None}
        for node in module.graph.nodes:
            if node.op != "call_function" or "recompute" in node.meta:
                continue
            if node.name in recomputed or (storage_of(node) in again and may_run_twice(node)):
                _tag_to_recompute(node)
            elif node.name in saved:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif node.name in maybe:
                node.meta[RECOMPUTED] = True
        for node in module.graph.nodes:
            if RECOMPUTED in node.meta and _is_seeded(node):
                node.target = _DrawsNothing(node.target)
        with functorch_config.patch({"cse": False} | (_SPARING if maybe else {})):
            try:
                graphs = self._cut(module)
            except RuntimeError as error:
                raise CutError(str(error)) from error
        inputs = {storage_of(n) for n in graphs[1].graph.find_nodes(op="placeholder")} - {None}
        made = {n.name for n in graphs[1].graph.nodes if n.op == "call_function" and storage_of(n) not in inputs}
        for node in itertools.chain.from_iterable(graph.graph.nodes for graph in graphs):
            if isinstance(node.target, _DrawsNothing):
                node.target = node.target.operator
            if node.name not in tagged:
                node.meta.pop("recompute", None)
            if node.name in maybe and node.name not in made:
                node.meta.pop(RECOMPUTED, None)
        partition = self._partition(*graphs)
        spread(partition)
        return partition

    def _cut(self, module: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        return min_cut_rematerialization_partition(module, self._inputs, **self._arguments)  # type: ignore[no-any-return]

    def _partition(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Partition:
        count = self._arguments["num_fwd_outputs"]
        partition = Partition(forward, _lazy(backward), count, self._activations, self._untrained)
        for each in self._after_cut:
            each(partition)
        return partition


class _DrawsNothing:
    """Stands for an operator during a cut, without its tags."""

    def __init__(self, operator: OpOverload) -> None:
        self.operator = operator
        self.__name__, self.__module__ = operator.__name__, __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)


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


def price(partition: Partition, plan: Plan, *, saved: Collection[int] = ()) -> Plan:
    """Fill `plan.prices` for every group that can be computed again from saved tensors or from parameters.

    Groups of the slots `saved` get no price. What the caller may have written into meanwhile is a source only if it is
    saved so that autograd would notice.
    Needs `plan.groups` and `plan.node_ms`.
    """
    assert plan.node_ms is not None
    nodes = {n.name: n for n in partition.forward.graph.nodes}
    starts, _ = plan.node_ms
    seconds = {n: (starts[i + 1] - starts[i]) / 1e3 for i, n in enumerate(nodes.values())}
    slots: dict[int | None, int | None] = {storage_of(n): None for n in partition.saved}
    slots |= {storage_of(nodes[g.base]): g.slot for g in plan.groups}
    slots.pop(None, None)
    callers = {storage_of(n) for n in partition.caller_inputs}
    callers |= {storage_of(n) for n in partition.caller_outputs} & slots.keys()  # a chain goes on through others
    callers.discard(None)  # sizes, which never change
    unstable = changed_inputs(partition.forward.graph) | (callers - partition.checked)
    exact = partition.once(compared)
    forward = _Forward(
        keys={n: storage_of(n) for n in nodes.values()},
        twice={n for n in nodes.values() if n.op != "placeholder" and may_run_twice(n)},
        seconds=seconds,
        slots=slots,
        unstable=unstable,
    )
    found = {}
    for group in plan.groups:
        tagged = "recompute" in nodes[group.base].meta  # `partition_again` leaves it as it is
        tagged |= group.slot in saved
        if tagged or group.obstacle or not exact.isdisjoint(m.name for m in group.members):
            continue
        cost = _price(nodes[group.base], forward)
        if cost is not None:
            found[group.slot] = replace(cost, launches=len(cost.nodes & plan.launches.again))
    return plan.with_(prices=found)


@dataclass(frozen=True)
class _Forward:
    """The facts that prices are computed from.

    keys: the storage of each node's tensor. twice: the nodes that may run twice. seconds: the time of each node.
    slots: each saved storage, with the slot of its alias group, or None where it is in no group.
    unstable: storages that may hold other values in the backward, because the step or its caller writes into them.
    """

    keys: Mapping[fx.Node, int | None]
    twice: Collection[fx.Node]
    seconds: Mapping[fx.Node, float]
    slots: Mapping[int | None, int | None]
    unstable: Collection[int | None]


def _price(base: fx.Node, forward: _Forward) -> Price | None:
    """The price of the nodes from saved tensors to `base`; None if one of them cannot or should not run twice."""
    keys, slots = forward.keys, forward.slots
    chain: dict[fx.Node, None] = {}
    sources: set[int | None] = set()
    work = [base]
    while work:
        node = work.pop()
        if node in chain:
            continue
        if node not in forward.twice or len(chain) > LONGEST:
            return None
        chain[node] = None
        for source in node.all_input_nodes:
            key = keys[source]
            if key in forward.unstable:
                return None
            if key in slots and key != keys[base]:
                sources.add(key)
            elif source.op not in ("placeholder", "get_attr") and _name(source) not in _SEEDS:
                work.append(source)
    if len(sources) > 1 and any(map(jumps, chain)):  # a source may be computed again too; see `compared`
        return None
    names = frozenset(n.name for n in chain)
    needs = frozenset(slot for key in sources if (slot := slots[key]) is not None)
    return Price(math.fsum(forward.seconds[n] for n in chain), names, needs)


def may_run_twice(node: fx.Node) -> bool:
    """Whether a node calls one of PyTorch's own functional operators, which yields the same again, and does not choose.

    Random numbers are the same if Inductor draws them from a seed. Other libraries' operators may have effects that no
    tag announces: random numbers, counters, output. The vectors of a decomposition (`linalg_eigh`) have any sign.
    """
    target = node.target
    if getattr(target, "__name__", "") == "getitem":
        return True
    if not isinstance(target, OpOverload) or not is_silent(target):
        return False
    if chooses(node) or "linalg_" in target.name() or (target.name() in _DRAWN and not _are_drawn_alike(node)):
        return False
    return not target._schema.is_mutable and (not _is_seeded(node) or _is_attention_without_dropout(node))


def _are_drawn_alike(node: fx.Node) -> bool:
    """Whether every kernel that draws the numbers of `node` from their seed draws the same, whatever its shape."""
    device = tensors_of(node)[0].device.type
    return device == "cpu" or (device == "cuda" and _can_draw_one_by_one())


@functools.cache
def _can_draw_one_by_one() -> bool:
    """Whether kernels for CUDA draw every number by itself, or can be told to (`lowering/random_numbers.py`)."""
    from ssd_fx.compat.inductor import draws_one_by_one

    return draws_one_by_one()


def _name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, OpOverload) else ""


def _is_seeded(node: fx.Node) -> bool:
    """Whether the node calls an operator that may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_attention_without_dropout(node: fx.Node) -> bool:
    """Fused attention draws random numbers only if it drops out."""
    return is_attention(node.target) and arguments_of(node).get("dropout_p") == 0.0
