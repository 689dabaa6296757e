"""Budgets that cannot be met: who says so, and what the least is. And where the nodes of a plan stand."""

from __future__ import annotations

import pickle

import pytest

from ssd_fx.passes.axis import Choice
from ssd_fx.passes.decide import decide
from ssd_fx.passes.plan import Keep, replay_of
from ssd_fx.passes.planner.budget import solve_for
from ssd_fx.passes.planner.off_plan import held_to_its_limit
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.planner.step import model
from tests.passes import toys


def test_bytes_bound_what_must_stay() -> None:
    """Two statistics of 32 B and a mask of 128 B are below `min_bytes`, the others can leave."""
    with pytest.raises(BudgetError) as caught:
        toys.planned(toys.multi_output, budget=191, min_bytes=129)
    assert (caught.value.asked, caught.value.least) == (191, 192)
    assert str(caught.value).endswith(
        ": 'getitem_3' (128 B, below min_bytes), 'getitem_1' (32 B, below min_bytes), 'getitem_2' (32 B, below "
        "min_bytes); right would be a larger budget, fewer marks or a smaller min_bytes"
    )


@pytest.mark.parametrize("budget", [192, 0])
def test_the_least_that_can_be_met_is_met_and_zero_bounds_nothing(budget: int) -> None:
    plan = toys.planned(toys.multi_output, budget=budget, min_bytes=129).plan
    stay = [g.nbytes for g in plan.groups if isinstance(plan.decisions[g.slot], Keep)]
    assert stay == [32, 32, 128]


def test_the_largest_are_named_and_the_others_counted() -> None:
    with pytest.raises(BudgetError, match=r"'mm_1' \(256 B, below min_bytes\), 3 more \(192 B\); right"):
        toys.planned(toys.multi_output, budget=2, min_bytes=1000)


def test_the_error_survives_a_process() -> None:
    """Dynamo's workers and ours make errors again from their arguments."""
    error = BudgetError(10, 20, ", because")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "a budget of 10 B cannot be met; the least that can is 20 B, because"
    assert (again.asked, again.least) == (10, 20)


@pytest.mark.parametrize("toy", [toys.views_only, toys.relu_chain, toys.multi_output])
@pytest.mark.parametrize("budget", [0.0, 0.2, 0.5])
def test_nodes_stand_where_memory_was_predicted(toy: toys.Toy, budget: float) -> None:
    """They release no later and load no earlier than in the simulated step whose peak the plan names."""
    partition = toys.partitioned(toy)
    plan = decide(partition, toys.options(budget=budget))
    step = model(partition, plan, {g.slot: frozenset({Choice.KEEP, Choice.OFFLOAD}) for g in plan.groups})
    solved, at = solve_for(step, budget, toys.MACHINE, toys.options().prefetch)
    found = held_to_its_limit(solved, at.memory, toys.MACHINE, late=partition.is_whole_step)
    assert replay_of(plan).peak == found.peak
    highest = found.memory.index(found.peak)
    half = partition.forward if highest < step.forward else partition.backward
    nodes = [*partition.forward.graph.nodes, *partition.backward.graph.nodes]
    assert nodes[replay_of(plan).peak_node] in list(half.graph.nodes)
    assert set(plan.schedule) == {step.slots[i] for i in found.schedule}
    for i, trip in found.schedule.items():
        planned = plan.schedule[step.slots[i]]
        assert planned.release.at <= step.nodes[trip.release.at][1]
        assert planned.load.at >= step.nodes[trip.load.at][0]
        assert (planned.blocks, planned.is_strict) == (trip.blocks, trip.is_strict)
