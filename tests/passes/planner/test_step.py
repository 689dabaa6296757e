"""How a partitioned graph becomes operators."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx

from ssd_fx.passes.axis import Choice
from ssd_fx.passes.cost.footprint import both_buffers
from ssd_fx.passes.decide import analyse, decide
from ssd_fx.passes.partition import calls_ours
from ssd_fx.passes.plan import replay_of
from ssd_fx.passes.planner.select import with_nodes
from ssd_fx.passes.planner.step import _behind_items, _Modelling, model
from tests.passes import toys

aten = torch.ops.aten


def test_no_operator_ends_between_the_items_of_a_call() -> None:
    """native_layer_norm -> three items -> cos: a cut behind the call or behind an item stands behind all of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(torch.ops.aten.native_layer_norm.default, (x, [8], None, None, 1e-5))
    items = [graph.call_function(operator.getitem, (call, i)) for i in range(3)]
    graph.call_function(torch.ops.aten.cos.default, (items[0],))
    graph.output(items)
    assert _behind_items(graph, [0, 1, 2, 3, 4, 5, 6]) == {0, 1, 5, 6}


def test_nothing_is_released_between_a_call_and_its_items() -> None:
    """The results are there when the call ends. A plan that frees memory behind the call would be too low."""
    planned = toys.planned(toys.multi_output)
    nodes = list(planned.partition.forward.graph.nodes)
    ours = [n for n in nodes if calls_ours(n)]
    assert ours
    assert not any(n.next.target is operator.getitem for n in ours)


def test_the_caller_has_the_inputs_until_the_forward_returns() -> None:
    """x -> mm -> relu -> mm: the first product is the last reader of `x`, and whoever called the graph still has it."""
    partition = replace(toys.partitioned(toys.relu_chain), activations=frozenset({"primals_1"}))
    plan = analyse(partition, toys.options())
    given = next(g for g in plan.groups if g.base == "primals_1")
    nodes = list(partition.forward.graph.nodes)
    assert plan.items[given.slot].last_use == len(nodes) - 2


def test_an_input_that_is_not_saved_counts_in_the_forward() -> None:
    """x -> mul -> mm: the product's gradient needs x * 2 only."""

    def doubled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * 2) @ w

    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    bases = []
    for known in (frozenset[str](), frozenset({"primals_1"})):
        partition = replace(toys.partitioned(doubled, x, w), activations=known)
        plan = analyse(partition, toys.options())
        kept = {slot: frozenset({Choice.KEEP}) for slot in plan.items}
        step = model(partition, plan, kept)
        bases.append((step.base[: step.forward], step.base[step.forward :]))
    (forward, backward), (with_input, as_before) = bases
    assert with_input == tuple(nbytes + 256 for nbytes in forward)
    assert as_before == backward


def test_what_is_saved_and_returned_counts_until_the_backward_has_read_it() -> None:
    """exp has no group, because the caller may hold it: it is there in the backward, beside what mul makes of it."""
    partition = toys.partitioned(toys.view_of_output)
    plan = analyse(partition, toys.options())
    nodes = list(partition.backward.graph.nodes)
    mul = next(i for i, n in enumerate(nodes) if n.target is aten.mul.Tensor)
    _, backward = _Modelling(partition, plan, {slot: frozenset(Choice) for slot in plan.items})._base()
    assert backward[mul] - backward[mul + 1] >= 256


@pytest.mark.parametrize("toy", toys.ALL, ids=toys.name)
def test_nodes_of_ours_between_kernels_take_no_memory(toy: toys.Toy) -> None:
    """They end a C++ function, which has all its results before it frees anything. Nothing else changes."""
    partition = toys.partitioned(toy)
    plan = decide(partition, toys.options())
    before, after = replay_of(plan), replay_of(with_nodes(partition, plan))
    assert all(now <= then for now, then in zip(after.memory, before.memory, strict=True))
    assert replace(after, step=before.step, memory=before.memory) == before


def test_what_is_read_before_a_store_is_gone_behind_it() -> None:
    """mm -> half of it -> tanh [store] exp -> mm: the two loops would be one C++ function, which has the first product
    until the exponentials are there."""

    def two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (x @ w)[:, ::2].tanh().sum() + (v.exp() @ w).sum()

    given = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    partition = toys.partitioned(two, *given)
    plan = decide(partition, toys.options())
    names = [n.name for n in partition.forward.graph.nodes]
    tanh, exp = names.index("tanh"), names.index("exp")
    assert next(trip.store.at for trip in plan.schedule.values() if trip.store.at >= tanh) == tanh
    before, after = replay_of(plan), replay_of(with_nodes(partition, plan))
    gone = [then - now for then, now in zip(before.memory, after.memory, strict=True)]
    at = before.step.operator
    assert (gone[at(tanh)], gone[at(exp)]) == (0, 256)


def test_a_tensor_counts_while_it_is_read_though_only_a_copy_of_a_part_is_stored() -> None:
    """mm -> a slice of it is copied and stored; the sum at the end reads all of it."""
    partition = toys.partitioned(toys.slice_and_living_base)
    plan = analyse(partition, toys.options())
    copied = next(g for g in plan.groups if g.pack is not None and g.pack.copy)
    nodes = [n.name for n in partition.forward.graph.nodes]
    forward, _ = _Modelling(partition, plan, {slot: frozenset(Choice) for slot in plan.items})._base()
    release, last_read = plan.items[copied.slot].last_use, nodes.index("sum_2")
    assert release == nodes.index(copied.base) < last_read
    assert all(nbytes >= copied.nbytes for nbytes in forward[release + 1 : last_read + 1])


def test_all_that_one_kernel_writes_is_there_from_its_first_result_on() -> None:
    """mm -> (sin, cos, tanh) -> mm: one kernel, whose first result can be stored before the others' place."""

    def three(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        a, b, c = y.sin(), y.cos(), y.tanh()
        return a @ w + b @ w + c @ w

    partition = toys.partitioned(three, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    plan = analyse(partition, toys.options())
    made = {g.base: plan.items[g.slot].produced for g in plan.groups}
    assert {"sin", "cos", "tanh"} <= made.keys()
    forward, _ = partition.once(both_buffers)
    early = _Modelling(partition, plan, {slot: frozenset(Choice) for slot in plan.items})._made_early(forward)
    of = dict(zip([n.name for n in partition.forward.graph.nodes], early, strict=True))
    assert (of["mm"], of["sin"], of["cos"], of["tanh"]) == (0, 2 * 256, 256, 0)
