"""The rewritten graphs: what stands in them, and that they compute the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import ssd_fx
from ssd_fx.passes import pipeline
from ssd_fx.passes.decide import decide
from ssd_fx.passes.rewrite.backward import may_be_donated
from ssd_fx.passes.rewrite.insert import insert
from ssd_fx.passes.rewrite.refuse import refuse_stand_ins
from ssd_fx.passes.schedule import Trip
from tests.bitwise import Compile, kept, ours, prove_bitwise
from tests.passes import toys

OPTIONS = {"inner": "aot_eager", "engine": "memory", "min_bytes": 0, "budget": 0}


def nodes_of(graph: torch.fx.Graph) -> str:
    """The graph without its placeholders, one node a line."""
    lines = []
    for node in graph.nodes:
        if node.op != "placeholder":
            target = node.target if isinstance(node.target, str) else node.target.__name__
            args = ", ".join(str(a) for a in node.args if a != toys.CONFIG)
            lines.append(f"{node.name} = {target}({args})")
    return "\n".join(lines)


def test_forward_of_a_chain() -> None:
    """mm -> relu [store] -> mm -> relu [release]; the handle is saved instead of relu."""
    assert_expected_inline(
        nodes_of(toys.planned(toys.relu_chain).partition.forward.graph),
        """\
empty_memory_format = empty.memory_format([0])
begin__default = begin_.default(empty_memory_format, 309beb59, 256, 256)
mm = mm.default(primals_1, primals_2)
relu = relu.default(mm)
ssd_fx_handle_0 = store.default(relu, 309beb59, 0, 0)
mm_1 = mm.default(relu, primals_2)
relu_1 = relu.default(mm_1)
detach_1 = detach.default(relu_1)
detach_2 = detach.default(detach_1)
t_1 = t.default(primals_2)
t_2 = t.default(primals_1)
wait_store__default = wait_store_.default(ssd_fx_handle_0, relu, 1, True, True)
output = output((relu_1, ssd_fx_handle_0, detach_2, t_1, t_2))""",
    )


def test_backward_of_a_chain() -> None:
    """[load] -> ... -> [wait] -> mm: the loaded tensor is used only behind its wait."""
    assert_expected_inline(
        nodes_of(toys.planned(toys.relu_chain).partition.backward.graph),
        """\
load_default = load.default(ssd_fx_handle_0, [8, 8], [8, 1], torch.float32, cpu, 0, False, )
threshold_backward = threshold_backward.default(tangents_1, detach_2, 0)
wait_load__default = wait_load_.default(load_default, ssd_fx_handle_0, 1)
t = t.default(load_default)
mm_2 = mm.default(t, threshold_backward)
mm_3 = mm.default(threshold_backward, t_1)
detach = detach.default(load_default)
detach_3 = detach.default(detach)
threshold_backward_1 = threshold_backward.default(mm_3, detach_3, 0)
mm_4 = mm.default(t_2, threshold_backward_1)
mm_5 = mm.default(threshold_backward_1, t_1)
add = add.Tensor(mm_2, mm_4)
output = output((mm_5, add))""",
    )


def test_views_are_replayed_behind_the_wait() -> None:
    """load base -> wait -> as_strided q, k, v -> their transposes."""
    assert_expected_inline(
        nodes_of(toys.planned(toys.views_only).partition.backward.graph),
        """\
load_default = load.default(ssd_fx_handle_2, [8, 8], [8, 1], torch.float32, cpu, 0, False, strides)
load_default_1 = load.default(ssd_fx_handle_1, [8, 24], [24, 1], torch.float32, cpu, 1, False, strides)
load_default_2 = load.default(ssd_fx_handle_0, [8, 24], [24, 1], torch.float32, cpu, 2, False, strides)
expand = expand.default(tangents_1, [8, 8])
wait_load__default = wait_load_.default(load_default, ssd_fx_handle_2, 3)
as_strided_default = as_strided.default(load_default, [8, 8], [1, 8], 0)
mm_3 = mm.default(as_strided_default, expand)
wait_load__default_1 = wait_load_.default(load_default_1, ssd_fx_handle_1, 4)
as_strided_default_1 = as_strided.default(load_default_1, [8, 8], [1, 24], 16)
as_strided_default_2 = as_strided.default(load_default_1, [8, 8], [1, 24], 0)
as_strided_default_3 = as_strided.default(load_default_1, [8, 8], [24, 1], 8)
mm_4 = mm.default(expand, as_strided_default_1)
mm_5 = mm.default(as_strided_default_2, mm_4)
mm_6 = mm.default(mm_4, as_strided_default_3)
t_5 = t.default(mm_5)
cat_1 = cat.default([mm_6, t_5, mm_3], 1)
mm_7 = mm.default(t_6, cat_1)
wait_load__default_2 = wait_load_.default(load_default_2, ssd_fx_handle_0, 5)
as_strided_default_4 = as_strided.default(load_default_2, [24, 8], [1, 24], 0)
mm_8 = mm.default(cat_1, as_strided_default_4)
slice_1 = slice.Tensor(mm_7, 1, 0, 8)
slice_2 = slice.Tensor(mm_7, 1, 8, 16)
slice_3 = slice.Tensor(mm_7, 1, 16, 24)
add = add.Tensor(slice_1, slice_2)
add_1 = add.Tensor(add, slice_3)
output = output((add_1, mm_8))""",
    )


def test_transfers_stand_in_the_order_that_was_simulated() -> None:
    """A drive that is behind reads what is needed soonest first, although that was made last."""
    seen = {"stores": 0, "loads": 0}
    for toy in toys.ALL:
        planned = toys.planned(toy)
        schedule, items = planned.plan.schedule, planned.plan.items
        ranks = {
            "stores": {s: (t.store.at, not t.blocks, items[s].last_use) for s, t in schedule.items()},
            "loads": {s: (t.load.at, t.wait.at) for s, t in schedule.items()},
        }
        stores = [n for n in planned.partition.forward.graph.nodes if n.target is torch.ops.ssd_fx.store.default]
        loads = [n.args[0] for n in planned.partition.backward.graph.nodes if n.target is torch.ops.ssd_fx.load.default]
        for kind, handles in {"stores": stores, "loads": loads}.items():
            order = [ranks[kind][int(n.name.split("_")[3])] for n in handles]
            assert order == sorted(order), (toys.name(toy), kind)
            seen[kind] += sum(a[0] == b[0] and a != b for a, b in itertools.pairwise(order))
    assert all(seen.values())


def test_the_nodes_say_what_the_plan_says_of_waiting() -> None:
    """The first group blocks, and the load of the second is strict."""
    plan, partition = toys.planned(toys.views_only).plan, toys.partitioned(toys.views_only, *toys.inputs())

    def edit(slot: int, trip: Trip) -> Trip:
        return trip.moved(block=slot == 0)._replace(load=trip.load._replace(flag=slot == 1))

    plan = plan.with_(schedule=plan.schedule.edited(edit, plan.items))
    insert(partition, plan, config=toys.CONFIG)
    forward, backward = partition.forward.graph, partition.backward.graph
    blocks = {n.args[0].name: n.args[4] for n in forward.nodes if n.target is torch.ops.ssd_fx.wait_store_.default}
    strict = {n.args[0].name: n.args[6] for n in backward.nodes if n.target is torch.ops.ssd_fx.load.default}
    handles = [f"ssd_fx_handle_{slot}" for slot in range(3)]
    assert [blocks[handle] for handle in handles] == [True, False, False]
    assert [strict[handle] for handle in handles] == [False, True, False]


def test_a_backward_refuses_stand_ins_for_all_that_changes_from_step_to_step() -> None:
    """For what it computed and for the caller's input, which are kept; not for the weight, which nobody stores."""

    def squares(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().sum() + (x * x).sum()

    def refused(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> list[str]:
        partition = pipeline.joint_of(gm, inputs, kwargs).partition()
        refuse_stand_ins(partition)
        nodes = partition.backward.graph.find_nodes(
            op="call_function", target=torch.ops.ssd_fx.refuse_stand_ins.default
        )
        return [n.name for node in nodes for n in node.args[0]]

    x, w = toys.inputs()
    x = (x * 2).requires_grad_()  # no leaf
    assert toys.with_joint(squares, (x, torch.nn.Parameter(w.detach())), refused) == ["primals_1", "mm"]


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def plus_sparse(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(at, values, (64, 64)) @ x  # type: ignore[no-any-return]


def test_a_sparse_tensor_is_kept_and_has_no_stand_in() -> None:
    """It has no storage by which a stand-in would be known."""

    def gradient(compile: Compile) -> list[torch.Tensor | None]:
        x, at, values = torch.randn(64, 64, requires_grad=True), torch.randint(0, 64, (2, 100)), torch.randn(100)
        compile(lambda x, at, values: plus_sparse((x @ x).sin(), at, values).sin().sum())(x, at, values).backward()
        return [x.grad]

    prove_bitwise(gradient, [kept(OPTIONS), ours(OPTIONS)])


ON_DISK = (toys.relu_chain, toys.views_only, toys.complex_numbers, toys.narrow, toys.slice_of_big_base, toys.equal_copy)
ON_DISK += (toys.saved_output, toys.view_of_output)  # of which nothing but leaves is stored


@pytest.mark.parametrize("toy", ON_DISK, ids=toys.name)
def test_gradients_are_bitwise_those_of_everything_kept(toy: toys.Toy, tmp_path: object) -> None:
    """From files. All toys, from memory: tests/test_every_source.py."""
    options = OPTIONS | {"engine": "posix", "dirs": [str(tmp_path)]}
    prove_bitwise(toys.trained(toy), [kept(options), ours(options)])
    stats, plan = ssd_fx.stats(), toys.planned(toy).plan
    stored = sum(group.stored_nbytes for group in plan.offloaded)
    inputs = stats.held_bytes  # here they are leaves, which their owner holds
    assert stats.read_bytes + stats.forwarded_bytes == stored + inputs
    assert stats.offloaded_bytes == plan.offloaded_bytes + inputs


def test_the_input_of_a_graph_is_not_donated_on_a_device() -> None:
    """Its owner may have given it to another stream. What the graph itself makes nobody else has."""
    partition = toys.partitioned(toys.relu_chain)
    here = next(g for g in decide(partition, toys.options()).groups if g.layout)
    there = replace(here, layout=replace(here.stored, device=torch.device("cuda", 0)))
    made = next(n for n in partition.forward.graph.nodes if n.name == here.base)
    given = next(n for n in partition.forward.graph.nodes if n.op == "placeholder")
    found = [may_be_donated(group, base) for group in (here, there) for base in (made, given)]
    assert found == [True, True, True, False]


def copy_that_is_reduced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """sigmoid -> t -> contiguous, which products read and sums do: made again within a sum, it would be read in the
    order of sigmoid, and added up in that."""
    y = (x @ w).sigmoid()
    c = y.t().contiguous()
    return (c @ w).sum() + (y @ w).sum() + (c * w[0]).sin().sum() + (c * w[:, :1]).sum()


@pytest.mark.parametrize(
    "toy", [copy_that_is_reduced, pytest.param(toys.equal_copy, marks=pytest.mark.slow)], ids=toys.name
)
def test_inductor_adds_up_in_the_same_order(toy: toys.Toy) -> None:
    """67 columns: several vectors and a rest."""
    options = OPTIONS | {"inner": "inductor"}
    prove_bitwise(toys.trained(toy, 67), [ours(options, budget=1.0), ours(options)])
