"""Every rule of the verifier, by breaking a good plan or graph and reading the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from ssd_fx.passes.decide import decide
from ssd_fx.passes.plan import Keep, Plan, replay_of
from ssd_fx.passes.schedule import Schedule, Trip
from ssd_fx.passes.verify.errors import VerifyError
from ssd_fx.passes.verify.graphs import verify_graphs
from ssd_fx.passes.verify.plan import verify_plan
from tests.passes import toys

ops = torch.ops.ssd_fx


@pytest.fixture
def good() -> toys.Planned:
    planned = toys.planned(toys.views_only)
    check(planned)
    return planned


def check(planned: toys.Planned) -> None:
    verify_graphs(planned.partition, planned.plan, planned.before)


def find(graph: fx.Graph, target: object, index: int = 0) -> fx.Node:
    return [n for n in graph.nodes if n.target is target][index]


def moved(plan: Plan, later: bool = False, **changes: int) -> Plan:
    """The plan with the first trip changed, by `Trip.moved`."""
    first = plan.offloaded[0].slot

    def edit(slot: int, trip: Trip) -> Trip:
        found = trip.moved(**changes)
        return found._replace(store=found.store._replace(flag=later)) if slot == first else trip

    return plan.with_(schedule=plan.schedule.edited(edit, plan.items))


BAD_TRIPS: list[tuple[dict[str, int], str]] = [
    ({"store": 0}, "store of 'cat' comes before the tensor is produced; see pass 'select'"),
    ({"wait": 999}, "'cat' is used in the backward before its wait"),
    ({"later": True, "block": True}, "release of 'cat' waits for a write that begins later"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_TRIPS, ids=[m.split(";")[0] for _, m in BAD_TRIPS])
def test_trips(changes: dict[str, int], message: str) -> None:
    partition = toys.partitioned(toys.views_only)
    plan = toys.planned(toys.views_only).plan
    verify_plan(partition, plan)
    with pytest.raises(VerifyError, match=message):
        verify_plan(partition, moved(plan, **changes))


def test_a_wait_between_the_first_use_and_the_last() -> None:
    """relu -> mm, threshold_backward: both read it in the backward."""
    partition, plan = toys.partitioned(toys.relu_chain, *toys.inputs()), toys.planned(toys.relu_chain).plan
    first, last = plan.items[0].first_use, plan.items[0].last_bwd_use
    assert first < last
    verify_plan(partition, moved(plan, wait=first))
    with pytest.raises(VerifyError, match="'relu' is used in the backward before its wait"):
        verify_plan(partition, moved(plan, wait=last))


def test_release_before_the_last_use() -> None:
    partition = toys.partitioned(toys.views_only)
    plan = toys.planned(toys.views_only).plan
    group = plan.offloaded[0]
    item = plan.items[group.slot]
    assert item.last_use > item.produced
    with pytest.raises(VerifyError, match="'cat' is read in the forward after its release"):
        verify_plan(partition, moved(plan, store=item.produced, release=item.produced))


def test_a_tensor_in_two_groups() -> None:
    partition = toys.partitioned(toys.views_only)
    plan = toys.planned(toys.views_only).plan
    with pytest.raises(VerifyError, match="a saved tensor is in two alias groups; see pass 'alias'"):
        verify_plan(partition, plan.with_(groups=(*plan.groups, plan.groups[0])))


def test_a_member_outside_of_what_is_stored() -> None:
    partition = toys.partitioned(toys.slice_of_big_base)
    plan = toys.planned(toys.slice_of_big_base).plan
    verify_plan(partition, plan)
    group = next(g for g in plan.groups if g.pack is not None)
    member = replace(group.members[0], layout=replace(group.members[0].layout, offset=1))
    groups = tuple(replace(g, members=(member,)) if g is group else g for g in plan.groups)
    with pytest.raises(VerifyError, match="member 't' lies outside of what is stored of 'mm'; see pass 'alias'"):
        verify_plan(partition, plan.with_(groups=groups))


def test_what_is_stored_has_gaps() -> None:
    partition = toys.partitioned(toys.relu_chain)
    plan = toys.planned(toys.relu_chain).plan
    group = plan.groups[0]
    assert group.layout is not None
    gaps = replace(group, layout=replace(group.layout, stride=(16, 1)))
    with pytest.raises(VerifyError, match="what is stored of 'relu' has gaps"):
        verify_plan(partition, plan.with_(groups=(gaps,)))


def test_nothing_is_known_of_what_is_stored() -> None:
    partition = toys.partitioned(toys.relu_chain)
    plan = toys.planned(toys.relu_chain).plan
    unknown = replace(plan.groups[0], layout=None)
    with pytest.raises(VerifyError, match="what is stored of 'relu' has gaps"):
        verify_plan(partition, plan.with_(groups=(unknown,)))


def test_a_copy_of_what_is_not_stored() -> None:
    partition = toys.partitioned(toys.equal_copy)
    plan = toys.planned(toys.equal_copy).plan
    verify_plan(partition, plan)
    group, member = next((g, m) for g in plan.groups for m in g.members if m.copy is not None)
    assert member.copy is not None
    source = replace(member.copy.source, offset=1)
    copied = replace(member, copy=replace(member.copy, source=source))
    groups = tuple(replace(g, members=(copied,)) if g is group else g for g in plan.groups)
    with pytest.raises(VerifyError, match=f"member '{member.name}' lies outside of what is stored of 'sigmoid'"):
        verify_plan(partition, plan.with_(groups=groups))


Break = Callable[[toys.Planned], None]


def argument(half: str, target: object, number: int, value: object) -> Break:
    """Gives the first call of an operator of ours another argument."""

    def change(planned: toys.Planned) -> None:
        find(getattr(planned.partition, half).graph, target).update_arg(number, value)

    return change


def erase_release(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    graph.erase_node(find(graph, ops.wait_store_.default))


def release_something_else(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    find(graph, ops.wait_store_.default).update_arg(1, find(graph, torch.ops.aten.mm.default, 1))


def read_after_release(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    base = find(graph, ops.store.default).args[0]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.sin.default, (base,))


def write_after_store(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    store = find(graph, ops.store.default)
    with graph.inserting_after(store):
        graph.call_function(torch.ops.aten.relu_.default, (store.args[0],))


def swap_two_saved(planned: toys.Planned) -> None:
    """The backward takes its first two handles in the other order than the forward gives them."""
    first, second = [n for n in planned.partition.backward.graph.nodes if "handle" in n.name][:2]
    second.append(first)


def store_twice(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    store = find(graph, ops.store.default)
    with graph.inserting_after(store):
        graph.node_copy(store)


def store_into_another_tier(planned: toys.Planned) -> None:
    store = find(planned.partition.forward.graph, ops.store.default)
    store.args = (*store.args[:5], "host")


def store_later(planned: toys.Planned) -> None:
    store = find(planned.partition.forward.graph, ops.store.default)
    store.args = (*store.args[:5], "", False, True)


def save_the_base_too(planned: toys.Planned) -> None:
    output = planned.partition.fwd_output
    base = find(planned.partition.forward.graph, ops.store.default).args[0]
    assert isinstance(base, fx.Node)
    with planned.partition.backward.graph.inserting_before(next(iter(planned.partition.backward.graph.nodes))):
        planned.partition.backward.graph.placeholder(base.name)
    output.args = ((output.args[0][0], base, *output.args[0][1:]),)  # type: ignore[index,misc]


def rename_a_handle(planned: toys.Planned) -> None:
    next(n for n in planned.partition.backward.graph.nodes if "handle" in n.name).name = "other"


def use_before_wait(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    load = find(graph, ops.load.default)
    with graph.inserting_after(load):
        graph.call_function(torch.ops.aten.sin.default, (load,))


def erase_wait(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    graph.erase_node(find(graph, ops.wait_load_.default))


def return_what_is_offloaded(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    outputs = graph.output_node().args[0]
    graph.output_node().args = ((find(graph, ops.store.default).args[0], *outputs[1:]),)  # type: ignore[index]


def load_twice(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    load = find(graph, ops.load.default)
    with graph.inserting_after(load):
        graph.node_copy(load)


def compute(graph: fx.Graph, index: int = -1) -> fx.Node:
    """A node of the graph as it was, that is no view."""
    return find(graph, torch.ops.aten.mm.default, index)


def wait_on_the_handle_of_another(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    find(graph, ops.wait_load_.default).update_arg(1, find(graph, ops.load.default, 1).args[0])


def wait_for_the_tensor_of_another(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    find(graph, ops.wait_load_.default, 2).update_arg(0, find(graph, ops.load.default, 0))


def load_the_handle_of_another(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    for target, index in ((ops.load.default, 0), (ops.wait_load_.default, 1)):
        other = find(graph, ops.load.default, 1).args[0]
        first = find(graph, ops.load.default, 0) if target is ops.load.default else find(graph, target, 2)
        first.update_arg(index, other)


def drop_a_handle(planned: toys.Planned) -> None:
    output = planned.partition.fwd_output
    handle = find(planned.partition.forward.graph, ops.store.default)
    output.args = (tuple(n for n in output.args[0] if n is not handle),)  # type: ignore[union-attr]


def write_a_list_after_store(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    store = find(graph, ops.store.default)
    with graph.inserting_after(store):
        graph.call_function(torch.ops.aten._foreach_add_.Scalar, ([store.args[0]], 1))


def forget_a_value(planned: toys.Planned) -> None:
    del compute(planned.partition.backward.graph).meta["val"]


def forget_the_value_of_a_view(planned: toys.Planned) -> None:
    del find(planned.partition.backward.graph, torch.ops.aten.as_strided.default).meta["val"]


def drop_an_argument(planned: toys.Planned) -> None:
    node = find(planned.partition.backward.graph, torch.ops.aten.cat.default)
    node.update_arg(0, node.args[0][1:])  # type: ignore[index]


def change_a_dtype(planned: toys.Planned) -> None:
    node = compute(planned.partition.backward.graph)
    node.meta["val"] = node.meta["val"].double()


def give_other_strides(planned: toys.Planned) -> None:
    """mm_5 gets its first argument as a row-major view; it was a column-major one."""
    graph = planned.partition.backward.graph
    node = next(n for n in graph.nodes if n.name == "mm_5")
    view = node.args[0]
    with graph.inserting_after(view):
        other = graph.call_function(torch.ops.aten.as_strided.default, (view.args[0], [8, 8], [24, 1], 0))
    other.meta["val"] = view.meta["val"].t()
    node.update_arg(0, other)


def rename_a_tangent(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    next(n for n in graph.nodes if n.name == "tangents_1").name = "other"


def rename_an_input(planned: toys.Planned) -> None:
    next(n for n in planned.partition.forward.graph.nodes if n.name == "primals_1").name = "other"


def alias_an_output(planned: toys.Planned) -> None:
    """A gradient becomes a view of an input of the backward."""
    graph = planned.partition.backward.graph
    gradient = graph.output_node().args[0][0]  # type: ignore[index]
    source = next(n for n in graph.nodes if n.name == "t_6")
    gradient.meta["val"] = source.meta["val"].as_strided((8, 8), (8, 1))  # type: ignore[union-attr]


def swap_outputs(planned: toys.Planned) -> None:
    output = planned.partition.backward.graph.output_node()
    output.args = (tuple(reversed(output.args[0])),)  # type: ignore[arg-type]


def drop_a_gradient(planned: toys.Planned) -> None:
    output = planned.partition.backward.graph.output_node()
    output.args = ((output.args[0][0], None),)  # type: ignore[index]


BREAKS: list[tuple[Break, str]] = [
    (erase_release, "the forward has 5 nodes of ours instead of 6"),
    (release_something_else, "holds another tensor than was stored"),
    (read_after_release, "'cat' is read after its release"),
    (write_after_store, "'cat' is written after its store"),
    (argument("forward", ops.store.default, 4, 99), "forward nodes are out of order"),
    (
        argument("backward", ops.wait_load_.default, 2, 99),
        "backward nodes are out of order: 'wait_load__default' has seq 99 and stands at 3",
    ),
    (swap_two_saved, "saved tensors and backward inputs differ in order"),
    (store_twice, "the forward has 7 nodes of ours instead of 6"),
    (store_into_another_tier, "'ssd_fx_handle_0' goes to tier 'host', binding False, and the plan says Offload"),
    (store_later, "'ssd_fx_handle_0' says later=True, and the plan says False"),
    (save_the_base_too, "'cat' is offloaded and saved too"),
    (rename_a_handle, "has no placeholder of its name in the backward"),
    (use_before_wait, "before its wait"),
    (erase_wait, "the backward has 5 nodes of ours instead of 6"),
    (argument("backward", ops.load.default, 2, [1, 8]), "says another layout than its value has"),
    (return_what_is_offloaded, "'cat' is offloaded and the caller's"),
    (argument("backward", ops.load.default, 1, [4, 16]), "says another layout than its value has"),
    (argument("backward", ops.load.default, 3, torch.int32), "says another layout than its value has"),
    (argument("backward", ops.load.default, 4, torch.device("meta")), "says another layout than its value has"),
    (load_twice, "the backward has 7 nodes of ours instead of 6"),
    (wait_on_the_handle_of_another, r"'wait_load__default' stands where the plan has the wait of slot \d"),
    (wait_for_the_tensor_of_another, "has the tensor of another"),
    (load_the_handle_of_another, r"'load_default' stands where the plan has the load of slot \d"),
    (argument("forward", ops.store.default, 3, 77), "'ssd_fx_handle_0' stands where the plan has the store of slot 0"),
    (drop_a_handle, "the handle 'ssd_fx_handle_0' is not saved"),
    (write_a_list_after_store, "is written after its store"),
    (forget_a_value, r"is no tensor, was"),
    (forget_the_value_of_a_view, r"'as_strided_default' has no meta\['val'\]"),
    (drop_an_argument, r"'cat_1' is given \['\S+ \S+ \S+ \S+ \S+ \S+', '[^']+'\], was given"),
    (change_a_dtype, r"torch.float64 cpu, was .* torch.float32 cpu"),
    (give_other_strides, r"'mm_5' is given .*\[24, 1\].*, was given .*\[1, 24\]"),
    (rename_a_tangent, "the backward's own inputs are"),
    (rename_an_input, "the forward's own inputs are"),
    (alias_an_output, "share memory and did not before"),
    (swap_outputs, "outputs of the backward were exchanged"),
    (drop_a_gradient, "the outputs of the backward are"),
]


@pytest.mark.parametrize(("break_it", "message"), BREAKS, ids=[m for _, m in BREAKS])
def test_graphs(good: toys.Planned, break_it: Break, message: str) -> None:
    break_it(good)
    with pytest.raises(VerifyError, match=message):
        check(good)


def test_a_member_that_is_saved_beside_its_copy() -> None:
    """A slice is stored as a dense copy, which is of another storage than the slice."""
    planned = toys.planned(toys.slice_of_big_base)
    check(planned)
    forward, output = planned.partition.forward.graph, planned.partition.fwd_output
    (group,) = (g for g in planned.plan.offloaded if g.pack is not None)
    base = next(n for n in forward.nodes if n.name == group.base)
    name = group.members[0].name
    with forward.inserting_after(base):
        member = forward.call_function(torch.ops.aten.t.default, (base,))
    member.name, member.meta["val"] = name, base.meta["val"].t()
    output.args = ((*output.args[0], member),)  # type: ignore[misc]
    backward = planned.partition.backward.graph
    with backward.inserting_after([n for n in backward.nodes if n.op == "placeholder"][-1]):
        backward.placeholder("again").name = name
    with pytest.raises(VerifyError, match=rf"\['{name}'\] are offloaded and saved too; see pass 'insert'"):
        check(planned)


def test_a_release_before_its_store(good: toys.Planned) -> None:
    """It has the handle that the store makes, so the linter of FX sees it."""
    graph = good.partition.forward.graph
    find(graph, ops.store.default).prepend(find(graph, ops.wait_store_.default))
    with pytest.raises(RuntimeError, match=r"'ssd_fx_handle_0' .* was used before it has been defined"):
        check(good)


def test_a_changed_output(good: toys.Planned) -> None:
    other = replace(good.before.forward, outputs=("something_else",))
    with pytest.raises(VerifyError, match="an output of the model changed"):
        verify_graphs(good.partition, good.plan, replace(good.before, forward=other))


def test_the_message_shows_the_nodes_around_the_fault(good: toys.Planned) -> None:
    read_after_release(good)
    with pytest.raises(VerifyError) as caught:
        check(good)
    head, *lines = str(caught.value).splitlines()
    assert head.endswith("; see pass 'select'")
    assert [line.split()[:2] for line in lines if line.startswith("-->")] == [["-->", "%sin_default"]]
    assert len(lines) == 7  # five before, the fault, the output


BAD_PLANS: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: p.with_(decisions={**p.decisions, 99: Keep("")}), "a decision is about no alias group"),
    (lambda p: p.with_(decisions={0: Keep("")}), "an alias group has no decision"),
    (lambda p: p.with_(schedule=Schedule()), "schedule and offloaded groups differ"),
    (lambda p: p.with_(groups=tuple(replace(g, slot=0) for g in p.groups)), "two alias groups have one slot"),
    (lambda p: p.with_(groups=tuple(replace(g, base="nowhere") for g in p.groups)), "base 'nowhere' of slot 0 is not"),
    (lambda p: p.with_(groups=tuple(replace(g, obstacle="odd") for g in p.groups)), "is offloaded but odd"),
    (lambda p: p.with_(groups=(replace(p.groups[0], members=(replace(p.groups[0].members[0], name="nobody"),)),
                               *p.groups[1:])), r"members \['nobody'\] are not saved"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_PLANS, ids=[m for _, m in BAD_PLANS])
def test_plans(change: Callable[[Plan], Plan], message: str) -> None:
    partition = toys.partitioned(toys.views_only)
    plan = toys.planned(toys.views_only).plan
    with pytest.raises(VerifyError, match=message):
        verify_plan(partition, change(plan))


def limits(plan: Plan, **changes: float) -> Plan:
    return plan.with_(limits=replace(plan.limits, **changes))


BAD_LIMITS: list[tuple[dict[str, float], str]] = [
    ({"memory": 1}, r"\d+ B are predicted at '\w+', and the budget allows 1 B; see pass 'select'\n"),
    ({"kept": 1}, "256 B are kept, and the budget allows 1 B; see pass 'select'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_LIMITS, ids=["memory", "kept"])
def test_memory(changes: dict[str, float], message: str) -> None:
    partition = toys.partitioned(toys.views_only)
    plan = decide(partition, toys.options(budget=0.2))
    verify_plan(partition, plan)
    with pytest.raises(VerifyError, match=message):
        verify_plan(partition, limits(plan, **changes))


def test_one_byte_more_than_the_budget_allows() -> None:
    partition = toys.partitioned(toys.views_only)
    plan = decide(partition, toys.options(budget=0))
    peak = replay_of(plan).peak
    verify_plan(partition, limits(plan, memory=peak))
    with pytest.raises(VerifyError, match=f"{peak} B are predicted at '.*', and the budget allows {peak - 1} B"):
        verify_plan(partition, limits(plan, memory=peak - 1))
