"""Rows of a table, one per alias group, in which layers that are alike are told once.

    tanh    blocks.0.attn  256 B  offload          tanh  blocks.{0..1}.attn x 2  256 B  offload
    exp     blocks.0       256 B  keep        =>   exp   blocks.{0..1} x 2       256 B  keep
    tanh_1  blocks.1.attn  256 B  offload
    exp_1   blocks.1       256 B  keep

A layer is the rows in a row whose modules have the same first number in their names. Two are alike that have the same
rows but for that number and for the names of nodes, which number on through the graph; those of the first are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `reason`: why, in words that name no node of the graph; `where`: the nodes; `layers`: how many it is
    for; `source`: the line of the model."""

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
        what = f"{self.where} ({self.reason})" if self.where and self.reason else self.where or self.reason
        members = f"[{', '.join(self.members)}]" if self.members else ""
        return self.name, self._modules(), self.source, self.size, self.decision, what, members

    def _modules(self) -> str:
        before, number, behind = _parts(self.module)
        if self.layers == 1 or number is None:
            return self.module
        numbers = f"{{{number}..{number + self.layers - 1}}}"
        return f"{'.'.join((*before, numbers, *behind))} x {self.layers}"

    @property
    def layer(self) -> tuple[tuple[str, ...], int] | None:
        """Which layer it is of: what its modules are called before the number, and the number."""
        before, number, _ = _parts(self.module)
        return None if number is None else (before, number)

    @property
    def alike(self) -> tuple[object, ...]:
        """What is equal in the same row of a layer that is alike."""
        return _parts(self.module)[2], self.source, self.size, self.decision, self.reason, len(self.members)


def _parts(module: str) -> tuple[tuple[str, ...], int | None, tuple[str, ...]]:
    """`a.b.3.c` -> (a, b), 3, (c); without a number all of it comes before."""
    parts = tuple(module.split("."))
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return (parts, None, ()) if at is None else (parts[:at], int(parts[at]), parts[at + 1 :])


def fold(rows: Iterable[Row]) -> list[Row]:
    """The rows, those of consecutive layers that are alike once."""
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
