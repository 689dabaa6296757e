"""A partitioned joint graph: the forward and backward graphs with the facts that link them."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ssd_fx.compat import (
    AOTInput,
    AOTOutput,
    BackwardTokenAOTInput,
    FakeTensor,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    OpOverload,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
    TangentAOTInput,
    tree_leaves,
)

T = TypeVar("T")
NOT_CHECKED = "saved_tensor_with_no_vc_check"  # PyTorch's, in node.meta: autograd does not check the tensor's version
STORED = "ssd_fx_stored"  # in node.meta: a saved tensor in whose place the forward returns a handle
RECOMPUTED = "ssd_fx_recomputed"  # in node.meta: the backward computes it again, by our choice
COPIED = "ssd_fx_copied"  # in node.meta: a copy that a pass made of an input which the step changes


@dataclass
class Partition:
    """The two modules that PyTorch's partitioner returned; rewrite passes edit them in place.

    `num_fwd_outputs` is the number of leading forward outputs that are not saved tensors (user outputs, mutated inputs,
    intermediate bases, tokens). Each saved forward output has the name of its backward placeholder. `activations`:
    names of the forward's inputs that are new in every step, unlike parameters and buffers; None if that is not known.
    `untrained`: names of the inputs that get no gradient, buffers among them.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int
    activations: frozenset[str] | None
    untrained: frozenset[str]
    _found: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def fwd_output(self) -> fx.Node:
        return self.forward.graph.output_node()

    @property
    def is_of_region(self) -> bool:
        """Whether this is a nested region. Inductor gives its results the strides that they have in the graph."""
        return "desc" not in self.fwd_output.meta

    @property
    def saved(self) -> list[fx.Node]:
        """The forward outputs that the backward receives, in order."""
        return [n for n in self._outputs[self.num_fwd_outputs :] if isinstance(n, fx.Node)]

    @property
    def caller_outputs(self) -> list[fx.Node]:
        """The forward outputs that the caller sees."""
        return [n for n in self._outputs[: self.num_fwd_outputs] if isinstance(n, fx.Node)]

    @property
    def _outputs(self) -> Sequence[object]:
        outputs = self.fwd_output.args[0]
        assert isinstance(outputs, (list, tuple))
        return outputs

    @property
    def activation_inputs(self) -> list[fx.Node]:
        """The forward's inputs that are known to be new in every step."""
        return [n for n in self._inputs if n.name in (self.activations or ())]

    @property
    def caller_inputs(self) -> list[fx.Node]:
        """The forward's inputs that the caller may write into before the backward; all, if parameters are not known.

        Parameters that are trained are not among them, because the caller changes them only after the backward.
        Buffers, frozen parameters and other tensors of a module are: a moving average, a cache, or a table may change
        at any time.
        """
        if self.activations is None:
            return self._inputs
        return [n for n in self._inputs if n.name in self.activations or n.name in self.untrained]

    @property
    def _inputs(self) -> list[fx.Node]:
        return list(self.forward.graph.find_nodes(op="placeholder"))

    @property
    def checked(self) -> frozenset[int]:
        """Storages of the saved tensors whose versions autograd checks before the backward reads them.

        It does not check those that a custom `autograd.Function` keeps as attributes of its context. Of a saved view it
        checks the version as well, but code of Inductor's returns views with versions of their own.
        """
        return frozenset(nodes_by_storage(n for n in self.saved if not n.meta.get(NOT_CHECKED)))

    @property
    def shared_with_caller(self) -> frozenset[tuple[str, str]]:
        """Pairs: the name of an output, or of one of `caller_inputs`, that shares a storage with a saved tensor, and a
        reader. The reader is "" if autograd checks that tensor, else the name of a node of the backward.

        Hazard: the caller has these too, and may write into them before the backward reads them.
        """
        callers, checked = nodes_by_storage((*self.caller_outputs, *self.caller_inputs)), self.checked
        return frozenset(
            (mine.name, reader)
            for key, saved in nodes_by_storage(self.saved).items()
            for mine in callers.get(key, ())
            for reader in ([""] if key in checked else self._readers(saved))
        )

    def _readers(self, saved: Iterable[fx.Node]) -> frozenset[str]:
        """Names of the nodes of the backward that read saved tensors or views of them."""
        received, placeholders = nodes_by_storage(self.backward.graph.nodes), self.bwd_placeholders
        keys = {storage_of(placeholders[n.name]) for n in saved if n.name in placeholders} - {None}
        return frozenset(user.name for key in keys for node in received[key] for user in node.users)  # type: ignore[index]

    @property
    def lasting_gradients(self) -> list[fx.Node]:
        """The gradients that the backward leaves in memory: those of inputs that live longer than a step."""
        given = {_whole(n.meta.get("desc")) for n in self.activation_inputs}
        output = self.backward.graph.output_node()
        found = zip(tree_leaves(output.args[0]), output.meta.get("desc", ()), strict=False)  # a region has none
        return [n for n, desc in found if isinstance(n, fx.Node) and getattr(desc, "grad_of", None) not in given]

    @property
    def device(self) -> torch.device:
        """The device of the saved tensors; the CPU if none is elsewhere."""
        devices = [t.device for n in self.saved if (t := tensor_of(n)) is not None]
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    @property
    def has_host_tier(self) -> bool:
        """Whether the device has memory of its own, so that groups may go to host memory instead of the drive."""
        return self.device.type != "cpu"

    @property
    def is_whole_step(self) -> bool:
        """Whether every gradient that comes in is that of one number, such as a loss. Then the backward comes next.

        Otherwise the graph may be one of many whose forwards all come before the first backward.
        """
        saved = {n.name for n in self.saved}
        given = [n for n in self.backward.graph.find_nodes(op="placeholder") if n.name not in saved]
        tangents = [n for n in given if isinstance(_whole(n.meta.get("desc")), TangentAOTInput)]  # a region has none
        sizes = [tuple(t.shape) for n in tangents or given if (t := tensor_of(n)) is not None]
        return bool(sizes) and all(not s or (len(s) == 1 and statically_known_true(s[0] == 1)) for s in sizes)

    @property
    def bwd_placeholders(self) -> dict[str, fx.Node]:
        return {n.name: n for n in self.backward.graph.nodes if n.op == "placeholder"}

    def once(self, analysis: Callable[[Partition], T]) -> T:
        """The result of `analysis`, computed once for all passes that ask, until the graphs are rewritten."""
        if analysis not in self._found:
            self._found[analysis] = analysis(self)
        return cast(T, self._found[analysis])

    def recompile(self) -> None:
        self._found.clear()
        for module in (self.forward, self.backward):
            module.graph.lint()
            module.recompile()


Names = tuple[list[str], list[str]]  # the nodes of the forward, and of the backward


def node_names(partition: Partition) -> Names:
    """The names of the nodes of both graphs; before insertion, a plan's points are indices into them."""
    return [n.name for n in partition.forward.graph.nodes], [n.name for n in partition.backward.graph.nodes]


_OTHERS = (SubclassSizeAOTInput, SubclassStrideAOTInput, ForwardTokenAOTInput, BackwardTokenAOTInput, TangentAOTInput)


def activation_names(
    joint: fx.GraphModule, static: Sequence[int] | None, lasting: frozenset[int] | None = None
) -> frozenset[str] | None:
    """Names of the joint graph's inputs that are no parameters or buffers; None if that is not known.

    `static`: the indices of inputs that live longer than a step, or None where that is not known. They count from the
    first primal. So they do not fit a graph with effect tokens, which come before it, or with parts of subclasses.
    The inputs of such a graph are traced back to arguments of the compiled function. `lasting`: the indices of those
    arguments that live longer than a step, or None.
    """
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder"]
    descs = {n.name: n.meta.get("desc") for n in inputs}
    if static is not None and all(type(desc) in (PlainAOTInput, TangentAOTInput) for desc in descs.values()):
        lives_on = set(static)
        names = {n.name for i, n in enumerate(inputs) if i not in lives_on}
        return frozenset(names - {name for name, desc in descs.items() if isinstance(desc, TangentAOTInput)})
    given = {name: of for name, desc in descs.items() if not isinstance(of := _whole(desc), _OTHERS)}
    if lasting is None or any(type(of) is not PlainAOTInput for of in given.values()):
        return None
    return frozenset(name for name, of in given.items() if isinstance(of, PlainAOTInput) and of.idx not in lasting)


def _whole(desc: object) -> object:
    """The descriptor of the tensor that an input is a part of; `desc` itself if the input is no part."""
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return desc


def is_part_of_subclass(node: fx.Node) -> bool:
    """Whether a node is an input that PyTorch has taken out of a tensor subclass."""
    return isinstance(node.meta.get("desc"), SubclassGetAttrAOTInput)


def untrained_names(joint: fx.GraphModule) -> frozenset[str]:
    """Names of the joint graph's inputs that get no gradient."""
    output = joint.graph.output_node()
    outputs = zip(tree_leaves(output.args[0]), output.meta.get("desc", ()), strict=False)
    trained = {desc.grad_of for node, desc in outputs if isinstance(desc, GradAOTOutput) and node is not None}
    return frozenset(n.name for n in joint.graph.find_nodes(op="placeholder") if n.meta.get("desc") not in trained)


def changed_inputs(graph: fx.Graph) -> frozenset[int]:
    """Storages of the inputs that the graph writes into, or that are overwritten with its outputs when it has run.

    The graph is a forward or a joint one.

    Hazard: if such an input is saved, the backward reads its new values. Autograd raises no error where it does not see
    the write, as under `no_grad`.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    by_desc = {n.meta["desc"]: n for n in inputs if "desc" in n.meta}
    # only a nested region has none, and in training torch refuses one that changes an input
    descs = graph.output_node().meta.get("desc", ())
    after = [by_desc.get(overwritten) for d in descs if (overwritten := _overwritten(d))]
    inside = [arg for n in graph.nodes for arg in written(n)]
    keys = {storage_of(n) for n in (*after, *inside) if n is not None}
    return frozenset(keys & {storage_of(n) for n in inputs} - {None})  # type: ignore[arg-type]


def _overwritten(output: AOTOutput) -> AOTInput | None:
    """The input, or the part of a subclass, that is overwritten with an output when the graph has run."""
    if isinstance(output, SubclassGetAttrAOTOutput):
        whole = _overwritten(output.base)
        return None if whole is None else SubclassGetAttrAOTInput(whole, output.attr)
    return output.mutated_input if isinstance(output, InputMutationAOTOutput) else None


def calls_ours(node: fx.Node) -> bool:
    """Whether a node calls one of our operators."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "ssd_fx"


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that the node's operator writes into, by its schema."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    given = arguments_of(node)
    targets = [given[a.name] for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [n for n in tree_leaves(targets) if isinstance(n, fx.Node)]


_WRAPPERS = {"run_and_save_rng_state": 0, "run_with_rng_state": 1, "graphsafe_run_with_rng_state": 0}
"""PyTorch's wrappers of an operator, with the number of arguments before that operator."""


def called(node: fx.Node) -> tuple[object, tuple[Any, ...], dict[str, Any]]:
    """The operator that a node calls, and its arguments.

    Under a checkpoint PyTorch wraps operators that may draw random numbers: the wrapper saves the generator's state in
    the forward, and sets it in the backward (torch._prims.rng_prims). Then this returns the wrapped operator.
    """
    if isinstance(node.target, OpOverload):  # the usual case
        return node.target, node.args, node.kwargs
    before = _WRAPPERS.get(getattr(node.target, "__name__", ""))
    if before is None:
        return node.target, node.args, node.kwargs
    given = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    return node.args[before], node.args[before + 1 :], given


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node's operator by their names in its schema, with the defaults of those not given."""
    operator, args, kwargs = called(node)
    assert isinstance(operator, OpOverload)
    arguments = operator._schema.arguments
    given = dict(zip([a.name for a in arguments], args, strict=False))
    return {a.name: a.default_value for a in arguments} | given | kwargs


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The FakeTensor of a node; None where it yields something else."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """All FakeTensors of a node, also those in tuples; for a wrapper (`called`), those of the items that nodes take."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):  # the usual case: tree_leaves takes ten times as long
        return [val]
    if val is None and getattr(node.target, "__name__", "") in _WRAPPERS:
        val = [t for user in node.users if user.target is operator.getitem for t in _taken(user)]
    return [t for t in tree_leaves(val) if isinstance(t, torch.Tensor)] if isinstance(val, (tuple, list, dict)) else []


def _taken(item: fx.Node) -> list[torch.Tensor]:
    """The FakeTensors of an item of a tuple; if it is a tuple itself, those of the items that nodes take of it."""
    return tensors_of(item) or [t for user in item.users if user.target is operator.getitem for t in _taken(user)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of the storage of a FakeTensor; None where the tensor has none (sparse, subclass).

    The key is valid while the tensor is alive; the graphs hold theirs in `meta["val"]`.
    """
    if tensor.layout != torch.strided or type(tensor) is not FakeTensor:
        return None
    return int(tensor.untyped_storage()._cdata)


def storage_of(node: fx.Node) -> int | None:
    """Identity of the storage of a node's tensor; None where it yields no tensor, or one without a storage."""
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
    """The symbolic sizes that the backward receives as numbers, because they are saved."""
    values = [n.meta.get("val") for n in backward.nodes if n.op == "placeholder"]
    exprs = [v.node.expr for v in values if isinstance(v, torch.SymInt)]
    return frozenset(e for e in exprs if e.is_symbol)


def fingerprint(partition: Partition, options: str = "") -> str:
    """The graph's name in reports: eight hex digits.

    They are the same in every process that compiles the same graph under the same `options` (`PlanOptions.chosen`).
    """
    digest = hashlib.sha256(options.encode())
    for module in (partition.forward, partition.backward):
        for node in module.graph.nodes:
            tensor = tensor_of(node)
            layout = "" if tensor is None else f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}"
            # the text of a Python function, such as `torch.sym_max`, has its address
            target = node.target.__qualname__ if isinstance(node.target, FunctionType) else node.target
            digest.update(f"{node.name} {node.op} {target} {node.args} {node.kwargs} {layout}\n".encode())
    return digest.hexdigest()[:8]
