"""Layers that are computed again by themselves: what lies between them is saved, whatever PyTorch's cut would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import ssd_fx
from ssd_fx.passes import candidates, pipeline, proposals
from ssd_fx.passes.candidates import Candidate
from ssd_fx.passes.cost.operators import is_extern
from ssd_fx.passes.joint.compared import compared
from ssd_fx.passes.joint.layers import between_layers, made_of, valleys
from ssd_fx.passes.joint.spread import spread
from ssd_fx.passes.partition import RECOMPUTED, Partition, storage_of
from ssd_fx.passes.plan import Limits, Mark
from tests.bitwise import Compile, assert_same_bits, eager, ours, run
from tests.passes import toys
from tests.passes.recomputing import SLOW, everything_recomputed

LAYERS = 3


def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of each layer: norm -> up -> gelu -> down -> plus its input. `w`: up and down of all layers, in turns."""
    for up, down in zip(w.chunk(2 * LAYERS)[::2], w.chunk(2 * LAYERS)[1::2], strict=True):
        norm = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        x = x + F.gelu(norm @ up) @ down.t()
    return x.sum()


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator)
    return x.requires_grad_(), (torch.randn(2 * LAYERS * 16, 64, generator=generator) / 8).requires_grad_()


@pytest.mark.parametrize(
    ("widths", "places"),
    [([1, 4, 1, 4, 1], [2]), ([4, 1, 2, 1, 4], [1, 3]), ([1, 2, 3, 4], []), ([4, 3, 4], []), ([], [])],
)
def test_valleys_have_places_twice_as_high_on_either_side(widths: list[float], places: list[int]) -> None:
    assert valleys(widths) == places


def test_what_lies_between_layers_is_their_inputs_and_the_norms_are_made_of_these() -> None:
    partition = toys.partitioned(residual, *arguments())
    found = between_layers(partition)
    nodes = {node.name: node for node in partition.forward.graph.nodes}
    wide = {name for name in found.saved if nodes[name].meta["val"].shape == (512, 16)}
    assert len(wide) == LAYERS - 1, "the first layer reads the input, and the sum reads the last"
    assert sum(nodes[name].target is torch.ops.aten.add.Tensor for name in wide) == LAYERS - 2, "one is a product"
    products = [node for node in partition.forward.graph.nodes if node.target is torch.ops.aten.mm.default]
    norms = {node.args[0].name for node in products[2::2]}  # of the second layer on
    assert norms <= found.again
    views = {node.name for node in nodes.values() if storage_of(node) in map(storage_of, node.all_input_nodes)}
    assert not any(is_extern(nodes[name]) for name in found.again - views)
    assert not found.saved & found.again


def test_what_a_kernel_computes_within_itself_is_no_boundary() -> None:
    """Norms that compute in float32: twice the bytes of a layer's input stand beside it, but are never in memory. So
    the norm's result, which is as small as the input, is no narrow place."""

    def half(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for up, down in zip(w.chunk(2 * LAYERS)[::2], w.chunk(2 * LAYERS)[1::2], strict=True):
            wide = x.float()
            norm = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
            x = x + F.gelu(norm @ up) @ down.t()
        return x.sum()

    partition = toys.partitioned(half, *(each.detach().bfloat16().requires_grad_() for each in arguments()))
    nodes = {node.name: node for node in partition.forward.graph.nodes}
    saved = [nodes[name] for name in between_layers(partition).saved]
    assert [node.target for node in saved if node.target is torch.ops.aten.add.Tensor]
    assert not [node for node in saved if node.target is torch.ops.prims.convert_element_type.default]


def test_a_selective_partition_computes_again_what_takes_no_product() -> None:
    """What it saves are the layers' inputs and products; the norms, and what GELU makes of a product, are not."""

    def cut(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[list[Any], set[Any], set[str], set[str]]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        priced = proposals.decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
        found = candidates.selective(joint, own, priced, options)
        assert found is not None
        forward, backward = found.partition.forward.graph, found.partition.backward.graph
        both = {node.name for node in forward.nodes} & {n.name for n in backward.nodes if n.op == "call_function"}
        again = {node.target for node in backward.nodes if node.name in both and is_extern(node)}
        saved = [node.target for node in found.partition.saved if node.op == "call_function"]
        names = {n.name for n in found.partition.saved}
        stay = set(map(storage_of, found.partition.saved))
        marked = [node for node in (*forward.nodes, *backward.nodes) if RECOMPUTED in node.meta]
        assert {node.name for node in marked} == found.again
        assert stay.isdisjoint(map(storage_of, marked)), "not even a view of what is saved is computed again"
        return saved, again, names, {recomputed.base for recomputed in found.plan.recomputed}

    saved, again, names, told = toys.with_joint(residual, arguments(), cut)
    assert not again
    assert not {torch.ops.aten.mul.Tensor, torch.ops.aten.gelu.default} & set(saved)
    assert saved.count(torch.ops.aten.mm.default) >= LAYERS
    assert told, "the report names what is computed again"
    assert told.isdisjoint(names)


def test_what_a_selective_partition_computes_again_is_known() -> None:
    """A mask that PyTorch's own partition saves is made of two tensors that are computed again. What depends on its
    being computed again, such as how bfloat16 is rounded, asks the marks."""

    def larger(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for up, down in zip(w.chunk(2 * LAYERS)[::2], w.chunk(2 * LAYERS)[1::2], strict=True):
            a, b = F.gelu(x @ up), torch.sigmoid(x @ up)
            x = x + torch.where(a > b, a, b) @ down.t()
        return x.sum()

    def unmarked(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[set[str], set[str]]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        priced = proposals.decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
        found = candidates.selective(joint, own, priced, options)
        assert found is not None
        saved = {n.name for n in own.partition.saved if n.op == "call_function"}
        again = {n.name for n in found.partition.backward.graph.nodes if n.op == "call_function"} & saved
        return again, again - found.again

    again, without = toys.with_joint(larger, arguments(), unmarked)
    assert again
    assert not without


def test_a_selective_partition_saves_what_the_backward_compares() -> None:
    """A cut that computes it again would be refused, if the marks tell; this one is looked at all the same."""

    def largest(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for up, down in zip(w.chunk(2 * LAYERS)[::2], w.chunk(2 * LAYERS)[1::2], strict=True):
            a, b = F.gelu(x @ up), torch.sigmoid(x @ up)
            x = x + torch.maximum(a, b) @ down.t()
        return x.sum()

    def computed_again(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> set[str]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        priced = proposals.decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
        with mock.patch.object(candidates, "_may_replace", return_value=True):
            found = candidates.selective(joint, own, priced, options)
        assert found is not None
        exact = compared(own.partition)
        assert exact
        return exact & {n.name for n in found.partition.backward.graph.nodes if n.op == "call_function"}

    assert toys.with_joint(largest, arguments(), computed_again) == set()


def test_products_that_a_selective_partition_saves_can_be_computed_again() -> None:
    """Proposals begin from it, and may come to a checkpoint of whole layers."""

    def priced(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[int, int]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        first = proposals.decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
        found = candidates.selective(joint, own, first, options)
        assert found is not None
        plan = proposals.decide(found.partition, options, budget=1.0, priced=True, quick=True, analysed=found.plan)
        wide = [group for group in plan.groups if group.nbytes == 512 * 64 * 4]
        return len(wide), len([group for group in wide if group.slot in plan.prices])

    wide, prices = toys.with_joint(residual, arguments(), priced)
    assert prices == wide > 0


@pytest.mark.parametrize("kind", ["layered", "selective"])
@pytest.mark.parametrize("decision", ["keep", "offload", "prefer_offload"])
def test_what_the_user_wants_saved_is_not_computed_again(kind: str, decision: Any) -> None:
    """A mark of the user holds in whatever partition is taken: a tensor that is computed again is not kept."""

    def missing(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> list[str]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        marks = {group.slot: Mark(decision, "a test") for group in own.plan.groups}
        own = replace(own, plan=own.plan.with_(marks=marks))
        if kind == "layered":
            found = candidates.layered(joint, own, options)
        else:
            priced = proposals.decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
            found = candidates.selective(joint, own, priced, options)
        assert found is not None
        nodes, saved = {n.name: n for n in own.partition.forward.graph.nodes}, map(storage_of, found.partition.saved)
        stay = set(saved)
        return [group.base for group in own.plan.groups if storage_of(nodes[group.base]) not in stay]

    assert toys.with_joint(residual, arguments(), missing) == []


def test_views_do_not_end_what_is_made_of_saved_tensors() -> None:
    """A group norm scales by a view of its parameter, and another view lies between the norm and its gelu."""

    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).view(64, 8, 64) * w.sum(0).view(1, 64) * w[:1].view(1, 64)
        return F.gelu(y.view(512, 64)).sum()

    x, w = arguments()[0], torch.randn(16, 64).requires_grad_()
    partition = toys.partitioned(scaled, x, w)
    nodes = {node.target: node for node in partition.forward.graph.nodes}
    found = made_of([nodes[torch.ops.aten.mm.default].name], partition)
    assert nodes[torch.ops.aten.mul.Tensor].name in found
    assert nodes[torch.ops.aten.mm.default].name not in found


def test_what_the_caller_may_change_is_no_source() -> None:
    """The scale is an input: a chain that reads it would see what the caller has made of it meanwhile."""

    def scaled(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for up, down in zip(w.chunk(2 * LAYERS)[::2], w.chunk(2 * LAYERS)[1::2], strict=True):
            x = x + F.gelu((x * scale) @ up) @ down.t()
        return x.sum()

    def found(gm: Any, inputs: Any, **kwargs: Any) -> set[str]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        priced = proposals.decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
        selective = candidates.selective(joint, own, priced, options)
        assert selective is not None
        again = {*between_layers(own.partition).again, *selective.again}
        sources = [s for n in own.partition.forward.graph.nodes if n.name in again for s in n.all_input_nodes]
        return {s.name for s in sources if s.op == "placeholder"}

    scale = torch.rand(16)
    assert toys.with_joint(scaled, (*arguments(), scale), found) == set()


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_end_no_chain(dynamic: bool) -> None:
    """They are the same in the backward. A selective partition saves those that it needs, and no product of them."""
    taken = list[Candidate]()

    def noted(*args: Any) -> Candidate | None:
        taken.extend(filter(None, [candidates.selective(*args)]))
        return taken[-1]

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for up, down in zip(w.chunk(2 * LAYERS)[::2], w.chunk(2 * LAYERS)[1::2], strict=True):
            norm = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / (x.shape[0] * x.shape[1]) + 1e-5)
            x = x + F.gelu(norm @ up) @ down.t()
        return x.sum()

    options = {"inner": "aot_eager", "engine": "memory", "min_bytes": 0, "machine": SLOW}
    options |= {"budget": 0.5, "recompute": True}
    with mock.patch.object(proposals, "selective", noted):
        torch.compile(step, backend=ssd_fx.backend, dynamic=dynamic, options=options)(*arguments()).backward()
    (found,) = taken
    assert len(found.again) >= 2 * LAYERS
    sizes = [n.meta["val"] for n in found.partition.saved if isinstance(n.meta["val"], torch.SymInt)]
    assert all(size.node.expr.is_symbol for size in sizes)


def sweeping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`gelu` is read at once, and far off again, twice: by itself and by a view."""
    up = x @ w
    gelu = F.gelu(up)
    y = gelu
    for _ in range(12):
        y = y @ w
    return (y * gelu * gelu.t() + up).sum()


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "PyTorch's"])
def test_what_is_read_again_far_off_is_computed_twice_if_we_compute_it_again(is_ours: bool) -> None:
    """Here PyTorch's cut does compute `gelu` again, and a tag says whether that is by our choice."""
    partition = _forward_as_backward(sweeping)
    graph = partition.backward.graph
    for node in graph.nodes:
        if is_ours and node.op == "call_function" and not is_extern(node):
            node.meta[RECOMPUTED] = True
    before = {node.name for node in graph.nodes}
    spread(partition)
    graph.lint()
    twins = {node.name for node in graph.nodes} - before
    assert bool(twins) == is_ours
    assert all(name.endswith("_twin") for name in twins)
    (gelu,) = (node for node in graph.nodes if node.name == "gelu")
    far = [user for user in gelu.users if user.name not in before or user.target is torch.ops.aten.mul.Tensor]
    assert bool(far) != is_ours, "what lies far off reads the twin"


def _forward_as_backward(toy: toys.Toy) -> Partition:
    """A graph that reads what it computes far off: the forward, in the place of the backward."""
    partition = toys.partitioned(toy, *toys.inputs())
    partition.backward = partition.forward
    return partition


def test_the_step_without_ssd_fx_is_of_the_partition_that_nobody_asked_layers_of() -> None:
    """Reports show it beside the plan. The partition that the proposal is of saves other tensors than PyTorch's own."""

    def saved(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[int, int, int]:
        joint, options = pipeline.joint_of(gm, inputs, kwargs), toys.options(recompute=True)
        own = proposals.cut(joint, options)
        with everything_recomputed(by_layers=True):
            ((_, plan),) = proposals.decide_for_all(joint, own, options, [0])
        assert plan.recomputed
        assert plan.proposal is not None
        return own.plan.saved_bytes, plan.proposal.saved_bytes, plan.origin.saved_bytes

    own, layered, told = toys.with_joint(residual, arguments(), saved)
    assert own != layered
    assert told == own


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_layers_that_are_computed_again_have_the_same_gradients(inner: str) -> None:
    def gradients(compile: Compile) -> tuple[torch.Tensor, ...]:
        x, w = arguments()
        return torch.autograd.grad(compile(residual)(x, w), (x, w))

    options = {"inner": inner, "engine": "memory", "min_bytes": 0, "machine": SLOW}
    kept = run(gradients, eager if inner == "inductor" else ours(options, recompute=False, budget=1.0))
    with everything_recomputed(by_layers=True) as groups:
        again = run(gradients, ours(options, recompute=True, budget=0))
    assert sum(groups) >= LAYERS
    if inner == "aot_eager":
        assert_same_bits(kept, again)
    else:  # other kernels
        torch.testing.assert_close(kept, again, rtol=1e-4, atol=1e-4)


def test_a_selective_partition_has_the_gradients_of_pytorchs_own() -> None:
    """It is planned as it is, where no proposal is faster."""
    selective, taken = proposals.selective, list[Candidate]()

    def noted(*args: Any) -> Candidate | None:
        taken.extend(filter(None, [selective(*args)]))
        return taken[-1]

    def only(found: Sequence[Candidate], limits: Limits) -> Candidate | None:
        return next((each for each in found if taken and each.partition is taken[0].partition), None)

    def gradients(compile: Compile) -> tuple[torch.Tensor, ...]:
        x, w = arguments()
        return torch.autograd.grad(compile(residual)(x, w), (x, w))

    options = {"inner": "aot_eager", "engine": "memory", "min_bytes": 0, "machine": SLOW}
    kept = run(gradients, ours(options, recompute=False, budget=1.0))
    with mock.patch.object(proposals, "selective", noted), mock.patch.object(proposals, "best_within", only):
        again = run(gradients, ours(options, recompute=True, budget=0.5))
    assert taken
    assert_same_bits(kept, again)
