"""What a load returned is written over by its last reader, as any other buffer that dies, and never sooner."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.dependencies import WeakDep
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import BaseSchedulerNode

import ssd_fx
from ssd_fx.passes.lowering import audit, order
from ssd_fx.passes.lowering.order import called
from tests import sources
from tests.bitwise import kept, ours, prove_bitwise
from tests.passes import toys
from tests.passes.lowered import Lowered, lower, lower_alone

ops = torch.ops.ssd_fx
HANDLE = torch.empty((), dtype=torch.int64)


def loaded_names(lowered: Lowered) -> list[str]:
    """The buffers that are waited for, in order."""
    return re.findall(r"wait_load_\((\w+),", lowered.code)


def overwritten(lowered: Lowered) -> list[str]:
    """Those of them that a kernel writes over."""
    code = [line.strip() for line in lowered.code.splitlines()]
    reused = [m[1] for line in code if (m := re.fullmatch(r"(?:auto )?\w+ = .*?(\w+)\b[^;]*;.*  # reuse", line))]
    return [name for name in loaded_names(lowered) if name in reused]


def load(handle: Tensor, seq: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ops.load(handle, [8, 8], [8, 1], dtype, torch.device("cpu"), seq)


def loaded(handle: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    y = load(handle, 0, dtype)
    ops.wait_load_(y, handle, 1)
    return y


def elementwise(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """[load, wait] -> mul"""
    y = loaded(handle)
    return (y * g,)


def mm_behind(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """[load, wait] -> mul -> mm -> mm: the second mm reads what was loaded"""
    y = loaded(handle)
    product = y * g
    return product, product.mm(g).mm(y)


def mm_before(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """[load, wait] -> mm -> mul: the mul reads last, and the product in another order"""
    y = loaded(handle)
    return (y * g.mm(y).mm(g).permute(1, 0),)


def transposed(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """One kernel reads two elements for each that it writes."""
    y = loaded(handle)
    return (y * y.permute(1, 0) * g,)


def of_a_view(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """[load, wait] -> as_strided -> sin; as_strided -> mm: two members of a group"""
    y = loaded(handle)
    rows = torch.as_strided(y, (64,), (1,), 0)
    turned = torch.as_strided(y, (8, 8), (1, 8), 0)
    return (rows * g.view(64)).sin(), g.mm(turned).mm(g)


def wider(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """What is made has more bytes than what was loaded."""
    y = loaded(handle, dtype=torch.bfloat16)
    return (y * g,)


def returned(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The caller gets what was loaded."""
    y = loaded(handle)
    return y * g, y


def written_by_another(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The graph writes into what was loaded, and reads it again."""
    y = loaded(handle)
    before = y * g
    y[0].copy_(g[1])
    return before, y * g


def seen_as_integers(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """An operator returns a view, which Inductor has as a buffer of its own."""
    y = loaded(handle)
    whole = torch.ops.aten.view.dtype(y, torch.int64)
    return y * g, whole + 1


def waits_late(handle: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """[load] -> mm, [load] -> [wait, wait] -> mul: two loaded tensors, of which each is overwritten behind its wait"""
    first = load(handle, 0)
    second = load(handle, 1)
    ops.wait_load_(second, handle, 2)
    used = (second * g).mm(g)
    ops.wait_load_(first, handle, 3)
    return used, first * g


CASES: list[tuple[Callable[..., object], int]] = [
    (elementwise, 1),
    (mm_behind, 0),
    (mm_before, 1),
    (transposed, 0),
    (of_a_view, 0),
    (wider, 0),
    (returned, 0),
    (written_by_another, 0),
    (seen_as_integers, 0),
    (waits_late, 2),
]


@pytest.mark.parametrize(("function", "count"), CASES, ids=[f.__name__ for f, _ in CASES])
def test_the_last_reader_alone_writes_over_it(function: Callable[..., object], count: int) -> None:
    assert len(overwritten(lower_alone(function, HANDLE, torch.randn(8, 8)))) == count


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_in_a_backward(dynamic: bool, cpp_wrapper: bool) -> None:
    backward = lower(toys.relu_chain, *toys.inputs(), options={}, dynamic=dynamic, cpp_wrapper=cpp_wrapper)[1]
    assert len(re.findall("(#|//) reuse", backward.code)) == 1  # the first relu, by its gradient


def test_not_where_kernels_in_place_are_off() -> None:
    backward = lower(toys.relu_chain, *toys.inputs(), options={}, inplace_buffers=False)[1]
    assert not overwritten(backward)


def test_every_reader_is_tied_to_the_wait() -> None:
    """Its bytes are there, whatever reorders the kernels later."""
    lowered = lower_alone(waits_late, HANDLE, torch.randn(8, 8))
    waits = [n for n in lowered.nodes if called(n.node) == "wait_load_"]
    behind = {m: b.get_name() for n in waits for b in n.get_outputs() for m in b.get_mutations()}
    assert len(behind) == 2
    for node in lowered.kernels:
        for name in {d.name for d in node.read_writes.reads if not isinstance(d, WeakDep)} & behind.keys():
            assert behind[name] in {d.name for d in node.unmet_dependencies}, f"{node} reads {name}"


def test_the_audit_refuses_what_is_written_over_while_a_reader_comes() -> None:
    """Inductor does not see the product."""

    def without_products(nodes: list[BaseSchedulerNode], waits: list[BaseSchedulerNode]) -> None:
        real(nodes, waits)
        for buffer in waits[0].scheduler.name_to_buf.values():
            if any(user.can_inplace for user in buffer.users):
                buffer.set_users([user for user in buffer.users if user.can_inplace])

    real = order.may_overwrite_loaded
    message = r"uses 'buf\d+' after 'buf\d+' was written over 'buf\d+'; see pass 'inductor'"
    with (
        mock.patch.object(order, "may_overwrite_loaded", without_products),
        pytest.raises(InductorError, match=message),
    ):
        lower_alone(mm_behind, HANDLE, torch.randn(8, 8))


def test_the_audit_knows_views_of_what_was_written_over() -> None:
    graph = mock.Mock(name_to_buffer={}, graph_inputs={})
    in_flight = audit._InFlight(graph, alias={"view": "buf0"})
    in_flight.reused("buf0", "buf1")
    in_flight.touched("buf1", "kernel")
    in_flight.reused("buf1", "buf2")
    in_flight.touched("buf2", "kernel")
    for name, text in (("view", "after 'buf1' was written over 'buf0'"), ("buf1", "after 'buf2' was written over")):
        with pytest.raises(audit.VerifyError, match=f"kernel uses '{name}' {text}"):
            in_flight.touched(name, "kernel")
    with pytest.raises(audit.VerifyError, match="'buf3' reuses the memory of 'buf0' and uses 'buf0' after 'buf1'"):
        in_flight.reused("buf0", "buf3")


def kept_product(x: Tensor, w: Tensor) -> Tensor:
    """mm, which is kept -> sin. The gradient that comes in is the caller's, so only `mm` can be written over."""
    return ssd_fx.keep(x @ w).sin()


def test_the_audit_takes_no_operator_for_a_tensor() -> None:
    """A backward has an input called `mm`, which a kernel writes over, and calls `mm` behind that."""
    backward = lower(kept_product, *toys.inputs(), options={})[1]
    assert re.search(r"= mm; del mm  # reuse(.|\n)*extern_kernels\.mm\(", backward.code)


def read_in_turn(x: Tensor, w: Tensor) -> Tensor:
    """Elementwise readers before, between and behind library calls."""
    y = x @ w
    z = y.sin() * y
    return ((z @ w).exp() * z + (y @ w.t()).tanh()).sigmoid()


def members_of_one(x: Tensor, w: Tensor) -> Tensor:
    """The halves of one storage, and all of it turned: each is read by loops and by a product."""
    y = (x @ w).tanh()
    left, right = y.chunk(2, dim=1)
    return (left.exp() * right).sum() + (y.t() @ w).sin().sum() + (left @ right.t()).square().sum()


@pytest.mark.parametrize("function", [read_in_turn, members_of_one], ids=lambda f: f.__name__)
def test_gradients_under_every_source(function: toys.Toy) -> None:
    """Bit for bit, wherever the bytes that are written over came from."""
    backward = lower(function, *toys.inputs(), options={})[1]
    assert overwritten(backward)
    options = sources.OPTIONS | {"inner": "inductor"}
    prove_bitwise(toys.trained(function), [kept(options), ours(options)], sources.ALL)


@pytest.mark.parametrize("toy", [toys.relu_chain, toys.shared_view, toys.equal_copy], ids=lambda t: t.__name__)
def test_toys_write_over_what_they_loaded(toy: toys.Toy) -> None:
    """So what runs toys under every source looks at this too."""
    assert overwritten(lower(toy, *toys.inputs(), options={})[1])


def test_a_loop_writes_over_the_product_that_comes_right_before_it() -> None:
    """mm -> tanh -> [store] -> mm -> [release]: a link between the first two would be a second dependency."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).tanh()
        handle = ops.store(y, "{}", "g", 0, 0)
        product = y @ w
        ops.wait_store_(handle, y, 1)
        return handle, product

    code = lower_alone(function, torch.randn(8, 8), torch.randn(8, 8)).code
    assert code.count("# reuse") == 1
