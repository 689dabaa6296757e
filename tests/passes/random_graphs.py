"""Random programs over tensors: straight-line Python, drawn one line at a time by hypothesis.

Every line is run eagerly as soon as it is drawn, so that the next one sees real sizes, strides and dtypes; a line that
eager PyTorch refuses (an in-place change of a leaf, a view that strides do not allow) is not taken. A program therefore
always runs, and prints as the source that it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

# What eager PyTorch raises for a line that it refuses.
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
MOST_ELEMENTS = 600


def total(*tensors: Tensor) -> Tensor:
    """One number that depends on every element, through a nonlinearity that saves each tensor."""
    return sum((t.abs() if t.is_complex() else t).float().sin().sum() for t in tensors)  # type: ignore[return-value]


_NAMES = {"torch": torch, "F": torch.nn.functional, "total": total}


@dataclass(frozen=True)
class Input:
    """One argument of a program.

    `kind`: "leaf" (its gradient is compared), "hidden" (a leaf times one: nobody but the program holds it), "buffer"
    (no gradient, may be changed), "index" (int64 below `high`), "alias" (the expression `of` over earlier arguments).
    """

    name: str
    kind: str
    size: tuple[int, ...] = ()
    high: int = 1
    of: str = ""

    def __str__(self) -> str:
        size = list(self.size)
        made = {
            "leaf": f"torch.randn({size}).requires_grad_()",
            "hidden": f"torch.randn({size}).requires_grad_() * 1.0",
            "buffer": f"torch.randn({size})",
            "index": f"torch.randint({self.high}, {size})",
            "alias": self.of,
        }
        return f"{self.name} = {made[self.kind]}"


@dataclass(frozen=True)
class Program:
    """Arguments, lines and returned names; `repr` is its Python, with other random numbers.

    `refused`: lines that were drawn and that eager PyTorch did not take.
    """

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    refused: int = 0

    @property
    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program({', '.join(i.name for i in self.inputs)}):\n{body}    return {', '.join(self.outputs)},\n"

    def __repr__(self) -> str:
        return "\n" + "".join(f"{i}\n" for i in self.inputs) + self.source

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        names = dict(_NAMES)
        exec(compile(self.source, "<random program>", "exec"), names)
        return names["program"]  # type: ignore[return-value]

    def resized(self, old: int, new: int) -> Program:
        """The same with arguments of another size: `new` wherever a dimension was `old`."""
        sizes = [tuple(new if n == old else n for n in i.size) for i in self.inputs]
        return replace(self, inputs=tuple(replace(i, size=s) for i, s in zip(self.inputs, sizes, strict=True)))

    @property
    def trains(self) -> bool:
        """Whether eager PyTorch runs it, forward and backward."""
        leaves, values = arguments(self.inputs)
        try:
            roots, starts = cotangents(list(self.function()(*values.values())))
            torch.autograd.grad(roots, leaves, starts, allow_unused=True)
        except REFUSALS:
            return False
        return True

    @property
    def changes_in_place(self) -> bool:
        return any("_(" in line.replace("index_(", "") and " = " not in line for line in self.lines)


def arguments(inputs: tuple[Input, ...] | list[Input]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The leaves, whose gradients count, and the arguments by name; the same ones whenever it is called."""
    leaves: list[Tensor] = []
    values: dict[str, Tensor] = {}
    for given in inputs:
        _add_argument(given, leaves, values)
    return leaves, values


def _add_argument(given: Input, leaves: list[Tensor], values: dict[str, Tensor]) -> None:
    # By its number among the inputs: a program is drawn with values of other lines between them, and an index that
    # some line takes must be the same when it runs.
    generator = torch.Generator().manual_seed(int(given.name.lstrip("abcdefghijklmnopqrstuvwxyz")))
    if given.kind == "alias":
        values[given.name] = eval(given.of, dict(_NAMES), values)
    elif given.kind == "index":
        values[given.name] = torch.randint(given.high, given.size, generator=generator)
    else:
        value = torch.randn(given.size, generator=generator)
        if given.kind != "buffer":
            leaves.append(value.requires_grad_())
        values[given.name] = value * 1.0 if given.kind == "hidden" else value


def cotangents(outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a backward can start from, and what it starts with: no two elements alike."""
    roots = [t for t in outputs if t.requires_grad]
    return roots, [torch.linspace(-1, 1.5, t.numel()).reshape(t.shape).to(t.dtype) for t in roots]


@dataclass
class Draft:
    """A program while it is drawn: `values` holds what every name stands for, `leaves` what has a gradient."""

    draw: st.DrawFn
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)
    refused: int = 0

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def one(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def pick(self, fits: Callable[[Tensor], bool]) -> str:
        """The name of a value that fits: often a recent one, sometimes one of long ago.

        Raises: LookupError where none does.
        """
        names = [n for n, t in reversed(self.values.items()) if fits(t)]
        if not names:
            raise LookupError
        window = 3 if self.number(0, 2) else len(names)
        return names[self.number(0, min(window, len(names)) - 1)]

    def dim(self, name: str) -> int:
        """A dimension of a value that has one, counted from the end.

        Raises: LookupError for a scalar.
        """
        if self.values[name].dim() == 0:
            raise LookupError
        return -self.number(1, self.values[name].dim())

    def input(self, kind: str, *size: int, high: int = 1, of: str = "") -> str:
        """A new argument.

        Raises: one of REFUSALS, for an alias that cannot be made; then nothing has changed.
        """
        self.inputs.append(Input(f"{kind}{len(self.inputs)}", kind, size, high, of))
        if kind == "alias":
            try:
                self._again()  # a view of an argument as it was in the beginning
            except REFUSALS:
                self.inputs.pop()
                self._again()
                raise
        else:
            _add_argument(self.inputs[-1], self.leaves, self.values)
        return self.inputs[-1].name

    def weight(self, *size: int) -> str:
        """A leaf of this size: one that is there, or a new one."""
        known = [i.name for i in self.inputs if i.kind in ("leaf", "hidden") and i.size == size]
        return self.one(*known) if known and self.number(0, 1) else self.input(self.one("leaf", "hidden"), *size)

    def define(self, expression: str, results: int = 1) -> str:
        """`v1, v2 = expression`; the last name.

        Raises: one of REFUSALS; then nothing has changed.
        """
        names = [f"v{len(self.values) + i}" for i in range(results)]
        got = eval(expression, dict(_NAMES), self.values)
        got = (got,) if results == 1 else got
        if any(t.numel() > MOST_ELEMENTS for t in got):
            raise ValueError("too large")
        self.values |= dict(zip(names, got, strict=True))
        self.lines.append(f"{', '.join(names)} = {expression}")
        return names[-1]

    def change(self, statement: str) -> None:
        """A statement for its effect on what is there, which must leave everything differentiable.

        Raises: one of REFUSALS; then nothing has changed.
        """
        before = list(self.lines)
        self.lines.append(statement)
        try:
            exec(statement, dict(_NAMES), self.values)
            self._differentiate()
        except REFUSALS:
            self.lines[:] = before
            self._again()
            raise

    def _differentiate(self) -> None:
        roots, starts = cotangents(list(self.values.values()))
        torch.autograd.grad(roots, self.leaves, starts, retain_graph=True, allow_unused=True)

    def _again(self) -> None:
        """All values from the beginning, because somebody changed them."""
        self.leaves, self.values = arguments(self.inputs)
        torch.manual_seed(0)
        exec("\n".join(self.lines), dict(_NAMES), self.values)


def is_float(t: Tensor) -> bool:
    return t.dtype in (torch.float32, torch.bfloat16)


def is_single(t: Tensor) -> bool:
    return t.dtype == torch.float32


def is_integer(t: Tensor) -> bool:
    return not t.dtype.is_floating_point and not t.dtype.is_complex and t.dtype != torch.bool


def is_large(t: Tensor) -> bool:
    return t.dim() >= 1 and t.numel() >= 2


def broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(small, large) == torch.Size(large)
    except RuntimeError:
        return False


@st.composite
def programs(draw: st.DrawFn, most_lines: int = 16, rows: int = 0) -> Program:
    """Programs of up to `most_lines` operators, with an output that has a gradient.

    `rows`: the first dimension of the first argument, drawn where it is 0.
    """
    from tests.passes.random_operators import OPERATORS

    draft = Draft(draw)
    columns = draft.number(1, 9)
    draft.input("leaf", rows or draft.number(1, 7), columns)
    draft.define(f"leaf0 @ {draft.input('leaf', columns, draft.number(1, 8))}")
    for _ in range(draft.number(3, most_lines)):
        operator = draft.one(*OPERATORS)
        try:
            operator(draft)
        except LookupError:
            continue  # no value that the operator takes; IndexError is one too
        except REFUSALS:
            draft.refused += 1
    outputs = _outputs(draft)
    return Program(tuple(draft.inputs), tuple(draft.lines), outputs, draft.refused)


def _outputs(draft: Draft) -> tuple[str, ...]:
    """What nothing reads is returned or summed up, so that little is dead code; then anything, twice or an argument.

    Returned tensors live anyway, so most are summed up.
    """
    text = "\n".join(draft.lines)
    roots = [n for n, t in draft.values.items() if t.requires_grad and n.startswith("v")]
    unread = [n for n in roots if len(re.findall(rf"\b{n}\b", text)) == 1]
    summed = [n for n in unread if draft.number(0, 3)]
    total = [draft.define(f"total({', '.join(summed)})")] if summed else []
    returned = total + [n for n in unread if n not in summed]
    others = draft.draw(st.lists(st.sampled_from([*reversed(draft.values)]), max_size=2))
    return (*(returned[:4] or roots[-1:]), *others)
