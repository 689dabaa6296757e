"""Our nodes cut no C++ function that they need not cut, and dependencies, order and peak stay what they were."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from unittest import mock

import networkx as nx
import pytest
import torch
from expecttest import assert_expected_inline

from ssd_fx.passes.lowering import cpp_functions, order
from tests.passes import toys
from tests.passes.lowered import Lowered, lower, lower_alone
from tests.passes.lowering.test_order import text

ops = torch.ops.ssd_fx
HANDLE = torch.empty((), dtype=torch.int64)
SQUARE = torch.randn(64, 64)


def three_loops(handle: torch.Tensor, w: torch.Tensor, y: torch.Tensor, wide: torch.Tensor) -> object:
    """mm -> cos [wait] -> mul [store] -> sin -> mm -> mm, which makes the most. Loops of such sizes are not fused."""
    loaded = ops.load(handle, [32, 32], [32, 1], torch.float32, torch.device("cpu"), 0)
    product = w @ w
    first = y.cos()
    ops.wait_load_(loaded, handle, 1)
    second = loaded * 2
    stored = ops.store(second, toys.CONFIG, "g", 0, 2)
    third = product @ w.sin() @ wide
    ops.wait_store_(stored, second, 3, True)
    return stored, third, first


def test_three_functions_become_one() -> None:
    lowered = lower_alone(three_loops, HANDLE, SQUARE, torch.randn(48, 48), torch.randn(64, 512))
    assert_expected_inline(
        text(lowered),
        """\
load 0
extern mm
wait_load_ 1
loops cos
loops mul
loops sin
store 0 2
extern mm_1, sin
extern mm_2
wait_store_ True False""",
    )
    assert functions(lowered) == 1


def store_before_a_wait(handle: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> object:
    """mm -> mul [store] -> cos [wait] -> neg -> mm: the store is behind mul, and the wait behind the store."""
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0)
    first = (w @ w).mul(2)
    stored = ops.store(first, toys.CONFIG, "g", 0, 1)
    second = y.cos()
    ops.wait_load_(loaded, handle, 2)
    third = loaded.neg().T @ w
    ops.wait_store_(stored, first, 3, True)
    return stored, third, second


def test_what_must_cut_cuts_once() -> None:
    lowered = lower_alone(store_before_a_wait, HANDLE, SQUARE, torch.randn(48, 48))
    assert_expected_inline(
        text(lowered),
        """\
load 0
extern mm
loops mul
loops cos
store 0 1
wait_load_ 2
loops neg
extern mm_1, neg, permute
wait_store_ True False""",
    )
    assert functions(lowered) == 2


def released_before_more_is_made(w: torch.Tensor, y: torch.Tensor) -> object:
    """mm [store] -> relu [release of mm] -> cos: relu, mm and cos together would be the most of the graph."""
    product = w @ w
    stored = ops.store(product, toys.CONFIG, "g", 0, 0)
    first = product.relu().sum(0)
    ops.wait_store_(stored, product, 1, True)
    second = y.cos()
    return stored, first, second


def test_a_release_that_makes_room_stays() -> None:
    lowered = lower_alone(released_before_more_is_made, SQUARE, torch.randn(72, 64))
    assert_expected_inline(
        text(lowered),
        """\
extern mm
store 0 0
loops relu, sum_1
wait_store_ True False
loops cos""",
    )


def test_a_release_that_makes_no_room_is_behind_the_function() -> None:
    lowered = lower_alone(released_before_more_is_made, SQUARE, torch.randn(8, 8))
    assert_expected_inline(
        text(lowered),
        """\
extern mm
store 0 0
loops relu, sum_1
loops cos
wait_store_ True False""",
    )


@pytest.mark.parametrize("toy", toys.ALL, ids=lambda t: t.__name__)
def test_there_are_never_more_functions(toy: toys.Toy) -> None:
    joined = lower(toy, *toys.inputs(), options={})
    with mock.patch.object(order, "move_out_of_functions", lambda planned, *_: planned):
        cut = lower(toy, *toys.inputs(), options={})
    assert all(functions(a) <= functions(b) for a, b in zip(joined, cut, strict=True))


def functions(lowered: Lowered) -> int:
    """How many C++ functions are called."""
    return lowered.code.count("cpp_fused_") - lowered.code.count("= async_compile")


@dataclass(eq=False)
class Kernel:
    name: str


@pytest.mark.parametrize("seed", range(300))
def test_random_loops_are_cut_as_rarely_as_dependencies_allow(seed: int) -> None:
    rng = random.Random(seed)
    kernels = [Kernel(rng.choice(["ours", "loops"]) + str(i)) for i in range(rng.randint(1, 9))]
    ours = [k for k in kernels if k.name.startswith("ours")]
    needs: nx.DiGraph[Kernel] = nx.DiGraph()
    needs.add_nodes_from(kernels)
    needs.add_edges_from(p for p in itertools.combinations(kernels, 2) if rng.random() < 0.15)
    needs.add_edges_from(itertools.pairwise(ours))
    needs.add_edges_from(itertools.pairwise(k for k in kernels if k not in ours))

    moved = cpp_functions._Loops(kernels, set(ours), needs).with_ours_outside()  # type: ignore[arg-type]
    possible = nx.all_topological_sorts(needs)
    assert set(moved) == set(kernels)
    assert all(moved.index(a) < moved.index(b) for a, b in needs.edges)
    assert pieces(moved) == min(map(pieces, possible))


def pieces(kernels: list[Kernel]) -> int:
    """Runs of loops with nothing of ours in between."""
    return sum(is_loops for is_loops, _ in itertools.groupby(kernels, lambda k: k.name.startswith("loops")))


def test_a_kernel_of_another_device_is_a_call() -> None:
    def kernel(device: str) -> mock.Mock:
        return mock.Mock(get_device=lambda: torch.device(device), is_extern=lambda: False, is_template=lambda: False)

    assert cpp_functions._is_loops(kernel("cpu"))
    assert not cpp_functions._is_loops(kernel("cuda"))
    with torch._inductor.config.patch(cpu_backend="triton"):
        assert not cpp_functions._is_loops(kernel("cpu"))
