"""Every rule about the generated code, by planting the fault in the code and reading the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import lowering
from torch._inductor.codegen.wrapper import FreeLine, ReuseLine
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

from ssd_fx.passes import inductor, order
from tests.passes import toys
from tests.passes.lowered import lower

ops = torch.ops.ssd_fx
Plant = Callable[[Any, inductor.AuditedKernel, list[str]], None]


@contextmanager
def planted(target: object, plant: Plant) -> Iterator[None]:
    """`plant(wrapper, kernel, seen)` runs behind every call of operator `target`; `seen`: what it returned before."""
    seen: list[str] = []

    def codegen(self: inductor.AuditedKernel, wrapper: Any) -> None:
        real(self, wrapper)
        if self.op_overload is target:
            plant(wrapper, self, seen)
            seen.append(self.inputs[1 if target is ops.wait_store_.default else 0].get_name())  # type: ignore[union-attr]

    real = inductor.AuditedKernel.codegen
    with mock.patch.object(inductor.AuditedKernel, "codegen", codegen):
        yield


def stored(kernel: inductor.AuditedKernel) -> Any:
    return kernel.inputs[0]


def loaded(kernel: inductor.AuditedKernel) -> Any:
    return kernel.outputs[0]


def reuse_stored(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(ReuseLine(wrapper, stored(kernel), kernel.outputs[0]))


def free_stored(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(FreeLine(wrapper, stored(kernel)))


def use_before_del(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline("something()")


def use_handed_over(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    if seen:
        wrapper.lines.insert(-1, f"something({seen[0]})")


def reuse_handed_over(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    if seen:
        gone = V.graph.name_to_buffer.get(seen[0]) or V.graph.graph_inputs_original[seen[0]]
        wrapper.lines.insert(-1, ReuseLine(wrapper, gone, kernel))


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


@contextmanager
def lowered_as(target: object, function: Callable[..., Any]) -> Iterator[None]:
    inductor.register()
    with mock.patch.dict(lowering.lowerings, {target: function}), mock.patch.object(inductor, "register"):
        yield


def test_a_kernel_that_writes_in_place() -> None:
    def release(handle: Any, keepalive: Any, *args: Any) -> None:
        if not keepalive.get_name().startswith("primals"):
            lowering.mutate_to(keepalive, lowering.lowerings[torch.ops.aten.neg.default](keepalive))
        real(handle, keepalive, *args)

    real = inductor._lower_release
    with lowered_as(ops.wait_store_.default, release), pytest.raises(InductorError, match=r"writes '\w+' while it is"):
        lower(toys.relu_chain, *toys.inputs(), options={})


@pytest.mark.parametrize(
    ("target", "message"),
    [(ops.wait_store_.default, "are stored and never released"), (ops.wait_load_.default, "loaded and never waited")],
)
def test_a_node_that_is_missing(target: object, message: str) -> None:
    with lowered_as(target, lambda *args: None), pytest.raises(InductorError, match=message):
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
