"""Texts in columns, and the units of figures in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
