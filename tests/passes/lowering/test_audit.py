"""Every rule about the generated code, by planting the fault in the code and reading the message."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.codegen import wrapper as lines_of
from torch._inductor.codegen.wrapper import FreeLine, ReuseLine
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

import ssd_fx.compat.inductor
from ssd_fx.passes.lowering import audit, inductor, order
from ssd_fx.passes.verify.errors import VerifyError
from tests.passes import toys
from tests.passes.lowered import lower, lower_alone

ops = torch.ops.ssd_fx
Plant = Callable[[Any, inductor.AuditedKernel, list[str]], None]


@contextmanager
def planted(target: object, plant: Plant) -> Iterator[None]:
    """`plant(wrapper, kernel, seen)` runs behind every call of operator `target`.

    Where `seen`, the tensors of earlier calls, matter, it runs before the call.
    """
    seen: list[str] = []

    def codegen(self: inductor.AuditedKernel, wrapper: Any) -> None:
        early = plant in (use_handed_over, reuse_handed_over)
        if self.op_overload is target and early:
            plant(wrapper, self, seen)
        real(self, wrapper)
        if self.op_overload is target:
            if not early:
                plant(wrapper, self, seen)
            seen.append(self.inputs[1 if target is ops.wait_store_.default else 0].get_name())  # type: ignore[union-attr]

    real = inductor.AuditedKernel.codegen
    with mock.patch.object(inductor.AuditedKernel, "codegen", codegen):
        yield


def stored(kernel: inductor.AuditedKernel) -> Any:
    return kernel.inputs[0]


def loaded(kernel: inductor.AuditedKernel) -> Any:
    return _returned(kernel)


def _returned(kernel: inductor.AuditedKernel) -> Any:
    """Before torch 2.14 or 2.15 an item of the tuple that every operator seems to return."""
    return kernel.outputs[0] if kernel.outputs else kernel


def reuse_stored(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(ReuseLine(wrapper, stored(kernel), _returned(kernel)))


def free_stored(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(FreeLine(wrapper, stored(kernel)))


def use_before_del(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline("something()")


def use_handed_over(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    if seen:
        wrapper.writeline(f"something({seen[0]})")


def reuse_handed_over(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    if seen:
        gone = V.graph.name_to_buffer.get(seen[0]) or V.graph.graph_inputs_original[seen[0]]
        wrapper.writeline(ReuseLine(wrapper, gone, V.graph.name_to_buffer[kernel.inputs[0].get_name()]))  # type: ignore[union-attr]


def use_loading(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(f"something({loaded(kernel).get_name()})")


def free_loading(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(FreeLine(wrapper, loaded(kernel)))


def reuse_loading(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(ReuseLine(wrapper, loaded(kernel), kernel))


FAULTS: list[tuple[object, Plant, str]] = [
    (ops.store.default, reuse_stored, r"reuses the memory of '\w+', which is being stored; see pass 'inductor'"),
    (ops.store.default, free_stored, r"'\w+' is freed between its store and its release"),
    (
        ops.wait_store_.default,
        use_before_del,
        r"wait_store_.default\(\w+, \w+\) hands over and is not followed",
    ),
    (ops.wait_store_.default, use_handed_over, r"something\(\w+\) uses '\w+' after it was handed over"),
    (ops.wait_store_.default, reuse_handed_over, r"reuses the memory of '\w+', which was handed over"),
    (ops.load.default, use_loading, r"something\(\w+\) uses '\w+' before its wait"),
    (ops.load.default, free_loading, r"'\w+' is freed between its load and its wait"),
    (ops.load.default, reuse_loading, r"reuses the memory of '\w+', which is being loaded"),
]


@pytest.mark.parametrize(("target", "plant", "message"), FAULTS, ids=[p.__name__ for _, p, _ in FAULTS])
def test_faults_in_the_code(target: object, plant: Plant, message: str) -> None:
    with planted(target, plant), pytest.raises(InductorError, match=message) as caught:
        lower(toys.relu_chain, *toys.inputs(), options={})
    assert str(caught.value).count("\n--> ") == 1  # with the code around it


def stored_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """mm [store, release, store, release]"""
    product = x @ w
    first = ops.store(product, toys.CONFIG, "g", 0, 0)
    ops.wait_store_(first, product, 1, True)
    second = ops.store(product, toys.CONFIG, "g", 1, 2)
    ops.wait_store_(second, product, 3, True)
    return first, second


def released_twice(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """mm [store, release, release]"""
    product = x @ w
    handle = ops.store(product, toys.CONFIG, "g", 0, 0)
    ops.wait_store_(handle, product, 1)
    ops.wait_store_(handle, product, 2)
    return (handle,)


def stored_while_loaded(handle: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[load, store, wait, release] -> mm"""
    loaded = ops.load(handle, [8, 8], [8, 1], torch.float32, w.device, 0)
    again = ops.store(loaded, toys.CONFIG, "g", 0, 1)
    ops.wait_load_(loaded, handle, 2)
    ops.wait_store_(again, loaded, 3)
    return again, loaded @ w


def two_plans(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[load 0, wait 2] -> exp, then the nodes of another plan; what lies between 0 and 2 was read by nobody"""
    loaded = ops.load(first, [8, 8], [8, 1], torch.float32, first.device, 0)
    ops.wait_load_(loaded, first, 2)
    found = loaded.exp()
    loaded = ops.load(second, [8, 8], [8, 1], torch.float32, first.device, 0)
    ops.wait_load_(loaded, second, 1)
    return found, loaded.exp()


def plans_entangled(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[load 0] and, before its wait, the load 0 of another plan"""
    one = ops.load(first, [8, 8], [8, 1], torch.float32, first.device, 0)
    other = ops.load(second, [8, 8], [8, 1], torch.float32, first.device, 0)
    ops.wait_load_(one, first, 1)
    ops.wait_load_(other, second, 2)
    return one.exp(), other.exp()


def test_the_order_of_several_plans() -> None:
    """Compiled autograd has the backwards of several plans in one graph, one after the other."""
    handles = [torch.empty((), dtype=torch.int64) for _ in range(2)]
    lower_alone(two_plans, *handles)
    with pytest.raises(InductorError, match="load 0 runs behind 0, not in the planned order; see pass 'order'"):
        lower_alone(plans_entangled, *handles)


def waited_for_twice(handle: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[load, wait, wait] -> mm"""
    loaded = ops.load(handle, [8, 8], [8, 1], torch.float32, w.device, 0)
    ops.wait_load_(loaded, handle, 1)
    ops.wait_load_(loaded, handle, 2)
    return (loaded @ w,)


WRONG: list[tuple[Callable[..., Any], torch.Tensor, str]] = [
    (released_twice, torch.empty(8, 8), r"releases 'buf\d+', which is not being stored; see pass 'inductor'"),
    (stored_while_loaded, torch.empty((), dtype=torch.int64), r"'buf\d+' is stored while it is loaded"),
    (waited_for_twice, torch.empty((), dtype=torch.int64), r"waits for 'buf\d+', which is not being loaded"),
]


@pytest.mark.parametrize(("wrong", "first", "message"), WRONG, ids=[w.__name__ for w, _, _ in WRONG])
def test_faults_in_the_graph(wrong: Callable[..., Any], first: torch.Tensor, message: str) -> None:
    """What the verifier refuses, given to Inductor as it is."""
    with pytest.raises(InductorError, match=message):
        lower_alone(wrong, first, torch.empty(8, 8))


def test_stored_after_it_was_handed_over() -> None:
    """The first release hands over though the second store still reads, which its kernel would not have done."""
    lower_alone(stored_twice, torch.empty(8, 8), torch.empty(8, 8))

    def unchanged(schema: object, constants: object, name: str, value: object) -> object:
        return constants

    message = r"'buf\d+' is stored while it is loaded or after it was handed over; see pass 'inductor'"
    with mock.patch.object(inductor, "with_constant", unchanged), pytest.raises(InductorError, match=message):
        lower_alone(stored_twice, torch.empty(8, 8), torch.empty(8, 8))


def transfer(nodes: list[BaseSchedulerNode], target: object) -> tuple[int, str]:
    """The first store of what the graph made, or the last load: a kernel runs between it and its wait.

    Where it stands, and the buffer.
    """
    calls = [(i, n.node) for i, n in enumerate(nodes) if getattr(n.node, "op_overload", None) is target]
    moved = stored if target is ops.store.default else loaded
    buffers = [(i, moved(call).get_name()) for i, call in calls]  # type: ignore[arg-type]
    made = [(i, name) for i, name in buffers if name.startswith("buf")]
    return made[0 if target is ops.store.default else -1]


@pytest.mark.parametrize(("target", "text"), [(ops.store.default, "stored"), (ops.load.default, "loaded")])
def test_a_kernel_that_writes_in_place(target: object, text: str) -> None:
    """The kernel behind the store of an intermediate, or behind a load, says that it mutates what is transferred."""

    def tampered(graph: Any, nodes: list[BaseSchedulerNode]) -> None:
        if all(getattr(n.node, "op_overload", None) is not target for n in nodes):
            return real(graph, nodes)
        at, name = transfer(nodes, target)
        kernel = next(n for n in nodes[at:] if not order.is_ours(n))
        with mock.patch.object(kernel.get_outputs()[0], "get_mutations", return_value=[name]):
            real(graph, nodes)

    real = audit.audit_schedule
    with (
        mock.patch.object(audit, "audit_schedule", tampered),
        pytest.raises(InductorError, match=rf"\w+ writes 'buf\d+', which is being {text}; see pass 'inductor'"),
    ):
        lower(toys.relu_chain, *toys.inputs(), options={})


def test_an_inductor_whose_code_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lines_of, "ReuseLine")
    spec = importlib.util.spec_from_file_location("another", ssd_fx.compat.inductor.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"writes its code without \['ReuseLine'\], which the audit reads"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    ("target", "message"),
    [(ops.wait_store_.default, "are stored and never released"), (ops.wait_load_.default, "loaded and never waited")],
)
def test_a_node_that_is_missing(target: object, message: str) -> None:
    """The code ends before the first release or wait."""

    def cut(graph: Any, lines: list[Any]) -> None:
        ends = [i for i, x in enumerate(lines) if getattr(getattr(x, "node", None), "op_overload", None) is target]
        real(graph, lines[: ends[0]] if ends else lines)

    real = audit.audit_lines
    with mock.patch.object(audit, "audit_lines", cut), pytest.raises(InductorError, match=message):
        lower(toys.relu_chain, *toys.inputs(), options={})


def test_another_order() -> None:
    """The second load is put first."""

    def swapped(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        nodes = real(nodes)
        loads = [n for n in nodes if getattr(n.node, "op_overload", None) is ops.load.default]
        return [loads[1], *(n for n in nodes if n is not loads[1])] if loads else nodes

    real = order.planned_order
    message = "load 0 runs behind 1, not in the planned order; see pass 'order'"
    with mock.patch.object(order, "planned_order", swapped), pytest.raises(InductorError, match=message):
        lower(toys.relu_chain, *toys.inputs(), options={})


def test_what_shares_the_memory_of_what_was_handed_over_is_not_written() -> None:
    graph = mock.Mock(name_to_buffer={})
    in_flight = audit._InFlight(graph, handed_over={"buf1"}, alias={"buf1": "buf0"})  # a view of buf0
    with pytest.raises(VerifyError, match="kernel writes 'buf1', which was handed over"):
        in_flight.written("buf0", "kernel")
