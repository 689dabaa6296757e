"""The modules that a node was traced in, by their names in `named_modules()`, and the node's line in the model.

Dynamo notes at every node the modules whose `forward` it was traced in, outermost first. It notes them as expressions
in the compiled frame:

    L['self'].model.blocks.0.attn          blocks.0.attn, with the root L['self'].model

A module's name begins after its *root*, the expression for the outermost module. The root is `L['self']` if the model
itself was compiled, and `L['self'].model` in a method of a trainer.

Once a method has set an attribute of an object, Dynamo looks for the others in its `__dict__`:
`L['self'].__dict__['_modules']['blocks'].0.attn` is the same module.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision's
_ACCESSOR = re.compile(r"[A-Z]\['[^']*'\]")  # L['self'], G['model']
_REGISTRY = r"_(?:modules|parameters|buffers)"
_REGISTERED = re.compile(rf"\.(?:__dict__\['{_REGISTRY}'\]|{_REGISTRY}|__dict__)\['([^']*)'\]")
_KEY = re.compile(r"\['([^']*)'\]")


def paths(node: fx.Node) -> tuple[str, ...]:
    """Dynamo's expressions for the modules around a node, outermost first; for a getitem those of its operator."""
    stack = node.meta.get("nn_module_stack")
    if stack is None and node.op == "call_function" and node.all_input_nodes and "getitem" in str(node.target):
        return paths(node.all_input_nodes[0])
    return tuple(path for path, _ in (stack or {}).values())


@functools.lru_cache(maxsize=4096)  # a root is asked for at every node
def dotted(path: str) -> str:
    """The expression with attributes in place of items of `__dict__`, `_modules`, `_parameters` and `_buffers`."""
    return _REGISTERED.sub(r".\1", path)


def name_of(path: str, roots: Sequence[str] = ()) -> str:
    """The name of a module: the part of `path` after the longest matching root, or else after the first accessor."""
    path = dotted(path)
    inner = _ACCESSOR.sub("", path, count=1)
    for root in sorted(map(dotted, roots), key=len, reverse=True):
        if path == root or path.startswith((f"{root}.", f"{root}[")):
            inner = path[len(root) :]
            break
    return _KEY.sub(r".\1", inner).lstrip(".")


def source_line(node: fx.Node) -> str:
    """The line of the model that calls the node's operator, such as `gpt.py:57`; empty where Dynamo noted none.

    It is the innermost line outside of PyTorch.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line = (outside or frames or [("", "")])[-1]
    return f"{Path(file).name}:{line}" if file else ""


def enclosing(node: fx.Node, roots: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of all modules around a node, outermost first, with containers that have no `forward`."""
    names = {"": None}
    for path in paths(node):
        parts = name_of(path, roots).split(".")
        names |= dict.fromkeys(itertools.accumulate(parts, "{}.{}".format))
    return tuple(names)


def matches(pattern: str, name: str) -> bool:
    """Whether a shell pattern names a module; `*` crosses dots, and `*.attn` names a top-level `attn` too."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f".{name}", pattern)


def innermost(patterns: Iterable[str], names: Sequence[str]) -> tuple[int, str] | None:
    """The index of the innermost of `names` that a pattern matches, and that pattern; None if no pattern matches."""
    found = [(i, p) for p in patterns for i, name in enumerate(names) if matches(p, name)]
    return max(found, key=lambda hit: hit[0]) if found else None
