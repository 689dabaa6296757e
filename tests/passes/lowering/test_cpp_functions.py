"""Our nodes cut no C++ function that they need not cut, and dependencies, order and peak stay what they were."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import networkx as nx
import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor.scheduler import NopKernelSchedulerNode

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


@pytest.mark.parametrize(("rows", "stays"), [(72, True), (8, False)], ids=["makes room", "makes no room"])
def test_a_release_stays_if_it_makes_room(rows: int, stays: bool) -> None:
    lowered = lower_alone(released_before_more_is_made, SQUARE, torch.randn(rows, 64))
    loops, release = ["loops cos"], ["wait_store_ True False"]
    end = release + loops if stays else loops + release
    assert text(lowered).splitlines() == ["extern mm", "store 0 0", "loops relu, sum_1", *end]


def summed_in_parts(handle: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> object:
    """mm -> sum of parts [wait for a load] -> sum with its transpose, which may overwrite the first sum."""
    product = w @ wide
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, handle.device, 0)
    first = product.view(64, 16, 64).sum(1)
    ops.wait_load_(loaded, handle, 1)
    return first + first.T, loaded


@pytest.mark.parametrize("in_place", [True, False])
def test_a_wait_stays_if_one_function_would_have_more_at_once(in_place: bool) -> None:
    with torch._inductor.config.patch(inplace_buffers=in_place):
        lowered = lower_alone(summed_in_parts, HANDLE, torch.randn(64, 4), torch.randn(4, 1024))
    assert functions(lowered) == (1 if in_place else 2)


def blocking(w: torch.Tensor, y: torch.Tensor, wide: torch.Tensor) -> object:
    """relu [store] -> cos [release that blocks] -> sin, and more memory later."""
    product = (w @ w).relu()
    stored = ops.store(product, toys.CONFIG, "g", 0, 0)
    first = y.cos()
    ops.wait_store_(stored, product, 1, False, True)
    second = y.sin().sum(0)
    return stored, first, second, w @ wide


def strict(handle: torch.Tensor, w: torch.Tensor, y: torch.Tensor, wide: torch.Tensor) -> object:
    """cos [strict load] -> sin [wait] -> mul, and more memory later."""
    product = w @ w
    first = y.cos()
    loaded = ops.load(handle, [64, 64], [64, 1], torch.float32, torch.device("cpu"), 0, True)
    second = (y + 1).sin().sum(0)
    ops.wait_load_(loaded, handle, 1)
    return first, second, (loaded * product @ w) @ wide


def checked(kept: torch.Tensor, w: torch.Tensor, y: torch.Tensor, wide: torch.Tensor) -> object:
    """cos [check of `kept`] -> mul by it [store]: compiled autograd has a backward in the middle of a graph."""
    first = y.cos()
    ops.refuse_stand_ins([kept])
    second = kept * 2
    stored = ops.store(second, toys.CONFIG, "g", 0, 0)
    ops.wait_store_(stored, second, 1, True)
    return stored, first, w @ wide


def released_early(handle: torch.Tensor, w: torch.Tensor, y: torch.Tensor, wide: torch.Tensor) -> object:
    """mm [store] -> sum of it [release, wait] -> mul: the release gives memory away, so it stays behind the sum."""
    product = w @ w
    stored = ops.store(product, toys.CONFIG, "g", 0, 0)
    loaded = ops.load(handle, [48, 48], [48, 1], torch.float32, torch.device("cpu"), 1)
    first = product.sum(0)
    ops.wait_store_(stored, product, 2, True)
    ops.wait_load_(loaded, handle, 3)
    return stored, first, loaded * 3, w @ wide


def begun(w: torch.Tensor, y: torch.Tensor, x: torch.Tensor, wide: torch.Tensor) -> object:
    """An empty tensor [begin_] -> cos [store] -> sin."""
    ops.begin_(torch.empty(0, dtype=torch.int64), toys.CONFIG, "g", 0, 0)
    first = y.cos()
    stored = ops.store(first, toys.CONFIG, "g", 0, 0)
    second = x.sin()
    ops.wait_store_(stored, first, 1, True)
    return stored, second @ second, w @ wide


MUCH = torch.randn(64, 4096)
TALL = torch.randn(72, 64)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (blocking, (SQUARE, TALL, MUCH), ["store 0 0", "loops cos", "wait_store_ False True"]),
        (strict, (HANDLE, SQUARE, TALL, MUCH), ["loops cos", "load 0", "loops add, sin, sum_1", "wait_load_ 1"]),
        (checked, (SQUARE, SQUARE, TALL, MUCH), ["refuse_stand_ins", "loops mul"]),
        (released_early, (HANDLE, SQUARE, TALL, MUCH), ["loops sum_1", "wait_store_ True False", "wait_load_ 3"]),
        (begun, (SQUARE, TALL, torch.randn(48, 48), MUCH), ["begin_", "loops cos", "loops sin", "store 0 0"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_has_its_place_for_a_reason_keeps_it(
    function: Callable[..., object], inputs: tuple[torch.Tensor, ...], expected: list[str]
) -> None:
    lines = text(lower_alone(function, *inputs)).splitlines()
    assert [line for line in lines if line in expected] == expected


CUT = (toys.expanded, toys.saved_copies)  # those that have fewer functions
OTHERS = [
    pytest.param(toy, marks=[pytest.mark.slow] if i % 5 else []) for i, toy in enumerate(toys.ALL) if toy not in CUT
]


@pytest.mark.parametrize("toy", [*CUT, *OTHERS], ids=toys.name)
def test_there_are_never_more_functions(toy: toys.Toy) -> None:
    joined = lower(toy, *toys.inputs(), options={})
    with mock.patch.object(order, "move_out_of_functions", lambda planned, *_: planned):
        cut = lower(toy, *toys.inputs(), options={})
    assert all(functions(a) <= functions(b) for a, b in zip(joined, cut, strict=True))
    if toy in CUT:
        assert sum(map(functions, joined)) < sum(map(functions, cut))


def functions(lowered: Lowered) -> int:
    """How many C++ functions are called."""
    return lowered.code.count("cpp_fused_") - lowered.code.count("= async_compile")


@dataclass(eq=False)
class Kernel:
    name: str


class Nop(Kernel, NopKernelSchedulerNode):  # type: ignore[misc]  # nothing but its class is looked at
    pass


def test_random_loops_are_cut_as_rarely_as_dependencies_allow() -> None:
    for seed in range(300):
        cut_as_rarely_as_dependencies_allow(seed)


def cut_as_rarely_as_dependencies_allow(seed: int) -> None:
    rng = random.Random(seed)
    names = [rng.choice(["ours", "ours", "loops", "loops", "nop"]) for _ in range(rng.randint(1, 9))]
    kernels = [Nop(name) if name == "nop" else Kernel(name) for name in names]
    ours = [k for k in kernels if k.name == "ours"]
    needs: nx.DiGraph[Kernel] = nx.DiGraph()
    needs.add_nodes_from(kernels)
    needs.add_edges_from(p for p in itertools.combinations(kernels, 2) if rng.random() < 0.15)
    needs.add_edges_from(itertools.pairwise(ours))
    needs.add_edges_from(itertools.pairwise(k for k in kernels if k not in ours))

    moved = cpp_functions._Loops(kernels, set(ours), needs).with_ours_outside()  # type: ignore[arg-type]
    assert set(moved) == set(kernels), seed
    assert all(moved.index(a) < moved.index(b) for a, b in needs.edges), seed  # type: ignore[arg-type]
    assert pieces(moved) == min(map(pieces, nx.all_topological_sorts(needs))), seed  # type: ignore[arg-type]
    assert set(in_front(kernels)) <= set(in_front(moved)), seed  # type: ignore[arg-type]


def in_front(kernels: list[Kernel]) -> list[Kernel]:
    """Ours before the first loops."""
    return [k for k in itertools.takewhile(lambda k: k.name != "loops", kernels) if k.name == "ours"]


def pieces(kernels: list[Kernel]) -> int:
    """Runs of loops with nothing of ours in between."""
    code = [k.name for k in kernels if k.name != "nop"]
    return sum(name == "loops" for name, _ in itertools.groupby(code))


def test_a_kernel_of_another_device_is_a_call() -> None:
    def kernel(device: str) -> mock.Mock:
        return mock.Mock(get_device=lambda: torch.device(device), is_extern=lambda: False, is_template=lambda: False)

    assert cpp_functions._is_loops(kernel("cpu"))
    assert not cpp_functions._is_loops(kernel("cuda"))
    with torch._inductor.config.patch(cpu_backend="triton"):
        assert not cpp_functions._is_loops(kernel("cpu"))
