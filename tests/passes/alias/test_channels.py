"""Which images are stored with their channels last, as Inductor lays them out, and what convolutions read of inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd_fx.passes.alias.channels import channels_last, lay_out
from ssd_fx.passes.alias.copies import merge_copies
from ssd_fx.passes.alias.storages import alias
from ssd_fx.passes.decide import decide
from ssd_fx.passes.plan import Plan
from tests.passes import toys
from tests.passes.lowered import lower
from tests.test_channels_last import SEEN

FIRST, LAST = (512, 64, 8, 1), (512, 1, 64, 8)
IN_PLACE = {"by_place", "bits"}  # these see where elements lie


def seen(see: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """conv -> sigmoid -> conv; sigmoid -> see: the sigmoid is saved."""
    y = F.conv2d(x, w, padding=1).sigmoid()
    return F.conv2d(y, v, padding=1).square().sum() + see(y).sin().sum()


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(size, requires_grad=True) for size in ((2, 3, 8, 8), (8, 3, 3, 3), (8, 8, 3, 3)))


def identity(y: Tensor) -> Tensor:
    return y


@pytest.mark.parametrize("see", [identity, *SEEN])
def test_images_are_stored_as_inductor_lays_them_out(see: Callable[[Tensor], Tensor]) -> None:
    plan = decide(toys.partitioned(partial(seen, see), *inputs()), toys.options())
    (group,) = (g for g in plan.groups if g.base == "sigmoid")
    assert group.stored.stride == (FIRST if see.__name__ in IN_PLACE else LAST)
    assert all(m.layout.stride == group.stored.stride for m in group.members if m.name == "sigmoid")


def squared_flat(y: Tensor) -> Tensor:
    return y.view(2, -1).square()


def test_a_view_that_the_other_order_does_not_allow_becomes_a_reshape() -> None:
    planned = toys.planned(partial(seen, squared_flat), *inputs(), spare=False)
    backward = planned.partition.backward.graph
    (group,) = (g for g in planned.plan.offloaded if g.base == "sigmoid")
    assert group.stored.stride == LAST
    assert any(n.target is torch.ops.aten.reshape.default for n in backward.nodes)


def test_a_saved_view_is_rebuilt_by_its_place_in_the_order_of_the_graph() -> None:
    def saves_a_view(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w, padding=1).sigmoid()
        return F.conv2d(y, v, padding=1).square().sum() + (y.view(2, -1).detach() * y.view(2, -1)).sum()

    plan = decide(toys.partitioned(saves_a_view, *inputs()), toys.options())
    (group,) = (g for g in plan.groups if g.base == "sigmoid")
    assert len(group.members) == 2
    assert group.stored.stride == FIRST


def test_what_is_computed_of_an_image_may_be_read_by_place_too() -> None:
    """Its strides are those of the image."""
    partition = toys.partitioned(partial(seen, identity), *inputs())
    plan = merge_copies(partition, alias(partition, Plan(graph="")))
    graph = partition.backward.graph
    computed = next(n for n in partition.bwd_placeholders["sigmoid"].users if n.op == "call_function")
    assert lay_out(partition, plan).groups[0].stored.stride == LAST
    with graph.inserting_after(computed):
        graph.call_function(torch.ops.aten.as_strided.default, (computed, [4], [64]))
    assert lay_out(partition, plan).groups[0].stored.stride == FIRST


def test_a_nested_region_returns_the_strides_of_its_graph() -> None:
    partition = toys.partitioned(partial(seen, identity), *inputs())
    plan = merge_copies(partition, alias(partition, Plan(graph="")))
    assert "sigmoid" in channels_last(partition)
    del partition.fwd_output.meta["desc"]
    assert not channels_last(partition)
    partition.recompile()
    assert lay_out(partition, plan) == plan


def test_an_image_exists_in_one_order() -> None:
    forward, backward = lower(partial(seen, identity), *inputs(), options={"recompute": False, "spare": False})
    assert f"empty_strided_cpu((2, 8, 8, 8), {FIRST}" not in forward.code
    assert str(list(LAST)) in next(line for line in backward.code.splitlines() if "ssd_fx_ops.load(" in line)


def test_images_and_weights_themselves_are_saved_and_no_copy_in_another_order() -> None:
    forward, _ = lower(partial(seen, identity), *inputs(), options={"recompute": False, "budget": 1.0})
    (returned,) = (line for line in forward.code.splitlines() if line.strip().startswith("return ("))
    assert all(name in returned for name in ("primals_1", "primals_2", "primals_3"))


def test_a_loop_that_copies_into_a_cat_does_not_begin_it_before_the_other_half_is_there() -> None:
    def joined(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w, padding=1).sigmoid()
        z = F.conv2d(F.conv2d(y, v, padding=1).sigmoid(), v, padding=1)
        return F.conv2d(torch.cat((y, z), 1), torch.cat((v, v), 1), padding=1).square().sum()

    forward, _ = lower(joined, *inputs(), options={"recompute": False, "spare": False})
    lines = forward.code.splitlines()
    begins = next(i for i, line in enumerate(lines) if "empty_strided_cpu((2, 16, 8, 8)" in line)
    calls = [i for i, line in enumerate(lines) if "extern_kernels.convolution(" in line]
    assert sum(call < begins for call in calls) == 3


def test_a_convolution_of_single_channels_reads_one_contiguous_copy_of_an_image() -> None:
    """Inductor would make one with rows before channels, and ATen another."""

    def depthwise(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.conv2d(x, w, padding=1).sigmoid()
        return F.conv2d(y, v[:, :1], padding=1, groups=8).sin().sum()

    _, backward = lower(depthwise, *inputs(), options={"recompute": False, "budget": 1.0})
    made = [line for line in backward.code.splitlines() if "empty_strided_cpu((2, 8, 8, 8)" in line]
    assert not any("(512, 8, 64, 1)" in line for line in made)
    assert sum(f"{FIRST}" in line for line in made) == 2
