"""A copy that somebody takes out of the joint graph leaves views behind whose metadata knows its storage."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import ssd_fx
from ssd_fx.passes import pipeline
from ssd_fx.passes.alias.storages import untrusted
from ssd_fx.passes.joint import stale_views
from ssd_fx.passes.joint.stale_views import rejoin_views
from ssd_fx.passes.partition import Partition, storage_of
from tests.bitwise import kept, ours, prove_bitwise
from tests.passes import toys

aten = torch.ops.aten


def view_of_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).clone().view(4, 16) @ w.view(16, 4)).sum()


def views_of_a_view_of_a_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).clone().view(4, 16).t() @ w.view(16, 4).t()).sum()


def items_of_a_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first, second = (x @ w).clone().split(4)
    return (first @ second.t()).sum()


def other_strides(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The copy is dense and what it copies is not: without it the view has other strides."""
    return ((x @ w).t().clone(memory_format=torch.contiguous_format).t() * w).sum()


def no_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same, where without the copy the operator would fail."""
    return ((x @ w).t().clone(memory_format=torch.contiguous_format).view(64) * 2).sum()


def without_copies(toy: toys.Toy, see: Callable[[dict[str, list[fx.Node]]], None]) -> None:
    """Takes clones out of the joint graph as Inductor does, rejoins the views, and shows the nodes by their targets."""

    def use(gm: fx.GraphModule, inputs: object, **kwargs: object) -> None:
        for clone in gm.graph.find_nodes(op="call_function", target=aten.clone.default):
            clone.replace_all_uses_with(clone.args[0])
            gm.graph.erase_node(clone)
        before = {n: storage_of(n) for n in gm.graph.nodes}
        rejoin_views(gm.graph)
        names: dict[str, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            names.setdefault(str(node.target), []).append(node)
        names["changed"] = [n for n in gm.graph.nodes if storage_of(n) != before[n]]
        see(names)

    toys.with_joint(toy, toys.inputs(), use)


@pytest.mark.parametrize("toy", [view_of_copy, views_of_a_view_of_a_copy, items_of_a_copy], ids=toys.name)
def test_the_views_are_those_of_what_was_copied(toy: toys.Toy) -> None:
    def see(nodes: dict[str, list[fx.Node]]) -> None:
        product = nodes["aten.mm.default"][0]
        assert nodes["changed"]
        assert {storage_of(n) for n in nodes["changed"]} == {storage_of(product)}

    without_copies(toy, see)


@pytest.mark.parametrize("toy", [other_strides, no_view], ids=toys.name)
def test_what_would_be_another_tensor_is_left_in_dispute(toy: toys.Toy) -> None:
    def see(nodes: dict[str, list[fx.Node]]) -> None:
        assert nodes["changed"] == []

    without_copies(toy, see)


def no_dropout(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A dropout of 0 is a copy, which Inductor takes out before the partitioner runs."""
    y = F.dropout((x @ w).sin(), 0.0, training=True)
    return (y.view(4, 16) @ w.view(16, 4)).sum() + (y @ w).sum()


def test_inductor_s_are_stored_once_and_come_back(tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "machine": "default", "recompute": False}
    (found,) = ssd_fx.explain(no_dropout, options=options)(*toys.inputs()).dumps
    assert "aliases disagree" not in found.table
    assert found.plan["offloaded_bytes"] == found.plan["saved_bytes"]

    prove_bitwise(toys.trained(no_dropout), [kept(options), ours(options)])


def test_items_whose_metadata_know_another_storage_are_disputed() -> None:
    """As with symbolic sizes, where they are not rejoined: a release could stand before a read of an item."""
    partition = toys.partitioned(items_of_a_copy)
    forward = partition.forward.graph
    (clone,) = forward.find_nodes(op="call_function", target=aten.clone.default)
    source = clone.args[0]
    clone.replace_all_uses_with(source)
    forward.erase_node(clone)
    assert storage_of(source) in untrusted(partition)


def items_of_equal_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """split(mm), split(mm_1): once these are one, the second item knows the storage of mm_1."""
    return ((x @ w).split(4)[0].sin() @ (x @ w).split(4)[1].cos().t()).sum()


def test_items_of_merged_tuples_are_disputed_where_they_are_not_rejoined() -> None:
    def use(gm: fx.GraphModule, inputs: object, **kwargs: Any) -> Partition:
        with mock.patch.object(stale_views, "rejoin_views"):
            return pipeline.joint_of(gm, inputs, kwargs).partition()  # type: ignore[arg-type]

    partition = toys.with_joint(items_of_equal_products, toys.inputs(), use)
    items = partition.forward.graph.find_nodes(op="call_function", target=operator.getitem)
    storages = {storage_of(n) for n in items}
    assert len(storages) == 2
    assert storages <= untrusted(partition)


def test_items_of_merged_tuples_are_rejoined() -> None:
    groups = toys.planned(items_of_equal_products).plan.groups
    assert [(g.base, g.nbytes) for g in groups] == [("mm", 256), ("sin", 128), ("cos", 128)]
    assert not any(g.obstacle for g in groups)
