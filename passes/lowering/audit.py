"""Check that the generated code keeps what the plan promises, in every compilation.

The verifier checks the FX graphs, but then Inductor fuses, reorders, writes in place and reuses memory. So the first of
our kernels adds a line to the generated code that emits nothing. When the code is written out, schedule and memory plan
are final, and the line checks both. Under `cpp_wrapper` calls are plain text, and it checks the schedule alone.

    buf8 = ...                          buf8 is no part of an input or output; between its store and its release:
    buf10 = store(buf8)                   no code writes into buf8, frees it, or puts another buffer into its memory
    buf11 = mm(buf8)                    after a release that hands buf8 over:
    wait_store_(buf10, buf8, 5, True)     `del` is the next line; no code reads buf8 or puts a buffer into its memory
    del buf8
    buf3 = load(...)                    between a load and its wait:
    wait_load_(buf3)                      no code reads, writes, frees or reuses buf3
    buf4 = buf3  # reuse                after a reuse: no code uses buf3 or a view of it
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ssd_fx.compat.inductor import BaseSchedulerNode, GraphLowering, V, ir, lines_of
from ssd_fx.passes.lowering.order import argument, called
from ssd_fx.passes.verify.errors import VerifyError, around, require

ops = torch.ops.ssd_fx
# A name that may be a buffer's. The operator of a call is none (an input may be called `mm`), nor is a keyword.
_NAME = re.compile(r"(?<![\w.:])[A-Za-z_]\w*\b(?![(=])")
_require = partial(require, culprit="inductor")  # the verifier passed the graphs, so Inductor broke the rule


def attach(wrapper: Any) -> None:
    """Have the code of `wrapper` audited. A second call for the same wrapper changes nothing."""
    if not any(isinstance(line, AuditLine) for line in wrapper.lines):
        wrapper.writeline(AuditLine(wrapper, V.graph))


@dataclass
class AuditLine(lines_of.WrapperLine):
    """Emits nothing, and audits the code that it is part of.

    Raises:
        VerifyError: the code breaks a rule.
    """

    wrapper: Any
    graph: GraphLowering

    def codegen(self, code: object) -> None:
        audit_schedule(self.graph, self.graph.scheduler.nodes)
        audit_lines(self.graph, self.wrapper.lines)

    def codegen_fx(self, converter: object) -> Callable[[object], None]:
        return self.codegen


def audit_schedule(graph: GraphLowering, nodes: Sequence[BaseSchedulerNode]) -> None:
    """Check the kernels: none mutates a buffer that is being stored or loaded."""
    in_flight = _InFlight(graph)
    for node in nodes:
        if called(node.node) is not None:
            in_flight.step(node.node, node.get_name())
            continue
        for part in node.get_nodes():
            for name in {m for out in part.get_outputs() for m in out.get_mutations()}:
                in_flight.written(name, part.get_name())


def audit_lines(graph: GraphLowering, lines: Sequence[Any]) -> None:
    """Check order, reuse, frees and reads, in the code as it will run."""
    in_flight = _InFlight(graph)
    for i, line in enumerate(lines):
        where = _text(line)
        try:
            match line:
                case lines_of.ExternKernelAllocLine(node=node) if (kind := called(node)) is not None:
                    in_flight.step(node, where)
                    if kind == "wait_store_" and argument(node, "hand_over") and not graph.cpp_wrapper:
                        drop = f"del {_input(node, 1)}"
                        _require(_next(lines, i) == drop, f"{where} hands over and is not followed by {drop!r}")
                case lines_of.ReuseLine(node=old, reused_as=new):
                    in_flight.reused(old.get_name(), new.get_name())
                case lines_of.ReinterpretLine(node=old, reused_as=new):
                    in_flight.alias[new.get_name()] = old.get_name()
                case lines_of.FreeIfNotReusedLine(node=node, is_reused=False) | lines_of.FreeLine(node=node):
                    in_flight.freed(node.get_name())
                case _:
                    for name in _touched(graph, line):
                        in_flight.touched(name, where)
        except VerifyError as error:
            raise VerifyError(f"{error}\n{around(lines, i, _text)}") from None
    in_flight.finish()


@dataclass
class _InFlight:
    """The buffers that are being stored or loaded, and those that were handed over, at a point of the code.

    `alias`: by name of a buffer, the one whose memory it has. `overwritten`: by name, the buffer that took its memory.
    """

    graph: GraphLowering
    stores: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)
    handed_over: set[str] = field(default_factory=set)
    alias: dict[str, str] = field(default_factory=dict)
    overwritten: dict[str, str] = field(default_factory=dict)
    last_seq: int = -1

    def step(self, node: Any, where: str) -> None:
        """Check one of our kernels, and note what it begins or ends."""
        kind = called(node)
        if kind in ("begin_", "stand_in", "refuse_stand_ins"):
            return
        seq = argument(node, "seq")
        # Compiled autograd puts the backwards of several plans into one graph, one after the other. It drops the nodes
        # whose tensor is not read. So a plan may have gaps, and a lower number begins the next plan.
        begins = kind == "load" and not self.loads
        behind = f"{kind} {seq} runs behind {self.last_seq}, not in the planned order"
        _require(seq > self.last_seq or begins, behind, culprit="order")
        self.last_seq = seq
        if kind == "store":
            name = _input(node, 0)
            self._require_kept(name, where)
            busy = set(self._chain(name)) & (self.loads | self.handed_over)
            _require(not busy, f"{name!r} is stored while it is loaded or after it was handed over")
            root = self._root(name)
            is_part = root != name or isinstance(node.inputs[0], ir.ReinterpretView)
            is_callers = root in self.graph.graph_inputs or root in self.graph.get_output_names()
            text = f"{name!r} is stored as a part of {root!r}, an input or output that the caller may write into"
            _require(not (is_part and is_callers), text)
            self.stores.add(name)
        elif kind == "wait_store_":
            name = _input(node, 1)
            _require(name in self.stores, f"{where} releases {name!r}, which is not being stored")
            self._require_kept(name, where)
            self.stores.remove(name)
            if argument(node, "hand_over"):
                self.handed_over.add(name)
        elif kind == "load":
            self.loads.add(node.get_name())
        elif kind == "wait_load_":
            self._require_kept(_input(node, 0), where)
            loaded = [n for n in self._chain(_input(node, 0)) if n in self.loads]
            _require(len(loaded) == 1, f"{where} waits for {_input(node, 0)!r}, which is not being loaded")
            self.loads.remove(loaded[0])

    def written(self, name: str, where: str) -> None:
        """Check a write into a buffer."""
        self._require_free(name, f"{where} writes")

    def reused(self, old: str, new: str) -> None:
        """Check that the memory of `old`, which becomes that of `new`, is free."""
        self._require_free(old, f"{new!r} reuses the memory of")
        self._require_kept(old, f"{new!r} reuses the memory of {old!r} and")
        self.alias[new] = old
        self.overwritten[old] = new

    def _require_free(self, name: str, what: str) -> None:
        """Check that no transfer has the memory of a buffer. `what`: what happens to that memory."""
        states = (
            (self.stores, "is being stored"),
            (self.loads, "is being loaded"),
            (self.handed_over, "was handed over"),
        )
        for buffers, state in states:
            for busy in sorted(other for other in buffers if self._root(other) == self._root(name)):
                _require(False, f"{what} {busy!r}, which {state}")

    def _require_kept(self, name: str, where: str) -> None:
        """Check that nothing was written over a buffer, or over the buffer that it is a view of."""
        below = itertools.chain([""], self._chain(name))
        for user, buffer in zip(below, self._chain(name), strict=False):
            by = self.overwritten.get(buffer, user)
            _require(by == user, f"{where} uses {name!r} after {by!r} was written over {buffer!r}")

    def freed(self, name: str) -> None:
        """Check the end of a buffer."""
        if isinstance(getattr(self.graph.name_to_buffer.get(name), "layout", None), ir.MultiOutputLayout):
            return  # the tuple that an operator returned; its items live on
        _require(name not in self.stores, f"{name!r} is freed between its store and its release")
        _require(not set(self._chain(name)) & self.loads, f"{name!r} is freed between its load and its wait")

    def touched(self, name: str, where: str) -> None:
        """Check a read of a buffer or a write into it."""
        self._require_kept(name, where)
        chain = set(self._chain(name))
        _require(not chain & self.loads, f"{where} uses {name!r} before its wait")
        _require(not chain & self.handed_over, f"{where} uses {name!r} after it was handed over")

    def finish(self) -> None:
        _require(not self.stores, f"{sorted(self.stores)} are stored and never released")
        _require(not self.loads, f"{sorted(self.loads)} are loaded and never waited for")

    def _chain(self, name: str) -> Iterator[str]:
        """A buffer, the one whose memory it has, the one whose memory that has, and so on."""
        while name:
            yield name
            buffer = self.graph.name_to_buffer.get(name)
            if name in self.alias:
                name = self.alias[name]
            elif isinstance(buffer, ir.MultiOutput) and called(buffer.inputs[0]) is not None:
                name = _input(buffer, 0)  # our operators return one tensor, which Inductor takes out of a tuple
            else:
                name = next(iter(buffer.get_inputs_that_alias_output()), "") if buffer is not None else ""

    def _root(self, name: str) -> str:
        return list(self._chain(name))[-1]


def _input(node: Any, index: int) -> str:
    return str(node.inputs[index].get_name())


def _touched(graph: GraphLowering, line: Any) -> set[str]:
    """The buffers that a line of code reads or writes; none for one that only allocates."""
    if isinstance(line, (lines_of.MemoryPlanningLine, AuditLine)):
        return set()
    if isinstance(line, lines_of.MultiOutputLine) and line.arg_name in graph.name_to_buffer:
        return set()  # it takes an item out of a tuple
    text = " ".join(map(str, line.call_args)) if isinstance(line, lines_of.KernelCallLine) else _text(line)
    if text.startswith(("del ", "assert_", "#", "'''")):
        return set()
    return {n for n in _NAME.findall(text) if n in graph.name_to_buffer or n in graph.graph_inputs}


def _text(line: Any) -> str:
    """A line of code in short: what it calls, with which buffers."""
    if isinstance(line, str):
        return line.strip()
    if isinstance(line, lines_of.KernelCallLine):
        return f"{line.kernel_name}({', '.join(map(str, line.call_args))})"
    node = getattr(line, "node", None)
    if isinstance(node, ir.ExternKernel):
        names = [_operand(i) for i in node.inputs if isinstance(i, ir.IRNode)]
        called = node.op_overload or node.python_kernel_name or type(node).__name__
        return f"{node.get_name()} = {called}({', '.join(names)})"
    reused = getattr(line, "reused_as", None)
    names = [n.get_name() for n in (node, reused) if isinstance(n, ir.IRNode)]
    return f"{type(line).__name__}({', '.join(names)})"


def _operand(value: ir.IRNode) -> str:
    """The name of a buffer, or a size: a nested region has sizes as arguments."""
    return str(value.expr) if isinstance(value, ir.ShapeAsConstantBuffer) else str(value.get_name())


def _next(lines: Sequence[Any], index: int) -> str:
    """The next line that is no comment and defines no size."""
    silent = (lines_of.CommentLine, lines_of.LineContext, lines_of.UnbackedSymbolDefsLine)
    return next((_text(line) for line in lines[index + 1 :] if not isinstance(line, silent)), "")
