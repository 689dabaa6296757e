"""Which bytes of a storage its saved views need, and how a dense tensor with just those bytes is made of its owner.

    owner      8 x 64, dense                              rows of 64 elements, columns 16 to 24 needed
    members    owner[:, 16:24], stride (64, 1)
    stored     owner.view(8, 64)[:, 16:24].clone()        8 x 8: an eighth of the bytes
    rebuilt    as_strided(stored, (8, 8), (8, 1), 0)

A `Box` describes the needed bytes: the storage is cut into rows of equal length, and the box is some columns of some
rows. A box of whole rows is one range of memory, which is stored without a copy. Any other box costs one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ssd_fx.compat import OpOverload, compute_required_storage_length
from ssd_fx.passes.groups import Box, Layout, Pack, contiguous_strides
from ssd_fx.passes.partition import tensor_of

aten = torch.ops.aten

# Copy a box only if it has less than this share of the storage. A copy costs memory traffic and, until the owner dies,
# memory; it saves I/O of the bytes outside of the box.
COPY_BELOW = 0.75


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored tensor: its layout, how it is made of the owner (None: it is the owner), the members within it."""

    layout: Layout
    pack: Pack | None
    members: tuple[Layout, ...]


def pack(owner: Layout, members: Sequence[Layout], *, part: bool, restride: bool) -> Stored | None:
    """The tensor to store, from which all members can be rebuilt; None where that is not certain. Sizes are plain.

    Offsets count from the owner's first element. An owner that is expanded (stride 0) is not packed. If it is an
    input, Inductor makes a new view of it, and no check would notice if the caller changed the input before the
    backward. If it is a result, its FakeTensor may be wrong: a custom kernel may return all elements.

    `part`: whether less than the owner may be stored; `restride`: whether the rebuilt members may have other strides
    than they had.
    """
    owner = replace(owner, offset=0)
    part = part and all(m.dtype == owner.dtype for m in members)
    if is_dense(owner):
        return _pack_dense(owner, members, part=part, restride=restride)
    return _pack_with_gaps(owner, members) if part and restride else None


def _pack_dense(owner: Layout, members: Sequence[Layout], *, part: bool, restride: bool) -> Stored | None:
    """Store all of a dense owner, or the smallest box if that pays."""
    if any(span(m) * m.dtype.itemsize > owner.nbytes for m in members):
        return None
    box = smallest_box(owner.numel, members) if part else None
    if box is None or box.numel == owner.numel or not _is_worth_it(box, owner.numel, restride):
        return Stored(owner, None, tuple(members))
    made = Pack(memory_order(owner), box, copy=not box.is_range)
    return Stored(_contiguous(owner, (box.height, box.width)), made, tuple(within(box, m) for m in members))


def _pack_with_gaps(owner: Layout, members: Sequence[Layout]) -> Stored | None:
    """A dense copy of an owner that has gaps, if its elements are just the smallest box that holds it and the members.

    A box of the members alone would not do. If the owner is elements 0, 2 and 4, and the members are 0 and 2, that box
    is 0 to 2. It has three elements, as the owner has, but not the same ones.
    """
    box = smallest_box(span(owner), [owner, *members], whole_rows=False)
    if box is None or box.numel != owner.numel or span(owner) <= owner.numel:
        return None
    order = memory_order(owner)
    layout = _contiguous(owner, tuple(owner.size[d] for d in order))
    return Stored(layout, Pack(order, copy=True), tuple(within(box, m) for m in members))


def _is_worth_it(box: Box, numel: int, restride: bool) -> bool:
    """Whether storing a box takes less than storing all. A range needs no copy."""
    return box.is_range or (restride and box.numel < COPY_BELOW * numel)


def smallest_box(numel: int, members: Sequence[Layout], *, whole_rows: bool = True) -> Box | None:
    """The smallest box that holds all members, in a range of `numel` elements that is cut into rows.

    `whole_rows`: the last row must be complete.
    """
    strides = {t for m in members for n, t in zip(m.size, m.stride, strict=True) if n > 1 and t > 1}
    lengths = [n * t for m in members for n, t in zip(m.size, m.stride, strict=True) if n > 1 and t > 0]
    rows = [r for r in sorted({numel, *strides, *lengths}) if numel % r == 0 or not whole_rows]
    found = [box for row in rows if (box := _box(numel, row, members)) is not None]
    return min(found, key=lambda b: (b.numel, not b.is_range, b.row), default=None)


def _box(numel: int, row: int, members: Sequence[Layout]) -> Box | None:
    """The smallest box with rows of that length; None where a member is no rectangle of rows and columns."""
    boxes = []
    for member in members:
        steps = [(n - 1, t) for n, t in zip(member.size, member.stride, strict=True) if n > 1]
        top, left = divmod(member.offset, row)
        bottom = top + sum(n * (t // row) for n, t in steps if t % row == 0)
        right = left + sum(n * t for n, t in steps if t % row)
        if right >= row:
            return None
        boxes.append(Box(row, (top, bottom + 1), (left, right + 1)))
    rows = (min(b.rows[0] for b in boxes), max(b.rows[1] for b in boxes))
    columns = (min(b.columns[0] for b in boxes), max(b.columns[1] for b in boxes))
    box = Box(row, rows, columns)
    inside = (box.rows[1] - 1) * row + box.columns[1] <= numel
    return box if inside and all(_merges_alike(m, within(box, m)) for m in members) else None


def within(box: Box, member: Layout) -> Layout:
    """The layout of a member in the tensor that holds only the box."""
    top, left = divmod(member.offset, box.row)
    dims = zip(member.size, member.stride, strict=True)
    stride = tuple(t if n == 1 or t % box.row else t // box.row * box.width for n, t in dims)
    return replace(member, stride=stride, offset=(top - box.rows[0]) * box.width + left - box.columns[0])


def _merges_alike(before: Layout, after: Layout) -> bool:
    """Whether every view of a member is possible in its new strides too."""
    dims = [d for d, n in enumerate(before.size) if n > 1]

    def merge(layout: Layout, i: int, j: int) -> bool:
        return layout.stride[i] == layout.size[j] * layout.stride[j]

    return all(merge(after, i, j) for i in dims for j in dims if i != j and merge(before, i, j))


def memory_order(layout: Layout) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(layout.size)), key=lambda d: (-layout.stride[d], -layout.size[d])))


def span(layout: Layout) -> int:
    """The number of elements from the first of the storage to the last of the tensor, both included."""
    return compute_required_storage_length(layout.size, layout.stride, layout.offset)


def is_dense(layout: Layout) -> bool:
    """Whether the elements fill a block of memory without gap or overlap, in any order; False if uncertain.

    Sizes may be symbolic: the answer follows from the expressions alone, and adds no guard.
    """
    expected: int | torch.SymInt = 1
    dims = [(n, t) for n, t in zip(layout.size, layout.stride, strict=True) if not statically_known_true(n == 1)]
    while dims:
        fitting = next((i for i, (_, t) in enumerate(dims) if statically_known_true(t == expected)), None)
        if fitting is None:
            return False
        expected = expected * dims.pop(fitting)[0]
    return True


def _contiguous(like: Layout, size: tuple[int, ...]) -> Layout:
    return Layout(size, contiguous_strides(size), 0, like.dtype, like.device)


def may_restride(placeholders: Iterable[fx.Node]) -> bool:
    """Whether the backward computes the same bits from these tensors if their strides change.

    It does with products of matrices and pointwise arithmetic of real numbers. It may not with:

    * a product with one row or column: BLAS adds up in another order for other strides;
    * a reduction, also one fused with something pointwise: likewise;
    * a transcendental function of the tensors themselves: its vector and scalar forms differ;
    * products of complex numbers, and sums with a factor (`alpha`): likewise.
    """
    work = [(p, True) for p in placeholders]  # (node, whether it is one of the tensors or a view of one)
    seen = set(work)  # pairs, because a function may get both a view and something computed of it
    while work:
        node, is_view = work.pop()
        for user in node.users:
            if user.op == "output" or _multiplies_matrices(user):
                continue
            viewed = _is_view(user)
            if not viewed and not (_is_exact(user) if is_view else _is_pointwise(user)):
                return False
            reached = (user, is_view and viewed)
            if reached not in seen:
                seen.add(reached)
                work.append(reached)
    return True


def is_reinterpreted(placeholders: Iterable[fx.Node]) -> bool:
    """Whether the backward views one of these tensors as elements of another size.

    Such a view needs strides and an offset that are multiples of the new size. A part of the storage may have others.
    """
    work = [(p, p.meta["val"].itemsize) for p in placeholders]
    while work:
        node, itemsize = work.pop()
        for user in node.users:
            if _is_view(user):
                is_other = user.meta["val"].itemsize != itemsize
                if is_other and user.target is not aten.view_as_real.default:  # it allows any stride
                    return True
                work.append((user, user.meta["val"].itemsize))
            elif _yields_views(user) or _yields_views(node):  # the user is an item of these views
                work.append((user, itemsize))
    return False


def _multiplies_matrices(node: fx.Node) -> bool:
    if node.target not in (aten.mm.default, aten.bmm.default):
        return False
    sizes = [n for source in node.all_input_nodes for n in source.meta["val"].shape[-2:]]
    return all(statically_known_true(n > 1) for n in sizes)


_EXACT = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.neg.default,
    aten.relu.default, aten.threshold_backward.default, aten.where.self, aten.clone.default, aten._to_copy.default,
    aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.eq.Scalar, aten.ne.Scalar,
)  # fmt: skip


def _is_exact(node: fx.Node) -> bool:
    operands = (t for n in (node, *node.all_input_nodes) if (t := tensor_of(n)) is not None)
    scaled = "alpha" in node.kwargs
    return node.target in _EXACT and not scaled and not any(t.is_complex() for t in operands)


def _is_view(node: fx.Node) -> bool:
    if tensor_of(node) is None or not isinstance(node.target, OpOverload):
        return False
    return node.target.is_view


def _yields_views(node: fx.Node) -> bool:
    """Whether a node is an operator that returns several views, such as `split`."""
    return tensor_of(node) is None and isinstance(node.target, OpOverload) and node.target.is_view


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
