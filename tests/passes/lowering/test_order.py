"""The kernels run in the planned order, with Inductor's reorder for memory on, and no fusion is lost for it."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor import config
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode

from examples.train_gpt import GPT, Shape
from ssd_fx.passes.lowering import order
from ssd_fx.passes.lowering.inductor import LOWERINGS, AuditedKernel
from tests.communicating import exchange
from tests.models import batch
from tests.passes import toys
from tests.passes.lowered import Lowered, lower, lower_alone

ops = torch.ops.ssd_fx
SHOWN = {"store": ("slot", "seq"), "wait_store_": ("hand_over", "block"), "load": ("seq",), "wait_load_": ("seq",)}


def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """repeat -> mm -> sigmoid -> sum; mm -> sin -> mm; a greedy order for memory takes the small branch first."""
    wide = (x.repeat(4, 1) @ w).sigmoid().sum(0)
    narrow = (x @ w).sin()
    return (narrow @ w + wide).exp().sum()


def text(lowered: Lowered) -> str:
    """One kernel a line: the FX nodes that it computes last, or our operator with its number."""
    return "\n".join(_line(n) for n in lowered.nodes if not _is_item(n))


def _line(node: BaseSchedulerNode) -> str:
    if order.is_ours(node):
        assert node.node is not None
        name = str(node.node.op_overload._opname)
        shown = (order.argument(node.node, argument) for argument in SHOWN.get(name, ()))
        return " ".join([name, *map(str, shown)])
    origins = {o.name for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()}
    kind = "nop" if isinstance(node, NopKernelSchedulerNode) else "extern" if node.is_extern() else "loops"
    return f"{kind} {', '.join(sorted(origins))}"


def _is_item(node: BaseSchedulerNode) -> bool:
    return type(node.node).__name__ == "MultiOutput"


@pytest.mark.parametrize("toy", [branches, toys.shared_view, toys.multi_output], ids=lambda t: t.__name__)
def test_the_schedule_is_the_planned_order(toy: toys.Toy) -> None:
    planned: list[list[str]] = []

    def spy(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        nodes = real(nodes)
        planned.append([n.get_name() for n in nodes])
        return nodes

    real = order.planned_order
    with mock.patch.object(order, "planned_order", spy):
        lowered = lower(toy, *toys.inputs(), options={})
    assert [[n.get_name() for n in graph.nodes] for graph in lowered] == planned


def names(nodes: list[BaseSchedulerNode]) -> list[str]:
    return [n.get_name() for n in nodes]


def test_a_pass_of_the_user_without_an_identity_has_a_new_one_each_time() -> None:
    """`uuid` may return None: what was compiled with another such pass is not this one's."""

    class Nameless:
        def uuid(self) -> None: ...

    class Named:
        def uuid(self) -> str:
            return "v2"

    def plain(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return nodes

    for before in (Nameless(), plain):
        made = order.PinOrder("v1", before)
        assert made.uuid() != made.uuid()
    assert order.PinOrder("v1", Named()).uuid() == "v1v2"
    assert order.PinOrder("v1").uuid() == "v1"


def test_without_the_pins_inductor_chooses_another_order() -> None:
    """The reorder is on and would move kernels: what the test above sees is the pins' work."""
    planned: list[list[str]] = []

    def unpinned(self: order.PinOrder, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        planned.append(names(order.planned_order(nodes)))
        return order.planned_order(nodes)

    with mock.patch.object(order.PinOrder, "__call__", unpinned), mock.patch("ssd_fx.passes.lowering.audit.attach"):
        lowered = lower(branches, *toys.inputs(64), options={})
    assert [names(graph.nodes) for graph in lowered] != planned


def split_reader(handle: torch.Tensor, g: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> object:
    """Inductor would fuse what reads `first` with `early`, split its loops for that, and forget that it needs the
    wait."""
    float32, cpu = torch.float32, torch.device("cpu")
    first = ops.load(handle, [128, 64], [64, 1], float32, cpu, 0)
    early = g.view(128, 64) * bias + 1
    used = (early @ w).sin() @ w
    second = ops.load(handle, [128, 64], [64, 1], float32, cpu, 1)
    ops.wait_load_(first, handle, 2)
    late = first * g.view(128, 64) * 2
    ops.wait_load_(second, handle, 3)
    return used, late, early.sum(0), second @ w


def test_a_kernel_that_was_split_to_be_fused_runs_behind_its_wait() -> None:
    """And the load before that wait comes along: the order among ours stays the planned one."""
    inputs = torch.empty((), dtype=torch.int64), torch.randn(8192), torch.randn(64, 64), torch.randn(64)
    with mock.patch.object(order, "_keep_apart"):
        lowered = lower_alone(split_reader, *inputs)
    assert_expected_inline(
        text(lowered),
        """\
load 0
load 1
wait_load_ 2
loops add, mul, mul_1, mul_2, view, view_1
extern mm
loops sin
extern mm_1, sin
wait_load_ 3
loops sum_1
extern mm_2""",
    )


def fused_from_afar(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """sin -> mm; mm_1 -> mm_2, of what is loaded; mm_1 -> mm_3 -> mul. Inductor fuses sin with mul: both read x."""
    first = x.sin() @ w
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0)
    ops.wait_load_(loaded, handle, 1)
    chain = w @ w
    gradient = loaded @ chain
    chain = chain @ w
    return first, gradient, x.cos() * chain


def test_what_a_fused_kernel_needs_late_is_not_computed_early() -> None:
    """mm waits for mul. mm_3 does not run before mm_2 for its sake: else what mm_2 reads would live longer."""
    lowered = lower_alone(fused_from_afar, torch.empty((), dtype=torch.int64), torch.randn(64, 64), torch.randn(64, 64))
    assert_expected_inline(
        text(lowered),
        """\
load 0
wait_load_ 1
extern mm_1
extern mm_2
extern mm_3
loops cos, mul, sin
extern mm, sin""",
    )


def scattered_from_afar(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> object:
    """sin -> mm; load -> mm_1; cos -> scatter into zeros, as in the backward of a top-k. Inductor fuses sin with cos
    and scatter, and fills the zeros in a loop of its own."""
    first = x.sin() @ w
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0)
    ops.wait_load_(loaded, handle, 1)
    return first, loaded @ w, torch.full((64, 128), 0.0, dtype=torch.float32).scatter(1, at, x.cos())


def test_zeros_that_a_fused_kernel_writes_into_are_filled_ahead_of_it() -> None:
    """They need nothing. Else the kernel would wait for their place, and what is loaded meanwhile would pile up."""
    inputs = torch.empty((), dtype=torch.int64), torch.randn(64, 64), torch.randn(64, 64)
    lowered = lower_alone(scattered_from_afar, *inputs, torch.zeros(64, 64, dtype=torch.int64))
    assert_expected_inline(
        text(lowered),
        """\
loops cos, full, scatter
loops cos, full, scatter, sin
extern mm, sin
load 0
wait_load_ 1
extern mm_1""",
    )


def joined_behind_a_load(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """mm -> cos, load -> mm_1, and then a `cat` of cos and others, which Inductor has cos compute its result into."""
    part = (x @ w).cos()
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0)
    ops.wait_load_(loaded, handle, 1)
    return loaded @ w, torch.cat([part, *x.chunk(16)]) @ w


def test_what_is_computed_into_a_cat_does_not_begin_it_early() -> None:
    """The whole is in memory from its first part on. The plan has it behind the load."""
    lowered = lower_alone(joined_behind_a_load, torch.empty((), dtype=torch.int64), *(torch.randn(64, 64),) * 2)
    lines = text(lowered).splitlines()
    assert lines.index("extern mm") < lines.index("extern mm_1") < lines.index("loops cos")


def read_before_they_are_joined(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """bmm -> sigmoid -> sigmoid_1 -> bmm_2, behind a load, and two of `cat`, which the sigmoids are computed into."""
    one = torch.bmm(x, w).sigmoid()
    other = (one * torch.bmm(x + 1, w)).sigmoid()
    used = torch.bmm(other, w)
    loaded = ops.load(handle, [1, 64, 64], [4096, 64, 1], torch.float32, torch.device("cpu"), 0)
    ops.wait_load_(loaded, handle, 1)
    late = torch.bmm(loaded, w)
    return used, torch.cat([one, torch.bmm(late, w)]), torch.cat([other, late])


def test_what_reads_parts_of_a_cat_does_not_wait_for_the_cat() -> None:
    inputs = torch.empty((), dtype=torch.int64), torch.randn(1, 64, 64), torch.randn(1, 64, 64)
    lines = text(lower_alone(read_before_they_are_joined, *inputs)).splitlines()
    assert next(i for i, line in enumerate(lines) if "bmm_2" in line) < lines.index("load 0")


def needed_behind_a_load(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """sin -> mm, behind a load that mm_1 reads, and what rebuilds a tensor of it. Inductor fuses sin with cos."""
    y = x.sin()
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0)
    ops.wait_load_(loaded, handle, 1)
    rebuilt = loaded.as_strided([64, 64], [64, 1], 0)
    return y @ w, rebuilt @ w, x.cos()


def test_what_is_needed_behind_a_load_is_computed_before_it() -> None:
    """As in the plan, for which the load comes right before mm: what is loaded is not memory while the loop runs."""
    inputs = torch.empty((), dtype=torch.int64), torch.randn(64, 64), torch.randn(64, 64)
    assert_expected_inline(
        text(lower_alone(needed_behind_a_load, *inputs)),
        """\
loops cos, sin
load 0
wait_load_ 1
extern mm, sin
extern as_strided, mm_1""",
    )


def fused_over_a_load(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """sin; two loads -> add, of cos."""
    first = x.sin()
    loaded = [ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), i) for i in range(2)]
    for i, each in enumerate(loaded):
        ops.wait_load_(each, handle, 2 + i)
    return first, x.cos() + loaded[0] + loaded[1]


def fused_behind_a_wait(handle: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> object:
    """sin -> mm; load -> add, of cos. Inductor would fuse sin with add."""
    first = x.sin() @ w
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0)
    ops.wait_load_(loaded, handle, 1)
    return first, x.cos() + loaded


def test_no_library_call_waits_for_a_load_that_a_loop_before_it_does_not_need() -> None:
    """Else what all such calls read would be loaded, and stay, until that load."""
    inputs = torch.empty((), dtype=torch.int64), torch.randn(64, 64), torch.randn(64, 64)
    assert_expected_inline(
        text(lower_alone(fused_behind_a_wait, *inputs)),
        """\
loops sin
extern mm, sin
load 0
wait_load_ 1
loops add, cos""",
    )


def test_only_library_calls_keep_apart_what_is_computed_again() -> None:
    """The plan knows no places of our nodes when it predicts what is fused."""
    inputs = torch.empty((), dtype=torch.int64), torch.randn(64, 64), torch.randn(64, 64)
    assert_expected_inline(
        text(lower_alone(fused_over_a_load, *inputs, again={"sin"})),
        """\
load 0
load 1
wait_load_ 2
wait_load_ 3
loops add, add_1, cos, sin""",
    )


def late_reader(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> object:
    """mm [store] -> mul [release] -> add; Inductor computes mul where add is, so mm is read behind its release."""
    product = x @ w
    handle = ops.store(product, toys.CONFIG, "g", 0, 0)
    doubled = product * 2
    ops.wait_store_(handle, product, 1, True)
    return handle, doubled + bias


def far_reader(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> object:
    """mm [store] -> mul [release]; mm_1 -> mul_1 of both."""
    product = x @ w
    handle = ops.store(product, toys.CONFIG, "g", 0, 0)
    doubled = product * 2
    ops.wait_store_(handle, product, 1, True)
    return handle, doubled * (bias @ w)


def test_what_is_read_by_a_kernel_a_little_behind_is_handed_over_behind_it() -> None:
    lowered = lower_alone(late_reader, torch.randn(64, 64), torch.randn(64, 64), torch.randn(64))
    assert_expected_inline(
        text(lowered),
        """\
extern mm
store 0 0
loops add, mul
wait_store_ True False""",
    )


def test_no_library_call_is_moved_to_hand_over() -> None:
    """The release blocks where it is planned."""
    lowered = lower_alone(far_reader, torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 64))
    assert_expected_inline(
        text(lowered),
        """\
extern mm
store 0 0
wait_store_ False False
extern mm_1
loops mul, mul_1""",
    )


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of two batches of matrices expands what was loaded to the sizes that it has, which is no kernel."""
    heads = w.view(1, 2, 8, 4)
    return ((heads.transpose(-2, -1) @ heads * x[:4, :4]).softmax(-1) @ heads.transpose(-2, -1)).sum()


def test_an_operator_that_changes_nothing_is_not_the_load_that_it_reads() -> None:
    """Inductor has the `expand` for the origin of the load, which is then behind its own wait."""
    _, backward = lower(attention, *toys.inputs(), options={"recompute": False, "machine": "default"})
    waits = [int(seq) for seq in re.findall(r"^wait_load_ (\d+)", text(backward), re.MULTILINE)]
    assert waits == sorted(waits) != []


@pytest.mark.skipif(not hasattr(config, "fallback_by_default"), reason="this torch has no lite mode")
def test_in_lite_mode_our_operators_keep_their_lowerings() -> None:
    for graph in lower(toys.shared_view, *toys.inputs(), options={}, fallback_by_default=True):
        kernels = [n.node for n in graph.nodes if getattr(n.node, "op_overload", None) in LOWERINGS]
        assert kernels
        assert all(isinstance(kernel, AuditedKernel) for kernel in kernels)


@pytest.mark.skipif(not hasattr(config, "fallback_by_default"), reason="this torch has no lite mode")
def test_an_operator_without_its_lowering_is_an_error() -> None:
    """So it would be with nodes that another tracing made, without their annotations."""
    with config.patch(fallback_by_default=True), pytest.raises(InductorError, match="without its lowering"):
        lower_alone(late_reader, torch.randn(64, 64), torch.randn(64, 64), torch.randn(64))


def circle(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> object:
    """What is stored second is fused with a write into the first behind its release, as both read `x`."""
    product = x @ w
    first = ops.store(product, toys.CONFIG, "g", 0, 0)
    doubled = x * 2
    second = ops.store(doubled, toys.CONFIG, "g", 1, 1)
    ops.wait_store_(first, product, 2)
    torch.ops.aten.index_put_(product, [rows], x)
    ops.wait_store_(second, doubled, 3)
    return first, second, product @ w


def test_an_order_that_cannot_be_is_an_error() -> None:
    text = (
        r"VerifyError: no order .* circle: wait_store_ -> index_put_ \+ mul -> store_1( -> store_1)?; see pass 'order'"
    )
    with pytest.raises(InductorError, match=text):
        lower_alone(circle, torch.randn(8, 8), torch.randn(8, 8), torch.arange(8))


@pytest.mark.parametrize("toy", toys.ALL[:4], ids=lambda t: t.__name__)
def test_the_kernels_are_those_of_plain_inductor(toy: toys.Toy) -> None:
    ours, theirs = lower(toy, *toys.inputs(), options={}), lower(toy, *toys.inputs())
    assert [len(graph.kernels) for graph in ours] == [len(graph.kernels) for graph in theirs]
    assert "store" in text(ours[0])
    assert "load" in text(ours[1])


def sum_behind_a_wait(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Backward: mm -> [wait for the tanh] -> add. Of `v` no gradient is asked, so the first saved tensor leaves."""
    z = x @ w
    return (z.tanh() + (z @ v).sin()).sum()


def test_a_product_is_merged_with_an_addition_behind_a_wait() -> None:
    """Inductor matches no pattern across a mutation, and a wait is one, if the first input has lost its number."""
    inputs = (*toys.inputs(), torch.randn(8, 8))
    ours = {"machine": "default", "spare": False, "recompute": False}
    for options in (ours, None):
        backward = lower(sum_behind_a_wait, *inputs, options=options)[1]
        assert [backward.code.count(f"extern_kernels.{name}(") for name in ("addmm", "mm")] == [1, 2]


@pytest.mark.slow
def test_the_kernels_of_a_gpt_are_those_of_plain_inductor() -> None:
    """Two layers. As many extern calls, and no loop nest more, after fusion: the forward has 36 kernels, plain 37."""
    model = GPT(Shape(layers=2, width=64, heads=2, seq=64, dropout=0.1))
    ours, theirs = lower(model, *batch(), options={}), lower(model, *batch())
    for mine, plain in zip(ours, theirs, strict=True):
        assert sum(n.is_extern() for n in mine.kernels) == sum(n.is_extern() for n in plain.kernels)
        assert len(mine.kernels) <= len(plain.kernels)


RATES = {"flops": 1e11, "memory_bw": 2e10, "write_bw": 1e9, "read_bw": 1e9}  # typical ones are of the thread count


def test_a_kernel_that_may_go_takes_no_order_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor drops it later, with its links: what comes behind it is chained to what stays before it."""
    monkeypatch.setattr(order, "_may_be_replaced", lambda node: str(node).startswith("nop"))
    links = list(order._links(["a", "nop1", "nop2", "b", "c"]))  # type: ignore[list-item]
    assert [before for before, after in links if str(after) == "nop2"] == ["a", "nop1"]
    assert [before for before, after in links if str(after) == "b"] == ["a", "nop1", "nop2"]
    assert [before for before, after in links if str(after) == "c"] == ["b"]


def test_the_order_of_branches() -> None:
    forward, _ = lower(branches, *toys.inputs(), options={"machine": RATES})
    assert_expected_inline(
        text(forward),
        """\
nop empty_memory_format
begin_
store 0 0
loops repeat
store 2 1
extern mm
store 3 2
loops sigmoid, sum_1
extern mm_1
store 5 3
loops sin
store 6 4
store 4 5
extern mm_2
store 7 6
store 1 7
loops add, exp, sum_2
wait_store_ True True
wait_store_ True True
wait_store_ True True
wait_store_ True True
wait_store_ True True
wait_store_ True True
wait_store_ True True
wait_store_ True True""",
    )


def crossed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """sin -> exchange; cos -> exchange_1 -> mul; one loop over x computes sin and mul, if exchange_1 runs first."""
    y = w.cos()
    first = exchange(x.sin(), "first")
    second = exchange(y, "second")
    return (first.sum() + (second * x).sum()) * 2


def exchanged(options: dict[str, float] | None, **patches: object) -> list[str]:
    """The names that the forward's calls of `exchange` have, as they run."""
    inputs = torch.ones(64, 64, requires_grad=True), torch.ones(64, 64, requires_grad=True)
    forward, _ = lower(crossed, *inputs, options=options, **patches)
    assert ("store" in text(forward)) == (options is not None and options["budget"] == 0)
    kernels = [n.node for n in forward.nodes if getattr(n.node, "op_overload", None) is EXCHANGE]
    return [kernel.constant_args[-1] for kernel in kernels]  # type: ignore[union-attr]


EXCHANGE = torch.ops.ssd_fx_tests.exchange.default


@pytest.mark.parametrize("budget", [0.0, 1.0])
def test_what_may_talk_to_other_ranks_keeps_its_order(budget: float) -> None:
    """Ranks whose plans differ have different stores, fuse differently, and wait for each other in exchange."""
    assert exchanged(None) == ["second", "first"]  # Inductor alone turns them round, on all ranks alike
    assert exchanged({"budget": budget}) == ["first", "second"]


def test_the_users_pass_at_that_place_runs_too() -> None:
    seen: list[int] = []

    def own(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        seen.append(len(nodes))
        return nodes

    assert exchanged({"budget": 0.0}, _pre_fusion_custom_pass=own) == ["first", "second"]
    assert len(seen) == 2  # forward and backward
