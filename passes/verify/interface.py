"""What a rewrite must not change: inputs and outputs of both graphs, layouts of old nodes' results and arguments.

before   relu = placeholder                        mm(relu, ...)          mm yields [8, 8] and is given [8, 8]
after    load -> wait_load_ -> as_strided -> ...   mm(as_strided, ...)    the same must hold
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ssd_fx.compat import OpOverload
from ssd_fx.passes.partition import Partition, storage_of, tensor_of
from ssd_fx.passes.verify.errors import require
from ssd_fx.passes.verify.provenance import Reads, arguments

Layout = tuple[str, ...] | None  # shape, strides, dtype, device, lazy bits


@dataclass(frozen=True)
class Before:
    """Both graphs before the rewrite.

    `unpaired`: saved outputs without a backward placeholder of their name. An example is the state of a random
    generator, which PyTorch names differently in the two graphs. `reads`: which nodes read which saved tensor.
    """

    unpaired: frozenset[str]
    forward: Facts
    backward: Facts
    reads: Reads

    @staticmethod
    def of(partition: Partition) -> Before:
        placeholders = partition.bwd_placeholders
        unpaired = frozenset(n.name for n in partition.saved if n.name not in placeholders)
        return Before(unpaired, *_facts(partition), Reads.of(partition))

    def verify(self, partition: Partition, *, restrided: bool = False) -> None:
        """Check that nothing changed.

        `restrided`: dense copies of slices are stored, or images in Inductor's layout, so strides in the backward may
        differ.

        Raises:
            VerifyError: something changed.
        """
        forward, backward = _facts(partition)
        same = forward.outputs == self.forward.outputs
        require(same, "an output of the model changed", "insert", partition.fwd_output)
        for name, old, new in (("forward", self.forward, forward), ("backward", self.backward, backward)):
            text = f"the {name}'s own inputs are {new.inputs}, were {old.inputs}"
            require(new.inputs == old.inputs, text, "insert")
        _verify_nodes(partition.forward.graph, self.forward, forward, strides=True)
        _verify_ends("forward", self.forward, forward)
        _verify_nodes(partition.backward.graph, self.backward, backward, strides=not restrided)
        _verify_ends("backward", self.backward, backward)


def _verify_ends(name: str, old: Facts, new: Facts) -> None:
    """The outputs of a graph have their old layouts and order, and no more of its inputs and outputs share storages."""
    text = f"the outputs of the {name} are {new.results}, were {old.results}"
    require(old.results == new.results, text, "insert")
    moved = [(o, n) for o, n in zip(old.outputs, new.outputs, strict=True) if o != n and o in new.values]
    require(not moved, f"outputs of the {name} were exchanged: {moved}", "insert")
    pairs = [(b, a) for a, b in new.aliases.items() if old.aliases.get(a, a) != old.aliases.get(b, b)]
    require(not pairs, f"in the {name} {pairs} share memory and did not before", "insert")


def _verify_nodes(graph: fx.Graph, old: Facts, new: Facts, *, strides: bool) -> None:
    """Results and arguments of old nodes have the layouts that they had; `strides`: also the same strides."""
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.name not in old.values:
            is_operator = isinstance(node.target, OpOverload)  # arithmetic of sizes has no value in meta
            require(not is_operator or "val" in node.meta, f"{node.name!r} has no meta['val']", "insert", node)
            continue
        then = old.values[node.name]
        now = new.values[node.name]
        require(_same(then, now, strides), f"{node.name!r} is {_text(now)}, was {_text(then)}", "insert", node)
        was = old.arguments[node.name]
        given = new.arguments[node.name]
        same = len(was) == len(given) and all(_same(a, b, strides) for a, b in zip(was, given, strict=True))
        text = f"{node.name!r} is given {list(map(_text, given))}, was given {list(map(_text, was))}"
        require(same, text, "insert", node)


def _text(layout: Layout) -> str:
    return " ".join(layout) if layout else "no tensor"


def _same(a: Layout, b: Layout, strides: bool) -> bool:
    if strides or a is None or b is None:
        return a == b
    return (a[0], *a[2:]) == (b[0], *b[2:])


@dataclass(frozen=True)
class Facts:
    """The facts of one graph that are compared.

    `inputs`: names of all but those that receive saved tensors. `values` and `arguments`: layouts, by name of the node.
    `outputs`, `results`: names and layouts of the outputs that are no saved tensors. `aliases`: by input or output, the
    first one of the same storage.
    """

    inputs: tuple[str, ...]
    values: dict[str, Layout]
    arguments: dict[str, tuple[Layout, ...]]
    outputs: tuple[str, ...]
    results: tuple[Layout, ...]
    aliases: Mapping[str, str]

    @staticmethod
    def of(module: fx.GraphModule, results: int | None, saved: Iterable[fx.Node] = ()) -> Facts:
        """`results`: how many outputs are no saved tensors; None: all. `saved`: the tensors that it may receive."""
        nodes = [n for n in module.graph.nodes if n.op != "output"]
        inputs = [n for n in nodes if n.op == "placeholder"]
        outputs: Any = module.graph.output_node().args[0]
        outputs = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
        received = {n.name for n in saved}
        ends = [(f"input {n.name}", n) for n in inputs]
        for i, n in enumerate(outputs):
            if isinstance(n, fx.Node):
                ends.append((f"output {n.name if results is not None and i >= results else i}", n))
        return Facts(
            tuple(n.name for n in inputs if n.name not in received),
            {n.name: layout(n) for n in nodes},
            {n.name: tuple(layout(a) for a in arguments(n)) for n in nodes},
            tuple(str(n) for n in outputs[:results]),
            tuple(layout(n) for n in outputs[:results]),
            _aliases(ends),
        )


def layout(node: object) -> Layout:
    """Shape, strides, dtype, device and lazy bits of a node's tensor, as text: comparing it adds no guards."""
    tensor = tensor_of(node) if isinstance(node, fx.Node) else None
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    conj = ["conj"] if tensor.is_conj() else []
    neg = ["neg"] if tensor.is_neg() else []
    sizes = (f"[{', '.join(map(str, parts))}]" for parts in (tensor.shape, strides))
    return (*sizes, str(tensor.dtype), str(tensor.device), *conj, *neg)


def _facts(partition: Partition) -> tuple[Facts, Facts]:
    forward = Facts.of(partition.forward, partition.num_fwd_outputs)
    return forward, Facts.of(partition.backward, None, partition.saved)


def _aliases(ends: Iterable[tuple[str, fx.Node]]) -> dict[str, str]:
    """For each input or output, the first one with the same storage, by name."""
    firsts: dict[int, str] = {}
    keys = ((name, storage_of(node)) for name, node in ends)
    return {name: firsts.setdefault(key, name) for name, key in keys if key is not None}
