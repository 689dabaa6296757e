"""The bound that ends a search: by hand, and never above what the planner finds."""

from __future__ import annotations

import math

import pytest

from ssd_fx.passes.axis import CHOICES, Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.bound import bound_with, least_bytes, lower_bound
from ssd_fx.passes.planner.replay import own_s
from ssd_fx.passes.planner.search import Search
from tests.passes.planner.instances import BUDGETS, chained_instance, limits, random_instance
from tests.passes.planner.layered import layered_instance

NODES = Machine(1, 1, write_bw=1e9, read_bw=1e9, latency_s=0.0, node_s=0.5)  # an offload costs twice as much
ALL = CHOICES


def step(*items: Item) -> Step:
    """f0 f1 b0 b1, a second each; nothing but the items is alive."""
    return Step((1.0, 1.0, 1.0, 1.0), (0, 0, 0, 0), 2, items)


def test_the_cheapest_bytes_go_first_and_the_last_item_in_part() -> None:
    """15 of 30 B must go: 10 B are computed again in 0.2 s, and of 20 B a quarter costs a quarter of two nodes."""
    made = step(Item(10, 0, 0, 3, 3, recompute_s=0.2, choices=ALL), Item(20, 0, 0, 3, 3, choices=ALL))
    both_s = 2 * own_s(made, NODES)["ssd"][1]
    assert least_bytes(made, 15, math.inf) == 15
    assert lower_bound(made, NODES, 15, math.inf) == pytest.approx(4 + 0.2 + both_s / 4)


def test_what_is_bound_to_go_costs_in_any_case() -> None:
    made = step(Item(10, 0, 0, 3, 3, choices=frozenset({Choice.OFFLOAD})))
    both_s = 2 * own_s(made, NODES)["ssd"][0]
    assert both_s > 0
    assert lower_bound(made, NODES, 1000, math.inf) == pytest.approx(4 + both_s)


def test_a_share_is_a_bound_as_well() -> None:
    assert least_bytes(step(Item(10, 0, 0, 3, 3, choices=ALL), Item(20, 3, 3, 3, 3, choices=ALL)), 1000, 12) == 18


def test_lanes_count_for_one_set_of_what_is_recomputed() -> None:
    """5 of 10 B are gone from the second operator to the third.

    They are written in 5 s, begun behind the first operator, and read in 2.5 s behind the third, before the last one.
    """
    made = Step((1.0,) * 4, (0, 5, 5, 0), 2, (Item(10, 0, 0, 3, 3, recompute_s=0.5, choices=ALL),))
    slow = Machine(1, 1, write_bw=1.0, read_bw=2.0, latency_s=0.0)
    assert bound_with(made, slow, 10, [Choice.KEEP]) == pytest.approx(1 + 5 + 2 + 2.5 + 1)
    assert bound_with(made, slow, 10, [Choice.RECOMPUTE]) == pytest.approx(4.5)
    assert bound_with(made, slow, 15, [Choice.KEEP]) == pytest.approx(4)
    assert bound_with(made, slow, 9, [Choice.KEEP]) == math.inf


@pytest.mark.parametrize("share", BUDGETS)
def test_no_plan_is_below(share: float) -> None:
    for seed in range(3000, 3003):
        for make in (random_instance, chained_instance, layered_instance):
            made = make(seed)
            at = limits(made.step, share, whole=True)
            search = Search(made.step, made.machine, at.memory, at.kept, math.inf, quick=True)
            search.families()
            least = (1 - 1e-12) * lower_bound(made.step, made.machine, at.memory, at.kept)
            for found in filter(None, search.seen.values()):
                chosen = [c if c is Choice.RECOMPUTE else Choice.KEEP for c in found.choices]
                assert max(least, (1 - 1e-12) * bound_with(made.step, made.machine, at.memory, chosen)) <= found.seconds
