"""What Dynamo knows of the graph that it has made, and of the function that it compiles now."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from ssd_fx.compat import CompileContext, CompileId, tls
from ssd_fx.passes.joint.marks import ANNOTATION
from ssd_fx.passes.joint.modules import dotted, paths


def nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of those inside of it (checkpointed regions)."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def roots(graph_module: fx.GraphModule) -> dict[str, nn.Module]:
    """The models that the modules of a Dynamo graph belong to, by Dynamo's expression for each.

    Empty if no module is in the graph, or outside of Dynamo, where there is no compiled frame.
    """
    compiled = frame()
    outermost = dict.fromkeys(around[0] for node in nodes(graph_module) if (around := paths(node)))
    return dict(found for path in outermost if (found := _first_module(path, compiled)) is not None)


def arguments(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """The user's names of the inputs of a Dynamo graph: `tokens`, `batch['mask']`, `self.head.weight`."""
    names = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", None)
        names.append(_called(str(name() if callable(name) else name or node.target)))  # a method before torch 2.12
    return tuple(names)


def lasting(graph_module: fx.GraphModule) -> frozenset[int] | None:
    """The numbers of the inputs of a Dynamo graph that are parameters or buffers; None if Dynamo has not made it.

    PyTorch asks the same in `aot_autograd`, but its numbers do not fit a graph with parts of tensor subclasses.
    """
    if "dynamo_compile_id" not in graph_module.meta:
        return None
    inputs = graph_module.graph.find_nodes(op="placeholder")
    notes = [node.meta.get("tensor_dict") or {} for node in inputs]
    return frozenset(i for i, note in enumerate(notes) if note.get("_dynamo_static_input_type"))


def function() -> str:
    """The function that Dynamo compiles now, and its line: `Block.forward gpt.py:12`; empty outside of Dynamo."""
    code = frame().f_code
    if code is None:
        return ""
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{name.rpartition('<locals>.')[2]} {Path(code.co_filename).name}:{code.co_firstlineno}"


def compilation() -> tuple[CodeType, CompileId] | None:
    """The code of the function that Dynamo compiles now, and the number of this compilation; None outside of Dynamo."""
    code, number = frame().f_code, CompileContext.current_compile_id()
    return None if code is None or number is None else (code, number)


def annotation_digest(graph_module: fx.GraphModule, *, names: bool) -> str:
    """A digest of the marks at the nodes of a Dynamo graph, and with `names` of the names of their modules.

    Compile caches look at the code of a graph, which has neither. Empty if the graph has no marks and names do not
    matter.
    """
    notes = []
    for node in nodes(graph_module):
        mark = (node.meta.get("custom") or {}).get(ANNOTATION, "")
        if mark or names:
            notes.append(f"{node.name} {mark} {paths(node) if names else ''}")
    return hashlib.sha256("\n".join(notes).encode()).hexdigest() if notes else ""


def translator() -> Any:
    """Dynamo's translator of the function that it is compiling; None outside of Dynamo."""
    return getattr(tls, "current_tx", None)


def frame() -> Any:
    """`f_locals`, `f_globals` and `f_code` of the frame that Dynamo is compiling; empty outside of Dynamo."""
    compiling = translator()
    if compiling is None:
        return SimpleNamespace(f_locals={}, f_globals={}, f_code=None)
    return compiling.output.root_tx


def models_in_reach() -> list[nn.Module]:
    """Models that another graph of the compiled function may call: in its locals and the globals that it names."""
    compiled = frame()
    values = list(compiled.f_locals.values())
    values += [compiled.f_globals.get(name) for name in (compiled.f_code.co_names if compiled.f_code else ())]
    return [held for value in values for held in _held(value) if isinstance(held, nn.Module)]


def _called(source: str) -> str:
    return dotted(re.sub(r"[LG]\['([^']*)'\]", r"\1", source, count=1))


def _first_module(path: str, compiled: Any) -> tuple[str, nn.Module] | None:
    """The first module on an expression such as `L['self'].model.blocks.0`, and the expression up to it."""
    match = re.match(r"([LG])\['([^']*)'\]", path)
    if match is None:
        return None
    value: Any = (compiled.f_locals if match[1] == "L" else compiled.f_globals).get(match[2])
    end = match.end()
    for step in re.finditer(r"\.(\w+)|\[(\d+)\]|\['([^']*)'\]", path[end:]):
        if isinstance(value, nn.Module):
            break
        attribute, index, key = step.groups()
        try:
            value = getattr(value, attribute) if attribute else value[int(index) if index else key]
        except (AttributeError, LookupError, TypeError):
            return None  # an unknown form of expression; the names at the node still count
        end = match.end() + step.end()
    return (path[:end], value) if isinstance(value, nn.Module) else None


def _held(value: Any) -> Iterable[Any]:
    """The value itself if it is a module, else its items or attributes."""
    if isinstance(value, (nn.Module, ModuleType, type, torch.Tensor)):
        return (value,)
    if isinstance(value, (list, tuple)):
        return value
    return (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
