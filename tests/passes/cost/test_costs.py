"""Predicted times: what each kind of node costs, and which kernel it is in."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._prims import rng_prims
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ssd_fx.passes.cost import roofline
from ssd_fx.passes.cost.kernels import Kernels
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.operators import addmm
from ssd_fx.passes.cost.roofline import Traffic, traffic

aten = torch.ops.aten
# 1 byte is 1 ns, 1 flop is 1 ps.
MACHINE = Machine(flops=1e12, memory_bw=1e9, write_bw=1e9, read_bw=1e9)
KIB = 1024


def graph_of(function: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Graph:
    with FakeTensorMode() as mode:
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
    with mode:
        graph: fx.Graph = make_fx(function, tracing_mode="real")(*inputs).graph
    return graph


def moved(graph: fx.Graph) -> dict[str, tuple[int, int, int]]:
    return {n.name: (t.read, t.written, t.first) for n, t in traffic(Kernels(graph)).items()}


def times_ns(graph: fx.Graph, machine: Machine = MACHINE) -> dict[str, float]:
    found = traffic(Kernels(graph))
    return {n.name: round(1e9 * roofline.seconds(n, t, machine), 3) for n, t in found.items()}


def test_a_chain_is_one_kernel_that_reads_its_inputs_and_writes_its_end() -> None:
    """sin -> mul with y -> cos: x and y are read once, the two intermediates are never in memory."""
    graph = graph_of(lambda x, y: (x.sin() * y * x).cos(), (256,), (256,))
    assert moved(graph) == {
        "sin": (KIB, 0, True),
        "mul": (KIB, 0, False),
        "mul_1": (0, 0, False),
        "cos": (0, KIB, False),
    }


def test_an_extern_cuts_the_chain() -> None:
    """relu -> mm -> relu_1, which reads relu once more: two kernels beside the mm."""
    graph = graph_of(lambda x: (x.relu() @ x).relu() + x.relu(), (16, 16))
    found = moved(graph)
    assert found["relu"] == (KIB, KIB, True)
    assert found["mm"] == (2 * KIB, KIB, True)
    assert found["relu_1"] == (KIB, 0, True)


def test_what_is_saved_is_written_though_its_kernel_goes_on() -> None:
    graph = graph_of(lambda x: ((y := x.sin()), y.cos()), (256,))
    assert moved(graph) == {"sin": (KIB, KIB, True), "cos": (0, KIB, False)}


def test_views_and_constants_cost_nothing() -> None:
    graph = graph_of(lambda x: x.view(4, 64).t() * torch.full((64, 4), 2.0), (256,))
    assert moved(graph)["mul"] == (KIB, KIB, True)
    assert "view" not in moved(graph)
    assert moved(graph)["full"] == (0, 0, False)


def test_a_broadcast_input_is_read_as_large_as_it_is() -> None:
    graph = graph_of(lambda x, b: x * b.expand(256, 4), (256, 4), (1, 4))
    assert moved(graph)["mul"] == (4 * KIB + 16, 4 * KIB, True)


def test_a_sum_reads_what_its_loop_computes_from_registers() -> None:
    graph = graph_of(lambda x: x.sin().sum(), (256,))
    assert moved(graph) == {"sin": (KIB, 0, True), "sum_1": (0, 4, False)}


def test_what_two_kernels_compute_is_read_and_priced_twice() -> None:
    """mm -> neg -> sin -> mm; neg -> mul -> sum: neg is cheap, so each loop computes it, from the mm in memory."""
    graph = graph_of(lambda x: ((y := -(x @ x)).sin() @ x, (y * y).sum()), (16, 16))
    found = {n.name: t for n, t in traffic(Kernels(graph)).items()}
    assert (found["neg"].read, found["neg"].times) == (2 * KIB, 2)


def test_an_embedding_reads_the_rows_that_it_takes() -> None:
    def look_up(weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(torch.arange(2), weight)

    assert moved(graph_of(look_up, (256, 4)))["embedding"][:2] == (32, 32)


def test_a_product_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    graph = graph_of(lambda a, b: a @ b, (8, 8), (8, 8))
    assert times_ns(graph) == {"mm": 3 * 256}  # 1,024 flops are 1 ns
    assert times_ns(graph, MACHINE.with_rates({"flops": 1e9})) == {"mm": 1024}


def test_rates_per_dtype() -> None:
    machine = MACHINE.with_rates({"flops": 1e6, "flops_by_dtype": {"bfloat16": 1e9}})
    graph = graph_of(lambda a, b: a @ b, (8, 8), (8, 8), dtype=torch.bfloat16)
    assert times_ns(graph, machine) == {"mm": 1024}
    graph = graph_of(lambda a, b: a @ b, (8, 8), (8, 8))
    assert times_ns(graph, machine) == {"mm": 1024e3}


def test_a_bias_is_copied_before_the_product() -> None:
    graph = graph_of(lambda c, a, b: torch.addmm(c, a, b), (8,), (8, 8), (8, 8))
    assert times_ns(graph) == {"addmm": 3 * 256 + 32 + 256}


def test_special_functions_and_fixed_costs() -> None:
    machine = MACHINE.with_rates({"memory_bw": 1e30, "erf_s": 1e-9, "kernel_s": 5e-6})
    assert times_ns(graph_of(lambda x: x.erf().tanh(), (256,)), machine) == {"erf": 5256, "tanh": 128}


def attention(causal: bool, length: int = 2048) -> fx.Graph:
    op = aten._scaled_dot_product_flash_attention_for_cpu

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = op(q, k, v, 0.0, causal)[0]
        return out

    return graph_of(call, *3 * ((1, 2, length, 64),))


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.625)])
def test_attention_has_flops_of_its_own_and_skips_blocks(causal: bool, share: float) -> None:
    """Two products of 2 heads x 2048 x 2048 x 64; causal ones skip whole blocks of 512 keys."""
    machine = MACHINE.with_rates({"memory_bw": 1e30, "attention_flops": {"float32": 4e9}})
    ns = times_ns(attention(causal), machine)["_scaled_dot_product_flash_attention_for_cpu"]
    assert ns == share * 4 * 2 * 2048 * 2048 * 64 / 4


def symbolic(*shape: object) -> torch.Tensor:
    """A tensor whose first size is a symbol of the size "dynamic", or depends on data ("unbacked")."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        if shape[0] == "unbacked":
            return torch.empty(env.create_unbacked_symint(), *shape[1:])
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return mode.from_tensor(torch.zeros(*shape), symbolic_context=sizes)


def called(target: Any, result: object, *args: object) -> fx.Node:
    """A node that calls `target` of placeholders where the arguments are tensors."""
    graph = fx.Graph()
    given = [graph.placeholder(f"given_{i}") if isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args)]
    for node, value in zip(given, args, strict=True):
        if isinstance(node, fx.Node):
            node.meta["val"] = value
    made = graph.call_function(target, tuple(given))
    made.meta["val"] = result
    return made


def test_to_count_flops_asks_nothing_about_sizes() -> None:
    """PyTorch's formula for sequences of unlike lengths repeats a list as often as there are sequences: a guard."""
    offsets, rows = symbolic(5), torch.empty(40, 2, 64, device="meta")
    flash = aten._flash_attention_forward.default
    node = called(flash, (rows,), rows, rows, rows, offsets, offsets, 16, 16, 0.0, False, False)
    assert roofline._flops(node) == 4 * 4 * 2 * 16 * 16 * 64
    assert not offsets.shape[0].node.shape_env.guards  # type: ignore[attr-defined]


def test_a_sum_of_unknown_length_is_merged_into_no_product() -> None:
    rows, row = symbolic("unbacked", 64), torch.empty(1, 64, device="meta")
    product = called(aten.mm.default, rows, rows, torch.empty(64, 64, device="meta"))
    added = product.graph.placeholder("row")
    added.meta["val"] = row
    total = product.graph.call_function(aten.add.Tensor, (product, added))
    total.meta["val"] = rows
    assert addmm(total, False) is None


def test_attention_over_short_rows_runs_at_a_lower_rate() -> None:
    """Four times the pairs take less than four times as long."""
    machine = MACHINE.with_rates({"memory_bw": 1e30, "attention_flops": {"float32": 4e9}})
    short, calibrated = (
        times_ns(attention(False, length), machine)["_scaled_dot_product_flash_attention_for_cpu"]
        for length in (512, 1024)
    )
    assert calibrated == 4 * 2 * 1024 * 1024 * 64 / 4
    assert 0.8 < calibrated / (4 * short) < 0.9


@pytest.mark.parametrize("wrapper", ["run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"])
def test_attention_costs_as_much_where_a_checkpoint_wraps_it(wrapper: str) -> None:
    """PyTorch saves or sets the generator's state around what may draw. Such a node has no value of its own."""
    graph = attention(causal=True)
    (node,) = graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default)
    expected = times_ns(graph)[node.name]
    given: tuple[Any, ...] = (node.target, *node.args)
    kwargs: dict[str, Any] = {}
    if wrapper == "run_with_rng_state":
        given = (torch.get_rng_state(), *given)
    if wrapper == "graphsafe_run_with_rng_state":
        kwargs = {"rng_state": None}
    with graph.inserting_before(node):
        wrapped = graph.call_function(getattr(rng_prims, wrapper), given, kwargs)
        saved = wrapper == "run_and_save_rng_state"
        results = graph.call_function(operator.getitem, (wrapped, 1)) if saved else wrapped
    node.replace_all_uses_with(results)
    graph.erase_node(node)
    assert times_ns(graph)[wrapped.name] == pytest.approx(expected, rel=1e-3), "all but the sums of its rows"


@pytest.mark.parametrize(("size", "tflops"), [(32, 4.0), (64, 4.0), (96, 5.0), (128, 6.0), (256, 6.0)])
def test_attention_has_a_rate_for_the_size_of_its_heads(size: int, tflops: float) -> None:
    """Between the two that were measured in proportion, beyond them as at the nearer one."""
    rates = {"attention_flops": {"bfloat16": 4e12}, "wide_attention_flops": {"bfloat16": 6e12}}
    assert MACHINE.with_rates(rates).fused_attention_flops(torch.bfloat16, size, backward=False) == tflops * 1e12
    narrow = MACHINE.with_rates({"attention_flops": {"bfloat16": 4e12}})
    assert narrow.fused_attention_flops(torch.bfloat16, size, backward=False) == 4e12


def test_an_operator_that_is_only_called_attention_is_priced_like_any_other() -> None:
    """Its arguments may have any names, and there may be any number of them."""

    @torch.library.custom_op("ssd_fx_costs::my_flash_attention", mutates_args=())
    def my_flash_attention(q: torch.Tensor) -> torch.Tensor:
        return q.softmax(-1)

    my_flash_attention.register_fake(torch.empty_like)
    assert times_ns(graph_of(my_flash_attention, (8, 8))) == {"my_flash_attention": 2 * 256}


def test_a_node_of_no_kernel_has_no_time() -> None:
    node = next(iter(graph_of(lambda x: x.sin(), (4,)).find_nodes(op="call_function", target=aten.sin.default)))
    assert roofline.seconds(node, Traffic(), MACHINE) == 0.0


def test_a_machine_rounds_and_goes_through_json() -> None:
    machine = MACHINE.with_rates({"write_bw": 1.23456e9, "flops_by_dtype": {"float32": 1.9999e11}}).rounded()
    assert (machine.write_bw, machine.flops_by_dtype) == (1.23e9, (("float32", 2e11),))
    assert MACHINE.with_rates(machine.rates()) == machine
    assert hash(machine) == hash(MACHINE.with_rates(machine.rates()))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"flop": 1.0}, "a machine has no 'flop'; right would be any of flops, memory_bw"),
        ({"flops": 0}, "flops=0 is no rate; right would be a number > 0"),
        ({"latency_s": -1}, "latency_s=-1 is no rate; right would be a number >= 0"),
        ({"write_bw": "6 GB/s"}, "write_bw='6 GB/s' is no rate"),
        ({"write_bw": True}, "write_bw=True is no rate"),
        ({"read_bw": float("nan")}, "read_bw=nan is no rate"),
        ({"flops_by_dtype": {"bf16": 1.0}}, "has no rates per dtype; right would be e.g. {'bfloat16'"),
        ({"flops_by_dtype": {"bfloat16": 0}}, r"flops_by_dtype\[bfloat16\]=0 is no rate"),
    ],
)
def test_what_is_no_rate(rates: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MACHINE.with_rates(rates)
