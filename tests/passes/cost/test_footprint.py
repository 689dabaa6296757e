"""Which nodes are predicted to be buffers, and how long those live."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.passes.cost.footprint import buffers
from ssd_fx.passes.cost.fusion import Loop, Space, fuse
from ssd_fx.passes.cost.kernels import Kernels
from ssd_fx.passes.cost.lifetime import last_read
from ssd_fx.passes.cost.operators import CONTIGUOUS
from ssd_fx.passes.partition import RECOMPUTED, storage_of
from tests.passes.lowered import lower_alone


def test_views_that_meet_again_are_followed_once() -> None:
    """sin -> (view, view) -> add_ -> (view, view) -> add_ ...: 40 times two ways from a tensor to its readers."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        for _ in range(40):
            y = y.view(8, 8).add_(y.view(8, 8))
        return y @ y

    with FakeTensorMode() as mode:
        x = torch.empty(8, 8)
    with mode:
        graph = make_fx(function, tracing_mode="real")(x).graph
    nodes = list(graph.nodes)
    found = buffers(Kernels(graph))
    names = {storage_of(n): n.name for n in reversed(nodes) if n.op != "output"}
    lives = {names[key]: (nodes[i].name, nodes[found.last[key]].name) for key, i in found.first.items()}
    assert lives == {"x_1": ("x_1", "sin"), "sin": ("sin", "mm"), "mm": ("mm", "mm")}


def test_what_only_its_own_kernel_reads_is_no_memory() -> None:
    """exp is read twice, so Inductor realizes it on the CPU; both readers are fused with it, and no other reads it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y * 2, y * 3

    with FakeTensorMode() as mode:
        x = torch.empty(8, 8)
    with mode:
        graph = make_fx(function, tracing_mode="real")(x).graph
    found = buffers(Kernels(graph))
    nbytes = {n.name: found.nbytes[key] for n in graph.nodes if (key := storage_of(n)) in found.nbytes}
    assert nbytes == {"x_1": 256, "exp": 0, "mul": 256, "mul_1": 256}


def overwritten(function: Callable[..., object], *args: torch.Tensor) -> dict[str, str]:
    """What is predicted to be written over a dying buffer, which is as much as Inductor's code has."""
    found = overwriting(make_fx(function, tracing_mode="fake")(*args).graph)
    with config.patch(allow_buffer_reuse=False):  # as our graphs have it
        assert lower_alone(function, *args).code.count("# reuse") == len(found)
    return found


def overwriting(graph: fx.Graph) -> dict[str, str]:
    names = {storage_of(n): n.name for n in reversed(list(graph.nodes)) if n.op == "call_function"}
    return {names[made]: names[dead] for made, dead in buffers(Kernels(graph)).in_place.items()}


ROWS, SQUARE = torch.randn(64, 32), torch.randn(32, 32)


def test_a_loop_writes_over_what_others_of_its_kernel_read_before_it() -> None:
    """mul reads the sum, and both read mm: the sum is done with it when mul overwrites it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        y = x @ w
        return ((y * y.sum(1, keepdim=True)) @ w,)

    assert overwritten(function, ROWS, SQUARE) == {"mul": "mm"}


def test_a_loop_does_not_write_over_what_another_reads_that_it_does_not_need() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        y = x @ w
        return y.sin() @ w, y.cos() @ w

    assert overwritten(function, ROWS, SQUARE) == {}


def test_a_loop_does_not_write_over_what_it_reads_in_another_order() -> None:
    """The view needs the elements of the copy in order."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        turned = (x @ w).permute(1, 0).contiguous()
        return (turned.view(16, 64) @ w.view(64, 16),)

    assert overwritten(function, SQUARE, SQUARE) == {}


def test_a_loop_does_not_write_over_what_lies_in_another_order() -> None:
    """The sum has the order of its input, which is turned. But a product reads it turned back, so Inductor makes it
    contiguous."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        return ((((x @ w).permute(1, 0).sigmoid() + 1).permute(1, 0) @ w),)

    assert overwritten(function, SQUARE, SQUARE) == {}


def test_a_loop_writes_in_the_order_of_what_it_reads() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        return (((x @ w).permute(1, 0).sigmoid() + 1) @ w,)

    assert overwritten(function, SQUARE, SQUARE) == {"add": "mm"}


def test_a_scatter_writes_over_its_operand_and_no_loop_over_what_it_made() -> None:
    """Inductor has a buffer for the zeros and the sums, one for the loop that reads them, and one for the product."""

    def scattered(at: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        zeros = torch.full((64, 64), 0.0, dtype=torch.float32)
        return (torch.mm(zeros.scatter_add(1, at, x) * x, w),)

    args = torch.randint(0, 64, (64, 64)), torch.randn(64, 64), torch.randn(64, 64)
    assert overwriting(make_fx(scattered, tracing_mode="fake")(*args).graph) == {"scatter_add": "full"}
    with config.patch(allow_buffer_reuse=False):
        code = lower_alone(scattered, *args).code
    assert (code.count("= empty_strided_cpu((64, 64)"), code.count("# reuse")) == (3, 0)


def test_a_loop_does_not_write_over_another_dtype() -> None:
    assert overwritten(lambda x, w: (torch.ops.prims.convert_element_type(x @ w, torch.int32),), ROWS, SQUARE) == {}


def test_a_row_of_what_a_softmax_computes_between_is_no_memory() -> None:
    """amax -> exp -> sum -> div: one kernel goes over the rows, and has the exp of one row at a time."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        y = x @ w
        shares = (y - y.amax(1, keepdim=True)).exp()
        return ((shares / shares.sum(1, keepdim=True)) @ w,)

    graph = make_fx(function, tracing_mode="fake")(ROWS, SQUARE).graph
    found = buffers(Kernels(graph))
    nbytes = {n.name: found.nbytes[key] for n in graph.nodes if (key := storage_of(n)) in found.nbytes}
    assert nbytes["exp"] == 0
    assert nbytes["div"] == 64 * 32 * 4
    with config.patch(allow_buffer_reuse=False):
        code = lower_alone(function, ROWS, SQUARE).code
    assert code.count("empty_strided_cpu((64, 32)") == 3  # mm and div, and the result


def test_what_is_counted_elsewhere_takes_the_place_of_what_it_overwrites() -> None:
    """sin is written over mm: where it is counted as another's, mm ends before."""
    graph = make_fx(lambda x, w: (x @ w).sin() @ w, tracing_mode="fake")(ROWS, SQUARE).graph
    nodes = list(graph.nodes)
    found = buffers(Kernels(graph))
    keys = {n.name: storage_of(n) for n in nodes if n.op == "call_function"}
    at, nbytes = [n.name for n in nodes].index("sin"), 64 * 32 * 4
    assert found.alive([keys["mm"], keys["sin"]], len(nodes))[at] == nbytes  # type: ignore[list-item]
    assert found.alive([keys["mm"]], len(nodes))[at - 1 : at + 1] == [nbytes, 0]  # type: ignore[list-item]


def places(loops: dict[int, Loop]) -> dict[int, int]:
    return fuse(loops).places()


ALIKE = Space(64, 64, reduces=False, on_cpu=True)


def loop(at: int, reads: dict[int, int], writes: dict[int, int], behind: set[int], space: Space | None = ALIKE) -> Loop:
    return Loop(at, space, reads, writes, behind)


def test_loops_that_read_the_same_run_together_as_early_as_one_is_needed() -> None:
    """10 and 30 read storage 1; the library call at 20 reads what 10 writes, so both run right before it."""
    loops = {
        10: loop(10, {1: 64}, {2: 64}, set()),
        20: loop(20, {2: 64}, {3: 64}, {10}, space=None),
        30: loop(30, {1: 64}, {4: 64}, set()),
    }
    assert places(loops) == {10: 19, 20: 20, 30: 19}


def test_loops_with_something_between_them_stay_apart() -> None:
    """30 reads what the call makes of the result of 10: one kernel could not run before and behind it."""
    loops = {
        10: loop(10, {1: 64}, {2: 64}, set()),
        20: loop(20, {2: 64}, {3: 64}, {10}, space=None),
        30: loop(30, {1: 64, 3: 64}, {4: 64}, {20}),
    }
    assert places(loops) == {10: 10, 20: 20, 30: 30}


def test_what_the_last_loop_of_a_kernel_needs_is_not_made_early_for_what_reads_the_first() -> None:
    """10: a norm that is computed again; 20: a gradient of weights; 90: the gradient of the norm, which needs 80."""
    loops = {
        10: loop(10, {1: 64}, {2: 64}, set()),
        20: loop(20, {2: 64}, {3: 64}, {10}, space=None),
        70: loop(70, {}, {7: 64}, set(), space=None),
        80: loop(80, {7: 64}, {8: 64}, {70}, space=None),
        90: loop(90, {1: 64, 2: 64, 8: 64}, {9: 64}, {10, 80}),
    }
    assert places(loops) == {10: 80, 20: 80, 70: 70, 80: 80, 90: 80}


def test_readers_of_a_kernel_that_runs_late_run_one_after_the_other() -> None:
    """As above, with a call that reads the result of 20, and something behind 90. One judge of two images: the sums of
    both gradients of its batch norm are one kernel, so all that the first image is made of waits for the second."""
    loops = {
        10: loop(10, {1: 64}, {2: 64}, set()),
        20: loop(20, {2: 64}, {3: 64}, {10}, space=None),
        30: loop(30, {3: 64}, {4: 64}, {20}, space=None),
        70: loop(70, {}, {7: 64}, set(), space=None),
        80: loop(80, {7: 64}, {8: 64}, {70}, space=None),
        82: loop(82, {}, {12: 64}, set(), space=None),
        90: loop(90, {1: 64, 2: 64, 8: 64}, {9: 64}, {10, 80}),
        100: loop(100, {9: 64}, {10: 64}, {90}, space=None),
    }
    assert places(loops) == {10: 80, 20: 81, 30: 81, 70: 70, 80: 80, 82: 82, 90: 80, 100: 100}
    del loops[82]
    assert places(loops) == {10: 80, 20: 81, 30: 82, 70: 70, 80: 80, 90: 80, 100: 100}


def test_loops_that_share_next_to_nothing_stay_apart() -> None:
    """Inductor asks for 10 bytes, unless the one reads the other: then it saves a kernel."""
    for shared, fused in ((0, False), (9, False), (10, True)):
        loops = {10: loop(10, {1: shared}, {2: 64}, set()), 30: loop(30, {1: shared}, {4: 64}, set())}
        assert (places(loops) == {10: 30, 30: 30}) == fused
    loops = {10: loop(10, {1: 4}, {2: 4}, set()), 30: loop(30, {2: 4}, {4: 4}, {10})}
    assert places(loops) == {10: 30, 30: 30}


def chain(x: torch.Tensor, w: torch.Tensor, calls: int) -> object:
    """sin -> mm -> mm -> ... -> mm; cos: two loops over x with library calls between them."""
    y = x.sin()
    for _ in range(calls):
        y = y @ w
    return y, x.cos() @ w


@pytest.mark.parametrize(("calls", "fused"), [(8, True), (9, False)])
def test_loops_too_far_apart_are_not_fused(calls: int, fused: bool) -> None:
    """Inductor itself would fuse them up to its 64th kernel from the first."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    found = lower_alone(functools.partial(chain, calls=calls), x, w)
    assert len([n for n in found.kernels if not n.is_extern()]) == (1 if fused else 2)
    predicted = alive(functools.partial(chain, calls=calls), x, w)
    assert predicted["cos"][0] == ("sin" if fused else "cos")


@pytest.mark.parametrize("again", [(), ("sin",), ("cos",)])
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_what_is_computed_again_is_not_made_early_by_fusion(calls: int, again: tuple[str, ...]) -> None:
    """Else all that the backward computes again could be made at its begin. So it is, and so it is predicted.

    Over two calls, those of the gradients of a linear layer, another loop joins what is computed again.
    """
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    found = lower_alone(functools.partial(chain, calls=calls), x, w, again=again)
    fused = calls <= {(): 3, ("sin",): 2, ("cos",): 0}[again]
    assert len([n for n in found.kernels if not n.is_extern()]) == (1 if fused else 2)
    predicted = alive(functools.partial(chain, calls=calls), x, w, again=again)
    assert predicted["cos"][0] == ("sin" if fused and calls else "cos")


@pytest.mark.parametrize(("loops", "kernels"), [(64, 1), (65, 2)])
def test_a_kernel_has_so_many_loops(loops: int, kernels: int) -> None:
    """All read storage 0, and storage 1 of the call in the middle nobody: only their number keeps them apart."""
    found = places({k: loop(k, {0: 64, k: 8}, {100 + k: 64}, set()) for k in range(1, loops + 1)})
    assert len(set(found.values())) == kernels


def test_a_way_may_go_back_from_the_last_loop_of_a_kernel_to_its_first() -> None:
    """10 and 100 are fused first; so 5 -> 80 -> 90 -> 100 comes before 50, which reads 10, and 5 cannot join 50."""
    loops = {
        5: loop(5, {8: 64}, {2: 64}, set()),
        10: loop(10, {7: 64, 9: 64}, {3: 64}, set()),
        50: loop(50, {3: 64, 8: 64}, {4: 64}, {10}),
        80: loop(80, {2: 64}, {5: 64}, {5}, space=None),
        90: loop(90, {5: 64}, {6: 64}, {80}, space=None),
        100: loop(100, {6: 64, 7: 64, 9: 64}, {11: 64}, {90}),
    }
    found = places(loops)
    assert found[5] < found[80] < found[90] <= found[100]


def test_readers_look_up_what_they_read_by_index_themselves() -> None:
    """Interpolation: differences of pixels that are looked up, none of which is written."""

    def function(x: torch.Tensor, at: torch.Tensor) -> object:
        one, other = (torch.ops.aten._unsafe_index(x, [None, i]) for i in (at, at + 1))
        return ((other - one) @ x,)

    x, at = torch.randn(8, 8), torch.arange(8) % 7
    assert sorted(alive(function, x, at)) == ["mm", "sub"]
    assert lower_alone(function, x, at).code.count("empty_strided_cpu(") == 2


def test_a_sum_over_a_number_has_no_dimensions() -> None:
    assert "sum_1" in alive(lambda x, w: (x @ w).sum().sum(0) * x, torch.randn(8, 8), torch.randn(8, 8))


def test_loops_over_other_elements_stay_apart() -> None:
    loops = {
        10: loop(10, {1: 64}, {2: 64}, set()),
        30: loop(30, {1: 64}, {4: 64}, set(), space=Space(32, 32, reduces=False, on_cpu=True)),
    }
    assert places(loops) == {10: 10, 30: 30}


def test_three_loops_become_one_only_as_far_as_nothing_comes_between() -> None:
    """10 and 12 are fused first (most bytes); 30 reads what a call makes of 12, so it cannot join 10 either."""
    loops = {
        10: loop(10, {1: 64, 9: 64}, {2: 64}, set()),
        12: loop(12, {1: 64, 9: 64}, {3: 64}, set()),
        20: loop(20, {3: 64}, {5: 64}, {12}, space=None),
        30: loop(30, {1: 64, 5: 64}, {6: 64}, {20}),
    }
    assert places(loops) == {10: 12, 12: 12, 20: 20, 30: 30}


def alive(
    function: Callable[..., object], *args: torch.Tensor, again: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """The predicted buffers of a graph: name -> the nodes at which they are written and read last.

    `again`: names of nodes that count as computed again by our choice.
    """
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    nodes = list(graph.nodes)
    for node in nodes:
        node.meta |= {RECOMPUTED: True} if node.name in again else {}
    found = buffers(Kernels(graph))
    names = {storage_of(n): n.name for n in reversed(nodes) if n.op == "call_function"}
    return {
        names[key]: (nodes[first].name, nodes[found.last[key]].name)
        for key, first in found.first.items()
        if key in names
    }


def test_a_sum_of_two_reads_is_computed_by_each_reader() -> None:
    """`add` reads two buffers, which Inductor would rather do twice than write it; four more and it is written."""

    def residual(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> object:
        stream = x @ w - y
        return stream.sin() @ w, stream.cos() @ w

    def sum_of_six(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> object:
        stream = x - y - w - x.t() - y.t() - w.t() - x @ w - y @ w - w @ w
        return stream.sin() @ w, stream.cos() @ w

    squares = [torch.randn(8, 8) for _ in range(3)]
    assert sorted(alive(residual, *squares)) == ["cos", "mm", "mm_1", "mm_2", "sin"]
    assert "sub_7" in alive(sum_of_six, *squares)


def test_a_matmul_moves_to_the_addition_that_it_does() -> None:
    """`mm` is part of an addmm where `add` stands; its operands live until then."""

    def late(x: torch.Tensor, w: torch.Tensor) -> object:
        left = x.sin()
        product = left @ w
        other = ((w.cos() @ w).sin() @ w).exp()
        return product + other

    found = alive(late, torch.randn(8, 8), torch.randn(8, 8))
    assert "mm" not in found
    assert found["sin"][1] == "add"


def test_of_two_products_the_second_moves_to_their_addition() -> None:
    """And no other, as Inductor has it: the first is there from its own place on."""

    def both(x: torch.Tensor, w: torch.Tensor) -> object:
        first, second = x.sin() @ w, x.cos() @ w
        return (first + second,)

    args = torch.randn(8, 8), torch.randn(8, 8)
    calls = [n.node.origin_node.name for n in lower_alone(both, *args).kernels if n.is_extern()]
    assert calls == ["mm", "addmm_default"]
    found = alive(both, *args)
    assert (found["sin"][1], found["cos"][1]) == ("mm", "add")
    assert "mm_1" not in found


def test_a_release_is_behind_every_reader_of_the_graph() -> None:
    """`cos` is fused with `sin` and runs before mm_1, but the graph has it last, and no release may stand before it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        product = x @ w
        used = (product.sin() @ w).exp() @ w
        return used, product.cos() @ w

    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8)).graph
    nodes = list(graph.nodes)
    found = buffers(Kernels(graph))
    key = storage_of(next(n for n in nodes if n.name == "mm"))
    assert key is not None
    assert (nodes[found.last[key]].name, nodes[found.read_last[key]].name) == ("sin", "cos")


def test_a_release_is_behind_a_reader_that_computes_the_tensor_itself() -> None:
    """The loop that reads the returned numbers computes them once more. The graph reads them all the same."""

    def function(x: torch.Tensor) -> object:
        numbers = torch.ops.prims.iota(8, start=0, step=1, dtype=torch.int64, device="cpu", requires_grad=False)
        return numbers, x @ x * numbers

    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 8)).graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    (iota,) = (node for node in graph.nodes if node.name == "iota")
    assert buffers(Kernels(graph)).last[storage_of(iota) or 0] == position[iota]
    (mul,) = (node for node in graph.nodes if node.name == "mul")
    assert last_read(iota, position) == position[mul]


def fused_reader(saved: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """mm -> sin -> mm -> exp -> mm; cos, which the graph reads last, is computed with sin, and reads `saved` there."""
    product = x @ w
    used = (product.sin() @ w).exp() @ w
    return used, (product.cos() * saved) @ w


def first_reader(function: Callable[..., object]) -> str:
    """The name of the node at which the first argument is read first."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.randn(8, 8) for _ in range(3))).graph
    nodes = list(graph.nodes)
    key = storage_of(nodes[0])
    assert key is not None
    return str(nodes[buffers(Kernels(graph)).read_first[key]].name)


def test_a_tensor_is_read_where_its_reader_is_fused_into() -> None:
    assert first_reader(fused_reader) == "sin"


def test_what_several_kernels_compute_again_is_read_by_the_first() -> None:
    """`add` is in the kernels of both sin and cos, and its operand is read by the one that runs first."""

    def function(saved: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
        product = x @ w
        early = product.tanh() @ w
        stream = saved - 1
        late = (stream * early).sum() * (early @ w @ w)
        return late, (product * stream) @ w

    assert first_reader(function) == "tanh"


def test_a_kernel_that_runs_before_its_reader_is_not_at_its_place() -> None:
    """sin, cos of one buffer are a kernel before mm_1: mm is gone where mm_1 is made."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        product = x @ w
        used = (product.sin() @ w).exp() @ w
        return used, product.cos() @ w

    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8)).graph
    found, nodes = buffers(Kernels(graph)), list(graph.nodes)
    curve = found.alive([key for key, first in found.first.items() if nodes[first].op != "placeholder"], len(nodes))
    of = dict(zip([n.name for n in nodes], curve, strict=True))
    assert (of["mm"], of["sin"], of["mm_1"]) == (256, 768, 768)


def test_all_loops_between_two_calls_have_their_buffers_together() -> None:
    """mm -> sum; cos -> mm: the sum and the cosine are one C++ function, which has the first mm until its end."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        return (x @ w).sum(0), w.cos() @ w

    graph = make_fx(function, tracing_mode="fake")(ROWS, SQUARE).graph
    found, nodes = buffers(Kernels(graph)), list(graph.nodes)
    at = {n.name: i for i, n in enumerate(nodes)}
    key = storage_of(nodes[at["mm"]])
    assert key is not None
    curve, nbytes = found.alive([key], len(nodes)), 64 * 32 * 4
    assert [curve[at[name]] for name in ("mm", "sum_1", "cos", "mm_1")] == [nbytes, nbytes, nbytes, 0]
    calls = [
        line for line in lower_alone(function, ROWS, SQUARE).code.splitlines() if line.strip().startswith("cpp_fused")
    ]
    assert len([line for line in calls if "(" in line and "=" not in line]) == 1


def test_what_a_call_reads_through_a_view_is_computed_by_its_earlier_readers_too() -> None:
    """mm -> add -> (sum, view -> mm): Inductor writes the addition when it comes to the second product. The sum, to
    which it comes before, adds by itself, and reads the first product."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        y = x @ w + 1
        return y.sum(0), y.view(32, 64) @ x

    kernels = Kernels(make_fx(function, tracing_mode="fake")(ROWS, SQUARE).graph)
    names = [n.name for n in kernels.nodes]
    assert {names[i]: {names[r] for r in early} for i, early in kernels.early.items()} == {"add": {"sum_1"}}
    assert not kernels.reads[names.index("sum_1")]
    assert kernels.inside[names.index("add")] == {names.index("add"), names.index("sum_1")}
    parts = [part for node in lower_alone(function, ROWS, SQUARE).kernels for part in node.get_nodes()]
    reads = [{dep.name for dep in part.read_writes.reads} for part in parts if part.is_reduction()]
    assert reads == [{"buf0"}]


def test_a_node_of_ours_between_two_loops_makes_two_functions_of_them() -> None:
    """mm -> sum [store] cos -> mm: with the store the first product is gone before the cosine is there."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        return (x @ w).sum(0), w.cos() @ w

    graph = make_fx(function, tracing_mode="fake")(ROWS, SQUARE).graph
    found, nodes = buffers(Kernels(graph)), list(graph.nodes)
    at = {n.name: i for i, n in enumerate(nodes)}
    functions = {(at["sum_1"], at["cos"])}
    assert set(found.functions.values()) == functions == set(found.cut([at["sum_1"], at["mm_1"]]).functions.values())
    cut = found.cut([at["cos"]])
    assert cut.functions == {at[name]: (at[name], at[name]) for name in ("sum_1", "cos")}
    key = storage_of(nodes[at["mm"]])
    assert key is not None
    assert [cut.alive([key], len(nodes))[at[name]] for name in ("sum_1", "cos")] == [64 * 32 * 4, 0]


def test_operators_on_complex_numbers_are_calls_and_so_are_their_views() -> None:
    """sin -> view_as_complex -> mul -> add -> view_as_real -> cos: mul would be computed within add, and all of them in
    one C++ function, if the numbers were real."""

    def function(x: torch.Tensor, w: torch.Tensor) -> object:
        z = torch.view_as_complex(x.sin())
        return torch.view_as_real(z * 2 + z).cos() @ w

    given = torch.randn(8, 32, 2), torch.randn(2, 32)
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    kernels, at = Kernels(graph), {n.name: i for i, n in enumerate(graph.nodes)}
    assert {at["mul"], at["add"]} <= kernels.calls
    assert kernels.functions() == {at[name]: (at[name], at[name]) for name in ("sin", "cos")}
    assert {"mul": ("mul", "add"), "add": ("add", "cos")}.items() <= alive(function, *given).items()
    code = lower_alone(lambda x, w: (function(x, w),), *given).code
    calls = ("cpp_fused_0(x", "view_as_complex.default(", "mul.Tensor(", "add.Tensor(", "cpp_fused_1(buf")
    places = [code.index(call) for call in calls]
    assert places == sorted(places)


@pytest.mark.parametrize("reshaped", [True, False])
def test_an_image_that_a_view_reshapes_is_contiguous_and_others_have_their_channels_last(reshaped: bool) -> None:
    """convolution_backward -> mul -> sum: the gradient has its channels last, since the weight was turned behind
    tracing. A view makes the product contiguous, so it is not written over the gradient. This is the backward of a
    group norm behind a convolution."""

    def function(dy: torch.Tensor, image: torch.Tensor, weight: torch.Tensor) -> object:
        rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        gradient = torch.ops.aten.convolution_backward(dy, image, weight, None, *rest)[0]
        product = gradient * image.sigmoid()
        total = product.view(2, 8, 16).sum(2) if reshaped else product.sum((2, 3))
        return total, (product * 2).sum(0)

    images, weight = [torch.randn(2, 8, 4, 4) for _ in range(2)], torch.randn(8, 8, 3, 3)
    traced = make_fx(function, tracing_mode="fake")(*images, weight)
    turned = weight.to(memory_format=torch.channels_last)
    assert overwriting(traced.graph) == {"mul": "getitem"}
    next(n for n in traced.graph.nodes if n.name.startswith("weight")).meta["val"] = turned
    assert overwriting(traced.graph) == ({} if reshaped else {"mul": "getitem"})


def test_what_a_convolution_of_single_channels_reads_is_contiguous_and_other_images_are_not() -> None:
    """mul -> convolution_backward of one channel a group -> mul: neither product is written over an image with another
    order, nor is the copy that the convolution reads. The last two images have their channels last."""

    def function(a: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, point: torch.Tensor) -> object:
        rest, mask = ([1, 1], [0, 0], [1, 1], False, [0, 0]), [True, True, False]
        grad = torch.ops.aten.convolution_backward(a.sin(), a.cos(), point, None, *rest, 1, mask)[0]
        copy = image.clone(memory_format=torch.contiguous_format)
        padded = (rest[0], [1, 1], *rest[2:])
        found = torch.ops.aten.convolution_backward(grad * 2, copy, weight, None, *padded, 8, mask)[0]
        return torch.ops.aten.convolution_backward((found * 2) * 3, a.exp(), point, None, *rest, 1, mask)[1:2]

    images, weight = [torch.randn(2, 8, 4, 4) for _ in range(2)], torch.randn(8, 1, 3, 3)
    traced = make_fx(function, tracing_mode="fake")(*images, weight, torch.randn(8, 8, 1, 1))
    (copy,) = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    copy.meta[CONTIGUOUS] = True
    assert overwriting(traced.graph) == {}
