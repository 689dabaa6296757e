"""Whether a call of `ssd_fx.checkpoint` will be computed again, as far as one sees before it runs.

It will be if something that it computes with needs a gradient. Where that shows nowhere, or where calls of the same
kind were not computed again, it is doubtful: such a call is stored when its function has returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ssd_fx.compat import innermost_fn, tree_leaves
from ssd_fx.survey import uncompiled

AGAIN = 64  # a kind of call is doubtful until so many of its calls in a row could be computed again
KINDS = 1024  # doubtful kinds that are remembered
LOOKED = 64  # objects that a function holds, and that these hold, which are looked at for gradients
PARAMETERS = 128  # of a module that are looked at: to look at all of a large one for each of its layers would take long

Kind = tuple[object, str]
"""The code of a function, and what needs a gradient as far as one sees. It keeps no module and no tensor alive."""


def kind_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind:
    """The kind of a call with these arguments."""
    if any(_needs_gradient(x) for x in tree_leaves((args, dict(kwargs)))):
        return _code(function), "arguments"
    return _code(function), "function" if any(map(_needs_gradient, _held(function))) else ""


def _needs_gradient(x: object) -> bool:
    if isinstance(x, nn.Module):
        return any(each.requires_grad for each in itertools.islice(x.parameters(), PARAMETERS))
    return isinstance(x, Tensor) and x.requires_grad


def _held(function: object) -> list[object]:
    """What one sees that `function` holds: itself, its object, arguments it is given already, variables around it."""
    found: dict[int, object] = {id(function): function}
    ahead = [function]
    while ahead and len(found) < LOOKED:
        each = ahead.pop()
        inner: list[object] = []
        if isinstance(each, partial):
            inner = [each.func, *tree_leaves((each.args, each.keywords))]
        elif isinstance(each, MethodType):
            inner = [each.__self__, each.__func__]
        elif isinstance(each, FunctionType):
            inner = [_content(cell) for cell in each.__closure__ or ()]
        new = {id(x): x for x in inner if id(x) not in found}
        found |= new
        ahead += new.values()
    return list(found.values())


def _content(cell: Any) -> object:
    """The variable that a function has from around it. None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _code(function: Callable[..., Any]) -> object:
    """The code that a call of `function` runs, or its name if that is no code of Python."""
    while isinstance(function, partial):
        function = function.func
    function = innermost_fn(uncompiled(function))
    if isinstance(function, nn.Module):
        function = type(function).forward
    for called in (function, type(function).__call__):
        code = getattr(called, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return str(getattr(function, "__qualname__", ""))


def doubt(kind: Kind) -> int:
    """How many more calls of this kind are stored only when their function has returned."""
    return _doubts.get(kind, _at_first(kind))


def _at_first(kind: Kind) -> int:
    _, needs = kind
    return 0 if needs else AGAIN


def learn(kind: Kind, *, again: bool) -> None:
    """Notes whether a call of this kind can be computed `again`."""
    left = max(0, doubt(kind) - 1) if again else AGAIN
    if left == _at_first(kind):
        _doubts.pop(kind, None)
        return
    if len(_doubts) >= KINDS:
        _doubts.clear()
    _doubts[kind] = left


_doubts: dict[Kind, int] = {}
"""What was learned of each kind, where it is not what one sees at first."""
