"""Rows of a table, one per alias group, in which equal layers are folded.

    tanh    blocks.0.attn  256 B  offload          tanh  blocks.{0..1}.attn x 2  256 B  offload
    exp     blocks.0       256 B  keep        =>   exp   blocks.{0..1} x 2       256 B  keep
    tanh_1  blocks.1.attn  256 B  offload
    exp_1   blocks.1       256 B  keep

A layer is a run of rows whose modules have the same first number in their names. Two layers are alike if their rows
differ only in that number and in the names of nodes, which PyTorch numbers through the graph. The folded rows show the
names of the first layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar


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
