"""Graphs with collectives, in one process: the process group is PyTorch's fake one, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ssd_fx.passes.joint.collectives import communication, may_communicate
from tests.passes import toys

ops = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def group() -> str:
    return dist.distributed_c10d._get_default_group().group_name


class Reduced(torch.autograd.Function):
    """The sum over the ranks of `x`, waited for; with `early` what the collective returned, not what the wait did."""

    @staticmethod
    def forward(ctx: object, x: Tensor, early: bool) -> Tensor:
        under_way = ops.all_reduce(x, "sum", group())
        done: Tensor = ops.wait_tensor(under_way)
        return under_way if early else done

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def waited(x: Tensor, w: Tensor) -> Tensor:
    """mm -> all_reduce -> wait -> mm; the second product's gradient needs what the wait returned."""
    return (Reduced.apply(x @ w, False) @ w).sin().sum()


def not_waited(x: Tensor, w: Tensor) -> Tensor:
    """The same storage under the collective's own name, which it has from the moment on at which it starts."""
    return (Reduced.apply(x @ w, True) @ w).sin().sum()


def rows(toy: toys.Toy) -> dict[str, str]:
    """The decision of every group, and its reason, by the name of its base."""
    lines = toys.planned(toy).table.splitlines()
    return {line.split()[0]: line for line in lines if " keep " in line or " offload " in line}


def test_what_a_wait_returned_leaves() -> None:
    (row,) = (row for name, row in rows(waited).items() if "wait" in name)
    assert "offload    store>wait_tensor" in " ".join(row.split()).replace("offload ", "offload    ")


def test_what_a_collective_may_still_write_stays() -> None:
    (row,) = (row for name, row in rows(not_waited).items() if name.startswith("all_reduce"))
    assert "keep" in row
    assert "a collective may still be writing it" in row


def test_a_collective_communicates_and_its_wait_does_not() -> None:
    assert may_communicate(ops.all_reduce.default)
    assert may_communicate(torch.ops._dtensor.shard_dim_alltoall.default)
    assert not may_communicate(ops.wait_tensor.default)
    assert not may_communicate(torch.ops.aten.mm.default)
    assert not may_communicate(torch.ops.ssd_fx.store.default)
    assert communication(toys.partitioned(waited)) == (["all_reduce"], [])
