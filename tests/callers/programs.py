"""Random callers: straight-line Python that trains compiled blocks in ways that a training loop may, and in some it may
not; drawn one line at a time by hypothesis.

Every line stands in `with t:`, which notes how it ended and goes on, so that errors are outcomes like others. A program
prints as a script that runs it and says what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.callers.blocks import BLOCKS
from tests.callers.caller import Caller

# "Keeps" is for programs where something is computed again.
KINDS = tuple(block for block in BLOCKS if block != "Keeps")
MODES = ("static", "dynamic", "own", "automatic")


@dataclass(frozen=True)
class Program:
    """`mode`: whether blocks are compiled for one size ("static", "own"), for any ("dynamic") or for any once a second
    one was seen ("automatic"), in code that all programs share or, the others, of their own; `precision`: a key of
    `caller.DTYPES`."""

    mode: str
    precision: str
    lines: tuple[str, ...]

    @property
    def source(self) -> str:
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program(t):\n{body}    t.end(locals())\n"

    def __repr__(self) -> str:
        head = "\nimport torch\nfrom tests.callers.runs import main\n\n\n"
        return f"{head}{self.source}\n\nmain(program, mode={self.mode!r}, precision={self.precision!r})\n"

    def function(self) -> Callable[[Caller], None]:
        import torch

        names: dict[str, Any] = {"torch": torch}
        exec(compile(self.source, "<random caller>", "exec"), names)
        return names["program"]  # type: ignore[no-any-return]


@dataclass
class Draft:
    """A program while it is drawn. `kinds`: of blocks that it may have; `values`: names of tensors and their rows;
    `blocks`: names and what they call."""

    draw: st.DrawFn
    mode: str
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    leaves: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # by blocks, and not in a loss yet
    blocks: dict[str, str] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    count: int = 0
    changed: bool = False  # some tensor, in place

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def one(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def step(self, line: str, *contexts: str) -> None:
        self.lines.append(f"with {', '.join(('t', *contexts))}: {line}")

    def value(self, rows: int = 0) -> str:
        """A tensor, often a recent one.

        Raises: LookupError where there is none of so many rows.
        """
        fit = [v for v, n in reversed(self.values.items()) if rows in (0, n)]
        if not fit:
            raise LookupError
        return fit[self.number(0, min(len(fit), self.one(2, len(fit))) - 1)]

    def add(self, name: str, rows: int) -> str:
        self.values[name] = rows
        return name

    def often(self, how: str) -> tuple[str, ...]:
        """Most of all where the code is the program's own."""
        return (how,) if self.mode in ("static", "dynamic") else (how,) * 4

    # ---- what there is

    def input(self) -> str:
        rows = self.one(*self.sizes)
        name = self.add(self.name("x"), rows)
        kind = self.one("hidden", "leaf", "hidden", "leaf", "plain")
        self.lines.append(f"{name} = t.{kind}({rows})")
        if kind == "leaf":
            self.leaves.append(name)
        return name

    def block(self) -> str:
        kind, name = self.one(*self.kinds), f"b{len(self.blocks)}"
        again = self.one(kind, *self.blocks.values())  # code that serves two instances
        how = f", hidden={self.one(8, 10)}" if again == "Mlp" and self.mode in ("own", "automatic") else ""
        self.blocks[name] = again
        self.lines.append(f"{name} = t.block({again!r}{how})")
        return name

    # ---- what happens

    def call(self) -> None:
        block = self.one(*self.blocks)
        kind, rows = self.blocks[block], 0
        if kind == "Embed":
            rows = self.one(*self.sizes)
            arguments = f"t.index({rows})"
        else:
            x = self.value()
            rows = self.values[x]
            if kind == "Overwrites":
                # Written into once, and by nobody else: PyTorch saves the changed tensor, we the numbers in it, so
                # that a second change is an error there and none here.
                x, of = self.name("w"), x
                self.step(f"{x} = {of} * 1.0")
            arguments = f"{x}, {self.value(rows)}" if kind == "Pair" else x
        how = self.one("", "", "", "keep", "thread", *self.often("checkpoint"), "no_grad")
        if kind == "Overwrites" and how in ("keep", "checkpoint"):
            how = ""  # what it changes is saved by the node that returns it: kept or computed again, a circle of both
        contexts = {"keep": ("t.keep()",), "no_grad": ("torch.no_grad()",)}.get(how, ())
        line = f"{block}({arguments})"
        if how == "checkpoint":
            # What is compiled within a checkpoint is kept, for all programs that share the code.
            reentrant = self.mode in ("static", "dynamic") or self.number(0, 2) == 0
            line = f"t.checkpoint({block}, {arguments}, reentrant={reentrant})"
        elif how == "thread":
            line = f"t.thread(lambda: {line})"
        result = self.add(self.name("y"), rows)
        self.made.append(result)
        if kind == "Views":
            other = self.add(self.name("y"), rows)
            self.step(f"{result}, {other} = {line}", *contexts)
        else:
            self.step(f"{result} = {line}", *contexts)

    def glue(self) -> None:
        x = self.value()
        y = self.value(self.values[x])
        how = (f"{x} * 2.0", f"{x} + {y}", f"{x} * {y}", f"{x}.sin()", f"{x}.detach()")
        # A view of what a compiled block returned, which is then changed, crashes PyTorch 2.13 where its node is asked.
        line = self.one(*how, *([f"{x}.view_as({x})"] if x.startswith("x") else []))
        result = self.add(self.name("v"), self.values[x])
        self.made.append(result)
        self.step(f"{result} = {line}")

    def loss(self) -> str:
        parts = [self.one(*reversed(self.made)) if self.made and self.number(0, 4) else self.value()]
        if self.number(0, 2) == 0:
            parts.append(self.value())
        self.made = [y for y in self.made if y not in parts]
        name = self.name("l")
        self.step(f"{name} = t.loss({', '.join(parts)})")
        self.losses.append(name)
        return name

    def backward(self) -> None:
        root = self.one(*reversed(self.losses)) if self.losses and self.number(0, 1) else self.loss()
        how = self.one("", "retain_graph=True", "", "retain_graph=True")
        line = f"{root}.backward({how})"
        if self.number(0, 2) == 0:
            how = self.one(how, how, "create_graph=True")  # not for `backward`, of which PyTorch says that it leaks
            line = f"t.note(torch.autograd.grad({root}, {self.subset()}, allow_unused=True{', ' + how if how else ''}))"
        if self.number(0, 6) == 0:
            line = f"t.thread(lambda: {line})"
        self.step(line)

    def twice(self) -> None:
        """The graph of one loss is kept, for it or for another loss on the same results."""
        root = self.loss()
        self.step(f"{root}.backward(retain_graph=True)")
        if self.number(0, 1):
            line = self.lines[-2].replace(f"{root} =", f"{self.name('l')} = 2.0 *")
            self.lines.append(line)
            root = line.split()[2]
        self.step(f"{root}.backward()")

    def subset(self) -> str:
        """What gradients are asked of: some tensors, or some parameters of a block."""
        which = self.number(0, 2)
        if which == 0 and self.blocks:
            number = self.number(0, len(self.blocks) - 1)
            return f"t.parameters({number})[:{self.number(1, 2)}]"
        names = self.draw(st.lists(st.sampled_from([*reversed(self.values)]), min_size=1, max_size=2, unique=True))
        return f"[{', '.join(names)}]"

    def two_threads(self) -> None:
        """Two steps at a time, of graphs that share no node: where two threads free one graph, PyTorch crashes."""
        able = [b for b, kind in self.blocks.items() if kind not in ("Embed", "Pair", "Running", "Overwrites")]
        if able:
            calls = [f"lambda: t.step({self.one(*able)}, {self.value()})" for _ in range(2)]
            self.step(f"t.note(t.thread({', '.join(calls)}))")

    def change(self) -> None:
        self.changed = True
        x = self.value()
        self.step(*self.one(*CHANGES, *(UNSEEN if x in self.leaves else ()))(x))

    def update(self) -> None:
        number = self.number(0, len(self.blocks) - 1)
        parameter = f"t.parameters({number})[0]"
        line = self.one(
            f"t.sgd({number})",
            f"t.sgd({number})",
            f"{parameter}.data.mul_(2.0)",
            f"{parameter}.detach().numpy().fill(0.25)",
            f"{parameter}.data = {parameter}.data * 2.0",
            f"{parameter}.grad = None",
        )
        self.step(line)

    def drop(self) -> None:
        gone = self.one(*self.values, *self.losses)
        if len(self.values) > 1 or gone in self.losses:
            self.step(f"del {gone}")
            self.values.pop(gone, None)
            self.losses = [n for n in self.losses if n != gone]
            self.made = [n for n in self.made if n != gone]

    def hook(self) -> None:
        if self.changed:
            return  # PyTorch 2.13 crashes where a hook is put on a view that was changed under no_grad
        x = self.value()
        self.step(self.one(f"{x}.register_hook(lambda g: g * 3.0)", f"{x}.register_hook(t.note)", f"{x}.retain_grad()"))

    def evaluate(self) -> None:
        block = self.one(*self.blocks)
        if self.blocks[block] in ("Embed", "Pair"):
            return
        self.step(f"t.note({block}({self.value()}))", "torch.no_grad()")


# In place, differentiable and not; autograd sees these.
CHANGES: tuple[Callable[[str], tuple[str, ...]], ...] = (
    lambda x: (f"{x}.add_(1.0)", "torch.no_grad()"),
    lambda x: (f"{x}.mul_(0.5)",),
    lambda x: (f"{x}[:1].zero_()",),
    lambda x: (f"{x}.detach().mul_(2.0)",),
)
# Behind autograd's back, of leaves, which stay in memory. Of what leaves PyTorch would read the new value, and we the
# old one or the new one, as it was read back or still there: nobody is told, and no gradient of either is right.
UNSEEN: tuple[Callable[[str], tuple[str, ...]], ...] = (
    lambda x: (f"{x}.data.mul_(2.0)",),
    lambda x: (f"{x}.detach().numpy().fill(0.25)",),
)

ACTIONS: tuple[Callable[[Draft], object], ...] = (
    *[Draft.call] * 5,
    *[Draft.backward] * 4,
    *[Draft.twice] * 2,
    *[Draft.change] * 3,
    *[Draft.glue] * 2,
    Draft.update,
    Draft.drop,
    Draft.hook,
    Draft.evaluate,
    Draft.two_threads,
    Draft.loss,
    Draft.input,
)


@st.composite
def programs(
    draw: st.DrawFn, most_lines: int = 12, modes: tuple[str, ...] = MODES, kinds: tuple[str, ...] = KINDS
) -> Program:
    """Programs of up to `most_lines` actions, each with a forward and a backward at least."""
    mode = draw(st.sampled_from([*modes[:1] * 5, *modes[:2] * 2, *modes]))
    precision = draw(st.sampled_from(["float32"] * 5 + ["bfloat16", "autocast", "autocast"]))
    sizes = {"static": (4,), "own": (4,), "dynamic": (2, 3, 4, 5), "automatic": (3, 4, 5)}[mode]
    draft = Draft(draw, mode, sizes, kinds)
    for _ in range(draft.number(1, 3)):
        draft.block()
    for _ in range(draft.number(1, 2)):
        draft.input()
    draft.call()
    for _ in range(draft.number(2, most_lines)):
        draft.one(*ACTIONS)(draft)
    for y in draft.made[-3:] if draft.number(0, 2) else ():
        draft.step(f"t.loss({y}).backward()")
    return Program(mode, precision, tuple(draft.lines))
