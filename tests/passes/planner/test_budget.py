"""What a budget is of: the bytes that stay, or the peak alone where the graph is a whole step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ssd_fx
from ssd_fx.passes import pipeline
from ssd_fx.passes.decide import decide
from tests.passes import toys


def two_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """relu -> mm -> relu -> mm"""
    return (((x @ w).relu() @ w).relu() @ w).relu() @ w


def with_loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return two_products(x, w).sum()


def test_a_graph_whose_gradients_are_of_numbers_is_a_whole_step() -> None:
    assert toys.partitioned(with_loss, *toys.inputs()).is_whole_step
    assert not toys.partitioned(two_products, *toys.inputs()).is_whole_step


def test_states_of_generators_are_no_gradients() -> None:
    """The backward of a checkpoint gets them, to draw the same numbers again."""

    def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((x @ w).relu(), 0.3).sin() @ w

    def is_whole(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> bool:
        partition = pipeline.joint_of(gm, inputs, kwargs).partition()
        assert len(partition.bwd_placeholders.keys() - {n.name for n in partition.saved}) == 2, "a gradient and a state"
        return partition.is_whole_step

    assert toys.with_joint(lambda x, w: toys.checkpointed(dropped, {})(x, w).sum(), toys.inputs(), is_whole)


def test_what_does_not_lower_the_peak_leaves_other_graphs_all_the_same() -> None:
    """Of a block there may be many, whose tensors pile up. `spare=False` says that of a whole step."""

    def offloaded(toy: toys.Toy, spare: bool) -> int:
        plan = decide(toys.partitioned(toy, *toys.inputs()), toys.options(spare=spare))
        return len(plan.offloaded)

    block = offloaded(two_products, spare=False)
    assert block > 0
    assert offloaded(two_products, spare=True) == block
    assert offloaded(with_loss, spare=True) < offloaded(with_loss, spare=False)


@pytest.mark.parametrize("budget", [0, 0.5, "auto", "1MiB"])
def test_an_empty_batch_has_a_plan(budget: object, tmp_path: Path) -> None:
    """All its tensors have 0 bytes, and so have all limits."""
    torch._dynamo.reset()
    options = {"budget": budget, "min_bytes": 0, "engine": "memory", "inner": "aot_eager", "dump": str(tmp_path)}
    x = torch.randn(0, 64, requires_grad=True)
    torch.compile(lambda x: x.sin().cos(), backend=ssd_fx.backend, options=options)(x).sum().backward()
    assert x.grad is not None
    assert list(tmp_path.glob("*.plan.json"))
