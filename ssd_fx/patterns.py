"""Checks that the module name patterns of `keep` and `offload` name modules of the user's program.

Names are those of `named_modules()` of the model whose `forward` was compiled, or of the model that the compiled
function calls. The names in one graph do not decide whether a pattern is wrong. One `torch.compile` may make many
graphs (graph breaks, blocks that are compiled one by one), and a pattern may name a module of a later one. So a pattern
is compared with three sets of models:

    of the graph    the models that the graph's modules belong to (`roots`)
    in reach        the models in the locals, closures and named globals of the compiled function
    running         the models whose methods are on the call stack: a block's graph is compiled while its model runs
"""

from __future__ import annotations

import difflib
import hashlib
import re
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import OptimizedModule

from ssd_fx.passes.joint.marks import ANNOTATION
from ssd_fx.passes.joint.modules import dotted, enclosing, matches, paths

# Patterns that named a module while a model was in reach. A later graph of the same code may reach that model, and not
# the model that has the named module.
_matched: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def roots(graph_module: fx.GraphModule) -> dict[str, nn.Module]:
    """The models that the modules of a Dynamo graph belong to, by Dynamo's expression for each.

    Empty if no module is in the graph, or outside of Dynamo, where there is no compiled frame.
    """
    frame = _compiled_frame()
    outermost = dict.fromkeys(around[0] for node in _nodes(graph_module) if (around := paths(node)))
    return dict(found for path in outermost if (found := _first_module(path, frame)) is not None)


def check(patterns: Sequence[str], graph_module: fx.GraphModule, own: dict[str, nn.Module]) -> None:
    """Compare patterns with the names of modules in the graph, in reach and running. `own`: the graph's `roots`.

    A pattern may name modules of this graph only by their names in a running model. It cannot be obeyed, because the
    compiled code may serve every module of that class. It is a RuntimeWarning.

    Raises:
        ValueError: a pattern names no module; the message has similar names.
    """
    if not patterns:  # f_locals of a running frame keeps its variables alive until the frame returns
        return
    models = [*own.values(), *_models_of(_compiled_frame())]
    names = {name for node in _nodes(graph_module) for name in enclosing(node, tuple(own))}
    names |= {name for model in models for name, _ in model.named_modules()}
    missing = [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]
    for model in models:
        _matched.setdefault(model, set()).update(set(patterns) - set(missing))
    if missing:
        _check_running(missing, names, models, own)


def _check_running(missing: Sequence[str], names: set[str], models: list[nn.Module], own: dict[str, nn.Module]) -> None:
    """Compare patterns that match none of `names` with the models that run. `names`: in the graph and in reach."""
    running = _running(models)
    around = [m for m in running if any(inner is model for inner in m.modules() for model in models)]
    known = {pattern for model in (*models, *running) for pattern in _matched.get(model, ())}
    for pattern in missing:
        outside = [m for model in around for name, m in model.named_modules() if matches(pattern, name)]
        if any(_overlap(module, model) for module in outside for model in own.values()):
            warnings.warn(
                f"ssd_fx: module pattern {pattern!r} has no effect on {_kinds(own.values())}, which is compiled by "
                f"itself: its modules are called {_listed(names)} there",
                RuntimeWarning,
                stacklevel=3,
            )
        elif not outside and pattern not in known and names - {""}:
            every = names | {name for model in around for name, _ in model.named_modules()}
            raise ValueError(_no_match(pattern, every))


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
    code = _compiled_frame().f_code
    if code is None:
        return ""
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{name.rpartition('<locals>.')[2]} {Path(code.co_filename).name}:{code.co_firstlineno}"


def _called(source: str) -> str:
    return dotted(re.sub(r"[LG]\['([^']*)'\]", r"\1", source, count=1))


def annotation_digest(graph_module: fx.GraphModule, *, names: bool) -> str:
    """A digest of the marks at the nodes of a Dynamo graph, and with `names` of the names of their modules.

    Compile caches look at the code of a graph, which has neither. Empty if the graph has no marks and names do not
    matter.
    """
    notes = []
    for node in _nodes(graph_module):
        mark = (node.meta.get("custom") or {}).get(ANNOTATION, "")
        if mark or names:
            notes.append(f"{node.name} {mark} {paths(node) if names else ''}")
    return hashlib.sha256("\n".join(notes).encode()).hexdigest() if notes else ""


def _nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of the graph and of those inside of it (checkpointed regions)."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _compiled_frame() -> Any:
    """`f_locals`, `f_globals` and `f_code` of the frame that Dynamo is compiling; empty outside of Dynamo."""
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return SimpleNamespace(f_locals={}, f_globals={}, f_code=None)
    return translator.output.root_tx


def _first_module(path: str, frame: Any) -> tuple[str, nn.Module] | None:
    """The first module on an expression such as `L['self'].model.blocks.0`, and the expression up to it."""
    match = re.match(r"([LG])\['([^']*)'\]", path)
    if match is None:
        return None
    value: Any = (frame.f_locals if match[1] == "L" else frame.f_globals).get(match[2])
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


def _models_of(frame: Any) -> list[nn.Module]:
    """Models that another graph of the compiled function may call: in its locals and the globals that it names."""
    values = list(frame.f_locals.values())
    values += [frame.f_globals.get(name) for name in (frame.f_code.co_names if frame.f_code else ())]
    return [held for value in values for held in _held(value) if isinstance(held, nn.Module)]


def _held(value: Any) -> Iterable[Any]:
    """The value itself if it is a module, else its items or attributes."""
    if isinstance(value, (nn.Module, ModuleType, type, torch.Tensor)):
        return (value,)
    if isinstance(value, (list, tuple)):
        return value
    return (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()


def _running(models: list[nn.Module]) -> list[nn.Module]:
    """Modules whose methods are on the call stack, without `models`."""
    inner = {id(model) for model in models}
    owners: dict[int, nn.Module] = {}
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not isinstance(owner, OptimizedModule) and id(owner) not in inner:
            owners[id(owner)] = owner
        frame = frame.f_back
    return list(owners.values())


def _overlap(a: nn.Module, b: nn.Module) -> bool:
    return any(m is b for m in a.modules()) or any(m is a for m in b.modules())


def _kinds(models: Iterable[nn.Module]) -> str:
    return " and ".join(dict.fromkeys(type(model).__name__ for model in models))


def _listed(names: Iterable[str], most: int = 8) -> str:
    known = sorted((name for name in names if name), key=lambda name: (name.count("."), name))
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(map(repr, known[:most])) + more


def _no_match(pattern: str, names: set[str]) -> str:
    near = difflib.get_close_matches(pattern, sorted(names - {""}), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"module pattern {pattern!r} matches no module{hint} The modules are: {_listed(names)}."
