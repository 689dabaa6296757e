"""Tables in which layers are folded: those of the dump, with rows in order, and those of reports, with sums as rows.

    tanh    blocks.0.attn  256 B  offload          tanh  blocks.{0..1}.attn x 2  256 B  offload
    exp     blocks.0       256 B  keep        =>   exp   blocks.{0..1} x 2       256 B  keep
    tanh_1  blocks.1.attn  256 B  offload
    exp_1   blocks.1       256 B  keep

A layer is a run of rows whose modules have the same first number in their names. Two layers are alike if their rows
differ only in that number and in the names of nodes, which PyTorch numbers through the graph. The folded rows show the
names of the first layer. In a report all groups whose modules differ only in that number share a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

from ssd_fx.report.model import GroupRow

_LINES, _WIDTH = 3, 48  # source lines that a row names, and their columns


def aligned(rows: Sequence[tuple[str, ...]], right: Collection[int] = (), heads: int = 0) -> list[str]:
    """Lines of aligned columns, those with an index in `right` flush right.

    A column that is empty below the first `heads` rows is left out.
    """
    padded = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        if any(column[heads:]):
            padded.append([cell.rjust(width) if i in right else cell.ljust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    reason: of the decision, without names of nodes.
    where: the nodes that ours stand beside.
    layers: how many layers the row is for.
    source: the line of the model.
    """

    name: str
    module: str
    size: str
    decision: str
    reason: str = ""
    where: str = ""
    members: tuple[str, ...] = ()
    layers: int = 1
    source: str = ""

    SIZE: ClassVar[int] = 3  # the index of the size among the cells

    @property
    def cells(self) -> tuple[str, ...]:
        what = self.where or self.reason
        if self.where and self.reason:
            what = f"{self.where} ({self.reason})"
        members = f"[{', '.join(self.members)}]" if self.members else ""
        return self.name, self._modules(), self.source, self.size, self.decision, what, members

    def _modules(self) -> str:
        before, number, behind = parts(self.module)
        if self.layers == 1 or number is None:
            return self.module
        numbers = f"{{{number}..{number + self.layers - 1}}}"
        return f"{'.'.join((*before, numbers, *behind))} x {self.layers}"

    @property
    def layer(self) -> tuple[tuple[str, ...], int] | None:
        return layer_of(self.module)

    @property
    def alike(self) -> tuple[object, ...]:
        """What must be equal in two layers that are alike."""
        return parts(self.module)[2], self.source, self.size, self.decision, self.reason, len(self.members)


def layer_of(module: str) -> tuple[tuple[str, ...], int] | None:
    """The layer of a module: the names before the first number, and the number; None without a number."""
    before, number, _ = parts(module)
    return None if number is None else (before, number)


def parts(module: str) -> tuple[tuple[str, ...], int | None, tuple[str, ...]]:
    """`a.b.3.c` -> (a, b), 3, (c); without a number all names come before."""
    names = tuple(module.split("."))
    at = next((i for i, name in enumerate(names) if name.isdecimal()), None)
    return (names, None, ()) if at is None else (names[:at], int(names[at]), names[at + 1 :])


def fold(rows: Iterable[Row]) -> list[Row]:
    """The rows, with consecutive layers that are alike folded into one."""
    runs: list[list[list[Row]]] = []  # layers that are alike
    for _, found in groupby(rows, key=lambda row: row.layer):
        layer = list(found)
        if runs and _continues(runs[-1][-1], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [replace(row, layers=len(run)) for run in runs for row in run[0]]


def _continues(before: Sequence[Row], layer: Sequence[Row]) -> bool:
    a, b = before[0].layer, layer[0].layer
    follows = a is not None and b == (a[0], a[1] + 1)
    return follows and [row.alike for row in before] == [row.alike for row in layer]


@dataclass(slots=True)
class Layers:
    """Groups of all layers that share a row of a report.

    Attributes:
        what: the text about the groups.
        module: their module's name, with `{}` for the number of the layer.
        sums: the sums of their figures.
    """

    what: str
    module: str
    sums: tuple[float, ...]
    numbers: set[int] = field(default_factory=set)
    sources: dict[str, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.module.replace("{}", _spans(sorted(self.numbers))) if self.numbers else self.module

    @property
    def where(self) -> str:
        """`gpt.py:57,58`: at most three lines, and fewer if they are long."""
        named = list(self.sources)
        shown = [each for i, each in enumerate(named[:_LINES]) if not i or len(",".join(named[: i + 1])) <= _WIDTH]
        files = {each.rpartition(":")[0] for each in shown}
        if len(shown) > 1 and len(files) == 1 and "" not in files:
            shown = [shown[0], *(each.rpartition(":")[2] for each in shown[1:])]
        more = f" +{len(named) - len(shown)}" if len(named) > len(shown) else ""
        return ",".join(shown) + more


def together(rows: Iterable[tuple[GroupRow, str, tuple[float, ...]]]) -> list[Layers]:
    """Puts groups together that have one text, and one module but for the layer's number; in order of appearance.

    rows: groups, each with the text about it and its figures.
    """
    found: dict[tuple[str, str], Layers] = {}
    for row, what, figures in rows:
        before, number, behind = parts(row.module)
        module = ".".join([*before, *([] if number is None else ["{}"]), *behind])
        layers = found.setdefault((module, what), Layers(what, module, (0,) * len(figures)))
        layers.sums = tuple(map(sum, zip(layers.sums, figures, strict=True)))
        layers.sources[row.source or row.name] = None
        if number is not None:
            layers.numbers.add(number)
    return list(found.values())


def _spans(numbers: Sequence[int]) -> str:
    """`3`, `{0..11}`, or `{0..4,7}`; a long list is cut."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in spans]
    if len(shown) == 1 and ".." not in shown[0]:
        return shown[0]
    return f"{{{','.join(shown if len(shown) <= 4 else [*shown[:3], '..', shown[-1]])}}}"
