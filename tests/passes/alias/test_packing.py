"""What is stored of a storage: exact on small layouts, and for random views equal to the views themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.passes.alias.packing import COPY_BELOW, is_dense, may_restride, memory_order, pack, span
from ssd_fx.passes.groups import Layout, Pack

CPU = torch.device("cpu")


def layout(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Layout:
    return Layout(size, stride, offset, torch.float32, CPU)


def stored_of(owner: torch.Tensor, pack: Pack | None) -> torch.Tensor:
    """What `rebuild.packed` says in nodes."""
    made = owner
    if pack and pack.order:
        made = made.permute(pack.order)
    if pack and pack.box:
        made = made.reshape(-1, pack.box.row)[slice(*pack.box.rows), slice(*pack.box.columns)]
    return made.clone(memory_format=torch.contiguous_format) if pack and pack.copy else made


@st.composite
def owners(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of distinct elements, dense in any order of its dimensions, or with gaps."""
    size = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
    owner = torch.arange(float(torch.Size(size).numel())).view(size).permute(draw(st.permutations(range(len(size)))))
    if draw(st.sampled_from([False, False, True])):
        return torch.arange(2.0 * owner.numel()).view(*owner.shape, 2)[..., 0]
    return owner


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    view = base
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, view.dim() - 1))
        length = view.shape[dim]
        match draw(st.sampled_from(["slice", "slice", "transpose", "split", "window"])):
            case "slice":
                start = draw(st.integers(0, length - 1))
                stop, step = draw(st.integers(start + 1, length)), draw(st.integers(1, 3))
                view = view[(slice(None),) * dim + (slice(start, stop, step),)]
            case "transpose":
                view = view.transpose(0, dim)
            case "split" if length % 2 == 0:
                view = view.unflatten(dim, (2, length // 2))
            case "window" if view.dim() < 6:
                view = view.unfold(dim, draw(st.integers(1, length)), draw(st.integers(1, 2)))
    return view


@given(st.data(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_views_are_had_from_what_is_stored(data: st.DataObject, part: bool, restride: bool) -> None:
    owner = data.draw(owners())
    wanted = data.draw(st.lists(views(owner), min_size=1, max_size=3))
    found = pack(Layout.of(owner), [Layout.of(v) for v in wanted], part=part, restride=restride)
    if found is None:
        assert not is_dense(layout(tuple(owner.shape), owner.stride())), "a dense owner always can be stored"
        return
    stored = stored_of(owner, found.pack)
    assert stored.numel() == found.layout.numel
    assert is_dense(found.layout)
    flat = torch.empty(found.layout.numel)  # as a load returns it: the stored elements, at offset 0
    loaded = flat.as_strided(found.layout.size, found.layout.stride).copy_(stored)
    for view, member in zip(wanted, found.members, strict=True):
        assert span(member) <= found.layout.numel
        assert torch.equal(torch.as_strided(loaded, member.size, member.stride, member.offset), view)
        if not (part and restride):
            assert member.stride == view.stride()
    if found.pack is not None and found.pack.copy and is_dense(Layout.of(owner)):
        assert found.layout.numel < COPY_BELOW * owner.numel()


def test_a_column_of_an_eighth() -> None:
    found = pack(layout((8, 64), (64, 1)), [layout((8, 8), (64, 1), 16)], part=True, restride=True)
    assert found is not None
    assert (found.layout.size, found.layout.stride) == ((8, 8), (8, 1))
    assert (found.members[0].stride, found.members[0].offset) == ((8, 1), 0)


def test_strides_that_must_stay_keep_the_base() -> None:
    owner = layout((8, 64), (64, 1))
    found = pack(owner, [layout((8, 8), (64, 1), 16)], part=True, restride=False)
    assert found is not None
    assert (found.layout, found.pack) == (owner, None)


@pytest.mark.parametrize(("columns", "copied"), [(47, True), (48, False)])
def test_three_quarters_are_not_worth_a_copy(columns: int, copied: bool) -> None:
    found = pack(layout((8, 64), (64, 1)), [layout((8, columns), (64, 1))], part=True, restride=True)
    assert found is not None
    assert (found.pack is not None and found.pack.copy) == copied


def test_q_k_v_that_cover_the_base_are_the_base() -> None:
    owner = layout((8, 24), (24, 1))
    found = pack(owner, [layout((8, 8), (24, 1), offset) for offset in (0, 8, 16)], part=True, restride=True)
    assert found is not None
    assert (found.layout, found.pack) == (owner, None)


def reads(function: Callable[[torch.Tensor], object]) -> list[fx.Node]:
    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 8)).graph
    return [n for n in graph.nodes if n.op == "placeholder"]


@pytest.mark.parametrize("view_first", [True, False])
def test_a_function_fed_with_a_view_and_with_what_is_computed_of_it(view_first: bool) -> None:
    """`atan2` may not see other strides; met from the side of `relu` alone it could."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.atan2(x.t(), x.relu()) if view_first else torch.atan2(x.relu(), x.t())

    assert may_restride(reads(lambda x: torch.atan2(x.relu(), x.neg())))
    assert not may_restride(reads(function))


@pytest.mark.parametrize(("columns", "may"), [(1, False), (2, True)])
def test_a_product_with_a_vector_keeps_its_strides(columns: int, may: bool) -> None:
    """BLAS adds up in another order for other strides if it multiplies a matrix by one column."""
    assert may_restride(reads(lambda x: torch.mm(x, torch.ones(8, columns)))) is may


def test_memory_order() -> None:
    assert memory_order(layout((2, 3, 4), (1, 8, 2))) == (1, 2, 0)


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 3), (4, 1), False), ((2, 3), (0, 1), False),
     ((1, 3), (7, 1), True), ((), (), True), ((3, 3), (1, 1), False)],
)  # fmt: skip
def test_dense(size: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(layout(size, stride)) is dense


def test_a_box_of_as_many_elements_as_an_owner_with_gaps() -> None:
    """Elements 0 and 2 of the storage lie in a box of three. So many has the owner, but its own are 0, 2 and 4."""
    owner = torch.arange(6.0).view(1, 3, 2)[..., 0]
    members = [owner[:, 0:1], owner[:, 1:2]]
    found = pack(Layout.of(owner), [Layout.of(m) for m in members], part=True, restride=True)
    assert found is not None
    loaded = torch.empty(found.layout.numel).as_strided(found.layout.size, found.layout.stride)
    loaded.copy_(stored_of(owner, found.pack))
    rebuilt = [torch.as_strided(loaded, m.size, m.stride, m.offset) for m in found.members]
    assert [m.item() for m in rebuilt] == [m.item() for m in members]
