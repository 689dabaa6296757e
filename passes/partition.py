"""A partitioned joint graph: the forward and backward graphs with the facts that link them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, TangentAOTInput
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
NOT_CHECKED = "saved_tensor_with_no_vc_check"  # PyTorch's, in the meta of what autograd hands over whatever its version
COPIED = "ssd_fx_copied"  # in the meta of a copy that a pass made of an input which the step changes


@dataclass
class Partition:
    """What PyTorch's partitioner returned; rewrite passes edit the two modules in place.

    `num_fwd_outputs` is the number of leading forward outputs that are not saved tensors (user outputs, mutated inputs,
    intermediate bases, tokens). Each saved forward output has the name of its backward placeholder. `activations`:
    names of the forward's inputs that come anew with every step, unlike parameters and buffers.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int
    activations: frozenset[str] = frozenset()
    _found: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def fwd_output(self) -> fx.Node:
        return self.forward.graph.output_node()

    @property
    def saved(self) -> list[fx.Node]:
        """The forward outputs that the backward receives, in order."""
        outputs = self.fwd_output.args[0]
        assert isinstance(outputs, (list, tuple))
        return [n for n in outputs[self.num_fwd_outputs :] if isinstance(n, fx.Node)]

    @property
    def kept_outputs(self) -> list[fx.Node]:
        """The forward outputs that the caller sees."""
        outputs = self.fwd_output.args[0]
        assert isinstance(outputs, (list, tuple))
        return [n for n in outputs[: self.num_fwd_outputs] if isinstance(n, fx.Node)]

    @property
    def activation_inputs(self) -> list[fx.Node]:
        """The forward's inputs that come anew with every step."""
        return [n for n in self.forward.graph.nodes if n.op == "placeholder" and n.name in self.activations]

    @property
    def lent(self) -> frozenset[str]:
        """Names of what the backward reads although the caller has it, and may write into it before: outputs, and
        inputs that come anew with every step."""
        saved = {storage_of(n) for n in self.saved} - {None}
        return frozenset(n.name for n in (*self.kept_outputs, *self.activation_inputs) if storage_of(n) in saved)

    @property
    def bwd_placeholders(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.backward.graph.nodes if n.op == "placeholder"}

    def once(self, analysis: Callable[[Partition], T]) -> T:
        """What `analysis` says of both graphs: asked once, however many passes want it, until they are rewritten."""
        if analysis not in self._found:
            self._found[analysis] = analysis(self)
        return cast(T, self._found[analysis])

    def recompile(self) -> None:
        self._found.clear()
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()


Names = tuple[list[str], list[str]]  # of the nodes of the forward, and of the backward


def node_names(partition: Partition) -> Names:
    """The names of the nodes of both graphs: before insertion, those that a plan's points mean."""
    return [n.name for n in partition.forward.graph.nodes], [n.name for n in partition.backward.graph.nodes]


def activation_inputs(joint: fx.GraphModule, static: Sequence[int] | None) -> frozenset[str]:
    """Names of the joint graph's inputs that are no parameters or buffers, as far as anybody said so.

    `static`: the indices of inputs that live longer than a step, or None where that is not known. They count from the
    first primal; a graph with effect tokens, which come before it, has no known activations.
    """
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    if static is None or any(type(n.meta.get("desc")) not in (PlainAOTInput, TangentAOTInput) for n in inputs):
        return frozenset()
    lasting = set(static)
    names = {n.name for i, n in enumerate(inputs) if i not in lasting}
    return frozenset(names - {n.name for n in inputs if isinstance(n.meta["desc"], TangentAOTInput)})


def changed_inputs(graph: fx.Graph) -> frozenset[int]:
    """Storages of the inputs that a forward or joint graph writes into, or that are written behind it with its outputs.

    Where they are saved for the backward it reads what they have become, without a word where autograd does not see
    the write, as under `no_grad`.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    by_desc = {n.meta["desc"]: n for n in inputs if "desc" in n.meta}
    descs = graph.output_node().meta.get("desc", ())
    behind = [by_desc.get(d.mutated_input) for d in descs if isinstance(d, InputMutationAOTOutput)]
    inside = [arg for n in graph.nodes for arg in written(n)]
    keys = {storage_of(n) for n in (*behind, *inside) if n is not None}
    return frozenset(keys & {storage_of(n) for n in inputs} - {None})  # type: ignore[arg-type]


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node's operator writes into, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = node.target._schema.arguments
    given = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    targets = (given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return [n for n in tree_leaves(tuple(targets)) if isinstance(n, fx.Node)]


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The FakeTensor of a node, or None where it yields something else."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """All FakeTensors of a node, also those in tuples."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):  # nearly always: walking a tree of one leaf takes ten times as long
        return [val]
    return [t for t in tree_leaves(val) if isinstance(t, torch.Tensor)] if isinstance(val, (tuple, list, dict)) else []


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of the storage of a FakeTensor, or None where the tensor has none (sparse, subclass).

    The key is valid while the tensor is alive; the graphs hold theirs in `meta["val"]`.
    """
    if tensor.layout != torch.strided or type(tensor) is not torch._subclasses.FakeTensor:
        return None
    return int(tensor.untyped_storage()._cdata)


def storage_of(node: fx.Node) -> int | None:
    """Identity of the storage of what a node yields; None where it yields no tensor or one that has none."""
    tensor = tensor_of(node)
    return None if tensor is None else storage_key(tensor)


def nodes_by_storage(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """Nodes that yield a tensor, grouped by storage, in the order given."""
    groups: dict[int, list[fx.Node]] = {}
    for node in nodes:
        key = storage_of(node)
        if key is not None:
            groups.setdefault(key, []).append(node)
    return groups


def known_symbols(backward: fx.Graph) -> frozenset[object]:
    """The symbolic sizes that the backward is given as numbers: those of its saved integers."""
    values = [n.meta.get("val") for n in backward.nodes if n.op == "placeholder"]
    exprs = [v.node.expr for v in values if isinstance(v, torch.SymInt)]
    return frozenset(e for e in exprs if e.is_symbol)


def fingerprint(partition: Partition) -> str:
    """Eight hex digits that name the graph in reports: the same in every process that compiles the same graph."""
    digest = hashlib.sha256()
    for module in (partition.forward, partition.backward):
        for node in module.graph.nodes:
            tensor = tensor_of(node)
            layout = "" if tensor is None else f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}"
            digest.update(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {layout}\n".encode())
    return digest.hexdigest()[:8]
