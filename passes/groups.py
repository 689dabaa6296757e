"""Alias groups: the saved tensors that share bytes, and which of these bytes are stored.

storage of base      ..[========]......        box: the part that the members need
stored (layout)        [========]              pack: dense, in the order of memory
members                [==]  [===]             each has a layout within the stored tensor
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, strides and storage offset in elements of `dtype`; `conj` and `neg` are lazy: the bytes do not have them.

    Hazard: numbers may be symbolic. Compare such layouts without adding guards, as `packing.is_dense` does.
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
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.size, *self.stride, self.offset)

    @property
    def is_symbolic(self) -> bool:
        return any(isinstance(i, torch.SymInt) for i in self.numbers)


@dataclass(frozen=True, slots=True)
class Box:
    """Some columns of some rows of a storage cut into rows of `row` elements; `rows` and `columns` are [from, to)."""

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
    """How the stored tensor is made of the base, step by step.

    The dimensions are permuted to the `order` in memory. The `box` is taken out. `copy`: the result is copied.
    """

    order: tuple[int, ...] = ()
    box: Box | None = None
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of stored bytes, which the backward makes again.

    `node`: the forward node that copies. `of`: the copy that it copies, or None for the stored tensor. `source`: the
    layout of the copied elements, within `of` or the stored tensor.
    """

    node: str
    source: Layout
    of: Copy | None = None

    @property
    def chain(self) -> tuple[Copy, ...]:
        """All copies up to this one; the first is a copy of the stored tensor."""
        return (*(self.of.chain if self.of is not None else ()), self)


@dataclass(frozen=True, slots=True)
class Member:
    """One saved tensor of a group: a forward output and the backward placeholder of the same name.

    `copy`: the copy that has the member's bytes, or None for the stored tensor. `layout`: the member's layout in that.
    """

    name: str
    layout: Layout
    copy: Copy | None = None


@dataclass(frozen=True, slots=True)
class AliasGroup:
    """All saved tensors that share one storage or are copies of it: the unit of every decision.

    `base`: the forward node that owns the storage. The store writes the base itself, or the tensor that `pack` makes of
    it, with the layout `layout`. `nbytes`: bytes of the storages, which stay in memory if the group is kept.
    `stored_nbytes`: bytes that are written once and read once. `obstacle`: why the group cannot be offloaded, or empty.
    Where sizes are symbolic, bytes are those of the call that was compiled.
    """

    slot: int
    base: str
    layout: Layout | None
    members: tuple[Member, ...]
    nbytes: int
    stored_nbytes: int
    obstacle: str = ""
    pack: Pack | None = None

    @property
    def stored(self) -> Layout:
        """`layout`, of a group that has no obstacle."""
        assert self.layout is not None
        return self.layout


def is_channels_last(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the channels of each pixel follow each other for certain; asking adds no guard."""
    return _fits(size, stride, channels_last_strides(size))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor lies row after row for certain; asking adds no guard."""
    return _fits(size, stride, contiguous_strides(size))


def _fits(size: Sequence[int], stride: Sequence[int], wanted: Sequence[int]) -> bool:
    steps = zip(size, stride, wanted, strict=True)
    return all(statically_known_true(sym_eq(a, b)) or statically_known_true(n == 1) for n, a, b in steps)


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))


def channels_last_strides(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of images in which the channels of each pixel follow each other."""
    _, channels, rows, columns = size
    return (math.prod((channels, rows, columns)), 1, columns * channels, channels)
