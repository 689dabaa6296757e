"""Alias groups: the saved tensors that share bytes, and what is stored of those.

storage of base      ..[========]......        box: the part that any member reads
stored (layout)        [========]              packed: dense, in the order of memory
members                [==]  [===]             each a layout within what is stored
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, strides and storage offset in elements of `dtype`; `conj` and `neg` are lazy, on top of the bytes.

    All of them may be symbolic: whoever compares such layouts must not add guards (`packing.is_dense` does not).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    conj: bool = False
    neg: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        where = (tuple(tensor.shape), tuple(tensor.stride()), cast(int, tensor.storage_offset()))
        return Layout(*where, tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.size, *self.stride, self.offset)

    @property
    def is_symbolic(self) -> bool:
        return any(isinstance(i, torch.SymInt) for i in self.numbers)


@dataclass(frozen=True, slots=True)
class Box:
    """Columns of rows of a storage that is cut into rows of `row` elements; `rows` and `columns` are [from, to)."""

    row: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def numel(self) -> int:
        return self.height * self.width

    @property
    def is_range(self) -> bool:
        """Whether the box is one piece of memory."""
        return self.height == 1 or self.width == self.row


@dataclass(frozen=True, slots=True)
class Pack:
    """How the stored tensor is made of the base.

    The dimensions in `expanded` are cut to one element, the others brought into memory `order`, then the `box` is
    taken out and, if it must be, copied.
    """

    expanded: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    box: Box | None = None
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A saved tensor that is a copy of bytes stored anyway: the backward makes it again.

    `node` is the forward node that copies, `source` the layout of what it copies: within the copy `of`, or within the
    stored tensor where that is None.
    """

    node: str
    source: Layout
    of: Copy | None = None

    @property
    def chain(self) -> tuple[Copy, ...]:
        """All copies up to this one, the first is one of the stored tensor."""
        return (*(self.of.chain if self.of is not None else ()), self)


@dataclass(frozen=True, slots=True)
class Member:
    """One saved tensor of a group: a forward output and the backward placeholder of the same name.

    `layout` is that of the member within the stored tensor, or within the copy where it is a member of one.
    """

    name: str
    layout: Layout
    copy: Copy | None = None


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """All saved tensors that share one storage or are copies of it: the unit of every decision.

    `base` is the forward node that owns the storage; what a store writes is the base itself, or what `pack` makes of
    it, and has `layout`. `obstacle` says why the group cannot be offloaded, or is empty. `nbytes` is what stays in
    memory if the group is kept: its storages. `needed_nbytes`: what a store writes and a load reads, where it is less.
    `is_hint`: sizes are symbolic, and the bytes those of the call that was compiled.
    """

    slot: int
    base: str
    layout: Layout | None
    members: tuple[Member, ...]
    nbytes: int
    obstacle: str = ""
    pack: Pack | None = None
    needed_nbytes: int | None = None
    is_hint: bool = False

    @property
    def stored_nbytes(self) -> int:
        """Bytes that are written once and read once."""
        return self.nbytes if self.needed_nbytes is None else self.needed_nbytes
