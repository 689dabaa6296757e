"""Every rule about the generated code, by planting the fault in the code and reading the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.codegen.wrapper import FreeLine, ReuseLine
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V

from ssd_fx.passes import audit, inductor, order
from tests.passes import toys
from tests.passes.lowered import lower

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
    return kernel.outputs[0]


def reuse_stored(wrapper: Any, kernel: inductor.AuditedKernel, seen: list[str]) -> None:
    wrapper.writeline(ReuseLine(wrapper, stored(kernel), kernel.outputs[0]))


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


def is_store(node: BaseSchedulerNode) -> bool:
    return getattr(node.node, "op_overload", None) is ops.store.default


def test_a_kernel_that_writes_in_place() -> None:
    """The kernel behind the store of an intermediate says that it mutates what is stored."""

    def tampered(graph: Any, nodes: list[BaseSchedulerNode]) -> None:
        inputs = [n.node.inputs[0].get_name() if is_store(n) else "" for n in nodes]  # type: ignore[union-attr]
        at, name = next((i, name) for i, name in enumerate(inputs) if name.startswith("buf"))
        kernel = next(n for n in nodes[at:] if not order.is_ours(n))
        with mock.patch.object(kernel.get_outputs()[0], "get_mutations", return_value=[name]):
            real(graph, nodes)

    real = audit.audit_schedule
    with (
        mock.patch.object(audit, "audit_schedule", tampered),
        pytest.raises(InductorError, match=r"\w+ writes 'buf\d+' while it is stored; see pass 'inductor'"),
    ):
        lower(toys.relu_chain, *toys.inputs(), options={})


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
