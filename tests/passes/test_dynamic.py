"""Symbolic sizes: one compilation for several lengths, offloaded like any other."""

from __future__ import annotations

import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F

import ssd_fx
from ssd_fx.passes.decide import decide
from tests.bitwise import Compile, assert_same_bits, kept, ours, prove_bitwise, run
from tests.passes import toys
from tests.passes.recomputing import SLOW, everything_recomputed
from tests.passes.rewrite.test_insert import nodes_of
from tests.unlike import DYNAMIC_STAYS, OTHER_NAMES

LENGTHS = (7, 12, 31, 5)


class Block(nn.Module):
    """Attention over heads that are chunks of one qkv, and an MLP: views, slices and items of tuples, all symbolic."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(x)))


OPTIONS = {"engine": "memory", "min_bytes": 0, "budget": 0}


def trained(compile: Compile) -> list[torch.Tensor]:
    block = Block()
    compiled, found = compile(block, dynamic=True), []
    for length in LENGTHS:
        block.zero_grad()
        x = torch.randn(2, length, 16, requires_grad=True)
        compiled(x).square().sum().backward()
        found += [t.grad.clone() for t in (x, *block.parameters()) if t.grad is not None]
    return found


@DYNAMIC_STAYS
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_several_lengths_and_one_graph(inner: str) -> None:
    options = OPTIONS | {"inner": inner}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ssd_fx keeps", RuntimeWarning)
        prove_bitwise(trained, [ours(options, budget=1.0), ours(options)])
    stats = ssd_fx.stats()
    assert len(stats.graphs) == 1
    assert (stats.steps, stats.loads) == (len(LENGTHS), stats.stores)
    assert stats.saved_bytes == stats.offloaded_bytes  # counted at the length of each call, not at that of the first
    assert stats.written_bytes + stats.held_bytes == stats.offloaded_bytes
    assert stats.read_bytes + stats.forwarded_bytes == stats.offloaded_bytes


@DYNAMIC_STAYS
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_computed_again_at_every_length(inner: str) -> None:
    options = OPTIONS | {"inner": inner}
    with everything_recomputed() as groups:
        recomputed = run(trained, ours(options, recompute=True, machine=SLOW))
    assert len(set(groups)) == 1  # three of them, and four under Inductor of torch 2.15
    assert groups[0] >= 3
    assert len(ssd_fx.stats().graphs) == 1
    kept = run(trained, ours(options, budget=1.0))
    if inner == "aot_eager":
        assert_same_bits(recomputed, kept)
    else:  # other kernels
        torch.testing.assert_close(recomputed, kept)


def normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rows are symbolic; layer_norm yields a tuple."""
    return (F.layer_norm(x @ w, (8,)).sigmoid() @ w).sum()


def test_what_comes_of_a_tuple_may_be_computed_again_where_sizes_are_symbolic() -> None:
    """A size is an input without a storage, as a tuple is, and never changes."""
    x, w = toys.inputs()
    torch._dynamo.mark_dynamic(x, 0)
    priced = []
    for args in (toys.inputs(), (x, w)):
        partition = toys.partitioned(normalised, *args)
        plan = decide(partition, toys.options(), priced=True)
        priced.append(sorted(group.base for group in plan.groups if group.slot in plan.prices))
    assert priced[0] == priced[1]
    assert any(base.startswith("getitem") for base in priced[1])


def symbolic(toy: toys.Toy, dims: tuple[int, ...] = (0,)) -> toys.Planned:
    x, w = toys.inputs()
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    return toys.planned(toy, x, w)


def wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rows are symbolic; two views of one storage are saved."""
    a, b = ((x @ torch.cat([w, w], 1)).relu()).chunk(2, 1)
    return (a.sin() @ w).sum() + (b @ w).sum()


@DYNAMIC_STAYS
def test_plan() -> None:
    assert_expected_inline(
        symbolic(wide).table.strip("\n"),
        """\
cat   512 B  offload  store>cat release>t_5 load<cos wait<mm_8     [t_5]
relu  512 B  offload  store>sin release>t_5 load<expand wait<mm_3  [relu]
sin   256 B  offload  store>sin release>t_5 load<expand wait<mm_5  [t_2]""",
    )


@OTHER_NAMES
@DYNAMIC_STAYS
def test_the_forward_counts_bytes_and_the_backward_computes_sizes_from_saved_integers() -> None:
    partition = symbolic(wide).partition
    text = "\n".join(nodes_of(m.graph) for m in (partition.forward, partition.backward))
    told = ("primals_2", "begin_", "load.default", "as_strided")
    assert_expected_inline(
        "\n".join(line for line in text.split("\n") if any(t in line for t in told)),
        """\
mul = mul(96, primals_2)
begin__default = begin_.default(empty_memory_format, 136ca138, add, add)
ssd_fx_handle_2 = store.default(sin, 136ca138, 2, 1, , False, False, [8, primals_2], torch.float32)
output = output((add_24, ssd_fx_handle_1, t_1, ssd_fx_handle_2, t_4, ssd_fx_handle_0, primals_2))
load_default = load.default(ssd_fx_handle_1, [primals_2, 16], [16, 1], torch.float32, cpu, 0, False, )
load_default_1 = load.default(ssd_fx_handle_2, [primals_2, 8], [8, 1], torch.float32, cpu, 1, False, strides)
expand = expand.default(tangents_1, [primals_2, 8])
as_strided_default = as_strided.default(load_default_1, [8, primals_2], [1, 8], 0)
mm_5 = mm.default(as_strided_default, expand)
load_default_2 = load.default(ssd_fx_handle_0, [8, 16], [16, 1], torch.float32, cpu, 4, True, strides)
as_strided_default_1 = as_strided.default(load_default_2, [16, 8], [1, 16], 0)
mm_8 = mm.default(threshold_backward, as_strided_default_1)""",
    )


def test_what_cannot_leave_is_told_of() -> None:
    """Views of another dtype, under symbolic sizes: the one group stays, with a warning; the others leave without."""
    with pytest.warns(RuntimeWarning, match="ssd_fx keeps about 256 B of graph .*: shapes are dynamic"):
        planned = symbolic(toys.dtype_view)
    assert [(g.base, g.obstacle) for g in planned.plan.groups] == [("sigmoid", "dynamic shape")]


def by_data(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As many rows as there are positive elements."""
    y = (x @ w)[(x[:, 0] > 0).nonzero().squeeze(1)].sigmoid()
    return (y @ w).sum()


def test_sizes_that_depend_on_data_are_kept() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert_expected_inline(
            toys.planned(by_data).table.strip("\n"),
            """\
nonzero  0 B  keep  size depends on data: aten.nonzero.default  [squeeze]
sigmoid  0 B  keep  size depends on data: aten.nonzero.default  [sigmoid]""",
        )


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_gradient_whose_size_depends_on_data(inner: str) -> None:
    """Nothing is asked about the size of a row of chosen elements while the step is compiled."""

    options = OPTIONS | {"inner": inner}

    def gradient(compile: Compile) -> list[torch.Tensor | None]:
        x = torch.randn(64, requires_grad=True)
        compile(lambda x, chosen: (x.sin() * 2).exp()[chosen])(x, torch.rand(64) > 0.5).square().sum().backward()
        return [x.grad]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        prove_bitwise(gradient, [kept(options), ours(options)])
