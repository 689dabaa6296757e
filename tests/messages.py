"""Every error, warning and log message that the package has, read from its source.

`…` stands for what varies in a message: `storing … B failed (…)`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GAP = "…"
_LEAST_WORDS = 3  # a text with fewer says nothing by itself
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass(frozen=True)
class Message:
    """One place that says something. `texts`: what it may say; empty if it passes on what another place says."""

    module: str  # runtime/store.py
    function: str
    kind: str  # the exception's name, "warning", "log" or "print"
    texts: tuple[str, ...]


@functools.cache
def messages() -> tuple[Message, ...]:
    """What all modules say, and the native sources."""
    said = [message for path in sources() for message in _Module(path).messages()]
    return (*said, *_of_native_sources())


def sources() -> list[Path]:
    """The modules of the package, where they are and not through the links in ssd_fx/."""
    return sorted(path for folder in ("ssd_fx", "passes", "runtime") for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def every_text() -> tuple[str, ...]:
    """All texts of the package but docstrings, messages or not."""
    native = (text for message in _of_native_sources() for text in message.texts)
    return (*(text for path in sources() for text in _texts(_parsed(path))), *native)


def _of_native_sources() -> Iterator[Message]:
    folder = ROOT / "runtime" / "native"
    for path in sorted([*folder.glob("*.c"), *folder.glob("*.cpp")]):
        for text in re.findall(r'fprintf\(stderr,\s*"(.*?)(?:\\n)?"', path.read_text()):
            yield Message(str(path.relative_to(ROOT)), "", "print", (re.sub(r"%\w+", GAP, text),))


class _Module:
    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(ROOT))
        self.tree = _parsed(path)
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        self.raised = {id(node.exc) for node in ast.walk(self.tree) if isinstance(node, ast.Raise)}

    def messages(self) -> Iterator[Message]:
        yield from self._within(self.tree, "", "")

    def _within(self, node: ast.AST, function: str, error: str) -> Iterator[Message]:
        """Those below `node`, which stands in `function`, and in the class of an error that is called `error`."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield from self._within(child, child.name, error)
            elif isinstance(child, ast.ClassDef):
                yield from self._within(child, function, child.name if child.name.endswith("Error") else "")
            else:
                if isinstance(child, ast.Call) and (kind := self._kind(child, error)):
                    yield Message(self.name, function, kind, self._said(child, function))
                yield from self._within(child, function, error)

    def _kind(self, call: ast.Call, error: str) -> str:
        """What a call says something as; empty if it says nothing."""
        name = ast.unparse(call.func)
        last = name.rpartition(".")[2]
        if error and name == "super().__init__":
            return error
        if re.fullmatch(r"[A-Z]\w*Error", last):
            return last
        if id(call) in self.raised and re.match("_?[A-Z]", last):
            return last
        if name == "warnings.warn":
            return "warning"
        if last in _LEVELS and "log" in name.lower().removesuffix(last):
            return "log"
        is_print = name == "print" and any(ast.unparse(word.value) == "sys.stderr" for word in call.keywords)
        return "print" if is_print or name == "self.exit" else ""

    def _said(self, call: ast.Call, function: str) -> tuple[str, ...]:
        own = [text for argument in call.args if (text := _template(argument)) and _is_said(text)]
        found = own or [text for argument in call.args for text in self._behind(argument, function, set())]
        return tuple(dict.fromkeys(found))

    def _behind(self, value: ast.AST, function: str, seen: set[str]) -> Iterator[str]:
        """The texts in `value`, and in the variables and functions of this module that it names."""
        yield from (text for text in _texts(value) if _is_said(text))
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)} - seen
        for name in sorted(names):
            seen.add(name)
            for place in (self.functions.get(function), self.tree):
                for assigned in _assigned(place, name) if place else ():
                    yield from self._behind(assigned, function, seen)
            for node in ast.walk(self.functions[name]) if name in self.functions else ():
                if isinstance(node, ast.Return) and node.value:
                    yield from self._behind(node.value, name, seen)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _assigned(place: ast.AST, name: str) -> Iterator[ast.AST]:
    """What is assigned to `name` in a function, or at the top of a module."""
    for node in ast.walk(place) if isinstance(place, ast.FunctionDef) else ast.iter_child_nodes(place):
        if isinstance(node, ast.Assign) and any(name == ast.unparse(target) for target in node.targets):
            yield node.value


def _texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a tree, whole ones, without docstrings."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    text = _template(tree)
    if text is not None:
        yield text
    else:
        for node in ast.iter_child_nodes(tree):
            yield from _texts(node)


def _template(node: ast.AST) -> str | None:
    """The text that a constant, an f-string or a sum of them makes; None if it is none of these."""
    match node:
        case ast.Constant(value=str(text)):
            return " ".join(re.sub(r"%[\w.]+", GAP, text).split())
        case ast.JoinedStr(values=values):
            parts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in values]
            return " ".join("".join(parts).split())
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = [_template(side) for side in (left, right)]
            return None if texts == [None, None] else "".join(GAP if text is None else text for text in texts)
    return None


def _is_said(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= _LEAST_WORDS
