"""A program through AOTAutograd once, and through our partitioner at several budgets, compared bitwise.

One trace serves all variants: each gets a copy of the joint graph, and runs on copies of what AOTAutograd hands to the
compiled forward and backward. What the first variant (everything kept) returns goes on to the caller.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.debugging import boxed_nop
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from ssd_fx.passes import pipeline
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint import recompute
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.partitioner import Partitioner
from ssd_fx.passes.plan import Plan
from tests import sources
from tests.bitwise import Compile, differences
from tests.passes.random_graphs import Program, arguments, cotangents

# Compute that is slow or fast against the I/O: releases and loads at their uses, or as far away as the graphs allow.
SLOW_IO = Machine(flops=1e9, memory_bw=1e9, write_bw=1e8, read_bw=1e8, latency_s=0.0)
FAST_IO = Machine(flops=1e6, memory_bw=1e6, write_bw=1e9, read_bw=1e9, latency_s=0.0)


@dataclass(frozen=True)
class Variant:
    """How one copy of the graph is planned, and which engine moves its bytes; `prefetch` in bytes.

    With the engine of `tests.sources` the copy runs once under every source.
    """

    budget: float
    engine: str = "memory"
    directory: str = ""
    machine: Machine = SLOW_IO
    prefetch: int = 1 << 20

    def partitioner(self) -> Partitioner:
        runtime: dict[str, object] = {"engine": self.engine, "allow_tmpfs": True, "adapt": False}
        if self.directory:
            runtime["dirs"] = [self.directory]
        return Partitioner(
            pipeline.PlanOptions(
                version="tests",
                budget=self.budget,
                min_bytes=0,
                prefetch=self.prefetch,
                rates=self.machine,
                recompute=False,
                slowdown=0.0,
                spare=False,
                runtime_config=json.dumps(runtime),
            )
        )


KEPT = Variant(1.0)
EVERY_SOURCE = Variant(0.0, sources.ENGINE)


@dataclass
class Compiled:
    """Both graphs of one variant, under one source if it is said, and the saved tensors between them."""

    name: str
    forward: fx.GraphModule
    backward: fx.GraphModule
    source: sources.Source | None = None
    saved: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._runs = boxed_nop(self.forward, []), boxed_nop(self.backward, [])

    def run(self, args: list[Any], *, backward: bool = False) -> Sequence[Any]:
        with self.source.forced() if self.source else nullcontext():
            found: Sequence[Any] = self._runs[backward](args)
        return found


@dataclass
class Trial:
    """One program at all variants; `plans` are those of the variants in order."""

    variants: Sequence[Variant]
    plans: list[tuple[Partition, Plan]] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    traced: bool = False
    unlike_traced: bool = False  # an operator of the forward returned other strides than its FakeTensor has
    num_outputs: int = 0
    saved: int = 0

    def run(self, program: Program) -> bool:
        """Forward and backward, compared; False where there is nothing to compare.

        That is a program without a backward, one with other strides than traced, and one that torch cannot trace:
        functionalized, `x.t().sin_()` of one column has other strides too, which a view of another dtype may not take.

        Raises: AssertionError where a variant differs from the first one.
        """
        leaves, values = arguments(program.inputs)
        compiled = aot_function(
            program.function(),
            fw_compiler=lambda gm, _: _boxed(self._forward) if self.compiled else boxed_nop(gm, []),
            bw_compiler=lambda gm, _: _boxed(self._backward),
            partition_fn=self._partition,
            keep_inference_input_mutations=True,
        )
        torch.manual_seed(0)
        with recorded(self.plans), _use_lazy_graph_module(True):
            try:
                outputs = compiled(*values.values())
            except (RuntimeError, ValueError):
                if self.traced:
                    raise
                return False
        roots, starts = cotangents(list(outputs))
        if not self.compiled or not roots or self.unlike_traced:
            return False
        torch.autograd.grad(roots, leaves, starts, allow_unused=True)
        return True

    def _partition(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, ...]:
        """The min-cut runs once; every variant gets copies of what it returns."""
        self.traced, self.num_outputs = True, kwargs["num_fwd_outputs"]
        pipeline.joint_of(gm, joint_inputs, kwargs)  # as ahead of every cut
        halves = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

        def min_cut(*args: object, **kwargs: object) -> tuple[fx.GraphModule, ...]:
            return tuple(_make_graph_module(half, copy.deepcopy(half.graph)) for half in halves)

        with mock.patch.object(recompute, "min_cut_rematerialization_partition", min_cut):
            for number, variant in enumerate(self.variants):
                name, graphs = f"variant {number}", variant.partitioner()(gm, joint_inputs, **kwargs)
                if variant.engine != sources.ENGINE:
                    self.compiled.append(Compiled(name, *graphs))
                    continue
                for source in sources.ALL:
                    self.compiled.append(Compiled(f"{name}, {source.name}", *graphs, source))
        return self.compiled[0].forward, self.compiled[0].backward

    def _forward(self, args: list[Any]) -> Sequence[Any]:
        """All variants on copies of the arguments, with the same random numbers."""
        state, given, versions = torch.get_rng_state(), list(args), [t._version for t in args]
        copies = [clones(args) for _ in self.compiled[1:]]
        results = self.compiled[0].run(args)
        self.saved = len(results) - self.num_outputs
        self.unlike_traced = not _has_traced_strides(self.compiled[0].forward, results)
        if self.unlike_traced:  # no exception: where a warning is on its way, torch makes a SystemError of the two
            return results
        changed = [i for i, t in enumerate(given) if t._version != versions[i]]
        for one in self.compiled[1:]:
            own = copies.pop(0)
            held = [own[i] for i in changed]  # of the others nobody but the graph has a reference
            torch.set_rng_state(state)
            got = one.run(own)
            apart = differences(got[: self.num_outputs], results[: self.num_outputs])
            assert apart == {}, f"outputs of {one.name}"
            assert differences(held, [given[i] for i in changed]) == {}, f"changed arguments of {one.name}"
            one.saved = list(got[self.num_outputs :])
            del got
        return results

    def _backward(self, args: list[Any]) -> Sequence[Any]:
        tangents = args[self.saved :]
        copies = [clones(tangents) for _ in self.compiled[1:]]
        results = self.compiled[0].run(args, backward=True)
        for one in self.compiled[1:]:
            own, one.saved = one.saved + copies.pop(0), []
            assert differences(one.run(own, backward=True), results) == {}, f"gradients of {one.name}"
        return results


def _has_traced_strides(forward: fx.GraphModule, results: Sequence[Any]) -> bool:
    nodes = forward.graph.output_node().args[0]
    pairs = [(n, r) for n, r in zip(nodes, results, strict=True) if isinstance(r, Tensor)]  # type: ignore[arg-type]
    return all(node.meta["val"].stride() == result.stride() for node, result in pairs)


def _boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    def call(args: list[Any]) -> Sequence[Any]:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def clones(tensors: Sequence[Any]) -> list[Any]:
    """Copies that share storages where the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}
    copied: list[Any] = []
    for t in tensors:
        if not isinstance(t, Tensor):
            copied.append(t)
            continue
        storage = t.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copied.append(
            torch.empty(0, dtype=t.dtype).set_(storages[storage._cdata], t.storage_offset(), t.shape, t.stride())
        )
    return copied


@contextmanager
def recorded(plans: list[tuple[Partition, Plan]]) -> Iterator[None]:
    """Notes what the pipeline did."""
    rewrite = pipeline.rewrite

    def noted(partition: Partition, plan: Plan, *others: Any) -> None:
        rewrite(partition, plan, *others)
        plans.append((partition, plan))

    with mock.patch.object(pipeline, "rewrite", noted):
        yield


def kinds(partition: Partition, group: AliasGroup) -> Iterator[str]:
    """What is special about an offloaded group."""
    base = next(n for n in partition.forward.graph.nodes if n.name == group.base)
    layout = group.layout
    assert layout is not None
    layouts = [m.layout for m in group.members]
    yield "all"
    if layout not in layouts:
        yield "views only"
    if len(layouts) > 1:
        yield "several members"
    if any(m != layout for m in layouts):
        yield "a view"
    if any(0 in m.stride for m in layouts):
        yield "expanded"
    if any(m.offset for m in layouts):
        yield "offset"
    if not base.meta["val"].is_contiguous():
        yield "base not contiguous"
    if layout.dtype != torch.float32:
        yield str(layout.dtype).removeprefix("torch.")
    if layout.size == ():
        yield "scalar"
    if base.op == "placeholder":
        yield "input"
    elif base.target.__name__ == "getitem":  # type: ignore[union-attr]
        yield "item of several results"


def count(plans: Sequence[tuple[Partition, Plan]]) -> Counter[str]:
    """Offloaded groups by kind, kept ones by obstacle."""
    found: Counter[str] = Counter()
    for partition, plan in plans:
        for group in plan.offloaded:
            found.update(kinds(partition, group))
        found.update(f"kept: {g.obstacle}" for g in plan.groups if g.obstacle)
    return found


def trained(*sizes: Program, steps: int = 1) -> Callable[[Compile], list[Tensor]]:
    """A program of `tests/bitwise.py`: outputs, gradients and arguments after each step at each size of one program."""

    def program(compile: Compile) -> list[Tensor]:
        compiled = compile(sizes[0].function(), dynamic=len(sizes) > 1, fullgraph=True)
        found: list[Tensor] = []
        for size in sizes * steps:
            leaves, values = arguments(size.inputs)
            torch.manual_seed(0)
            outputs = list(compiled(*values.values()))
            roots, starts = cotangents(outputs)
            gradients = torch.autograd.grad(roots, leaves, starts, allow_unused=True)
            found += [t.detach() for t in [*outputs, *(g for g in gradients if g is not None), *values.values()]]
        return found

    return program
