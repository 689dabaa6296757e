"""How often a joint graph is partitioned, and under which limits each time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import tests.communicating  # noqa: F401  (defines the operator)
from ssd_fx.passes import pipeline, proposals
from ssd_fx.passes.joint.recompute import CutError
from ssd_fx.passes.partition import Partition, fingerprint
from ssd_fx.passes.plan import Limits, Plan
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.proposals import Candidate
from tests.passes import toys


class Decisions:
    """Stands in for `pipeline.decide`: a second partition fails with `least`; `asked` has the limits of the others.

    A step is predicted to take `proposed_s` where groups may be computed again, and 2 s elsewhere.
    """

    def __init__(self, least: int, proposed_s: float = 1.5) -> None:
        self.least, self.proposed_s = least, proposed_s
        self.asked: list[Limits] = []

    def __call__(
        self, partition: object, options: object, *, budget: Any = None, priced: bool = False, **more: Any
    ) -> object:
        if budget is not None and not priced and more.get("analysed") is None:
            raise BudgetError(budget.memory, self.least)
        if priced:
            self.asked.append(budget)
        forecast = SimpleNamespace(limits=Limits(100, 50), seconds=self.proposed_s if priced else 2.0, compute_s=1.0)
        nodes = frozenset({f"relu_{len(self.asked)}"})
        return SimpleNamespace(graph="g", forecast=forecast, recomputed_nodes=nodes, saved_nodes=frozenset())


def exchanging(*names: str, backward: Sequence[str] = ()) -> Partition:
    """Nothing but calls, of these names and in this order, that may be collectives."""
    return Partition(_exchanges(names), _exchanges(backward), 0, frozenset(), frozenset())


def _exchanges(names: Sequence[str]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name in names:
        graph.create_node("call_function", torch.ops.ssd_fx_tests.exchange.default, (x, name), name=name)
    graph.output(())
    return fx.GraphModule({}, graph)


def saving(*inputs: str) -> Partition:
    """Saves these of the inputs `x` and `y`, which are the caller's."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("x", "y")}
    with FakeTensorMode():
        for node in nodes.values():
            node.meta["val"] = torch.empty(4)
    graph.output(tuple(nodes[name] for name in inputs))
    return Partition(fx.GraphModule({}, graph), _exchanges(()), 0, frozenset(nodes), frozenset())


def joint_of(first: Partition, again: Partition) -> mock.Mock:
    """Stands in for a joint graph that is partitioned so, and so from the second time on."""
    joint = mock.Mock(has_own_budget=False)
    joint.partition.return_value, joint.partition_again.return_value = first, again
    return joint


@pytest.mark.parametrize(
    ("least", "memory"),
    [(110, [100, 90, 80]), (100, [100]), (60, [100])],
    ids=["above the limit", "at the limit", "below the limit"],
)
def test_a_limit_is_only_ever_tightened(least: int, memory: list[int]) -> None:
    """By what the second partition lacks; where it fails although its floor is within the limit, nothing is to gain."""
    decisions, joint = Decisions(least), joint_of(exchanging("a", "b"), exchanging("a", "b"))
    with mock.patch.object(pipeline, "decide", decisions):
        partition, _ = pipeline.decide_joint(joint, toys.options(recompute=True))
    assert [limits.memory for limits in decisions.asked] == memory
    assert {limits.kept for limits in decisions.asked} == {50}
    assert partition is joint.partition.return_value


@pytest.mark.parametrize(("proposed_s", "cuts"), [(1.96, 1), (1.985, 0), (2.0, 0)])
def test_a_proposal_that_gains_too_little_is_not_cut(proposed_s: float, cuts: int) -> None:
    """A cut takes a second and more with many layers."""
    joint = joint_of(exchanging("a", "b"), exchanging("a", "b"))
    with mock.patch.object(pipeline, "decide", Decisions(100, proposed_s)):
        pipeline.decide_joint(joint, toys.options(recompute=True))
    assert joint.partition_again.call_count == cuts


def test_a_partition_that_pytorch_cannot_make_is_done_without_aloud() -> None:
    decisions, joint = Decisions(110), joint_of(exchanging("a", "b"), exchanging("a", "b"))
    joint.partition_again.side_effect = CutError("AOT Autograd failed to partition")
    with mock.patch.object(pipeline, "decide", decisions), pytest.warns(RuntimeWarning, match="failed to partition"):
        partition, _ = pipeline.decide_joint(joint, toys.options(recompute=True))
    assert joint.partition_again.call_count == 1
    assert partition is joint.partition.return_value


@pytest.mark.parametrize(
    "again",
    [exchanging("b", "a", backward="cd"), exchanging("a", "b", backward="dc"), exchanging("a", "b", backward="acd")],
    ids=["forward", "backward", "twice"],
)
def test_a_partition_that_communicates_in_another_order_is_not_planned(again: Partition) -> None:
    """Other ranks may not take it, and would wait for what this one does later."""
    decisions, joint = Decisions(110), joint_of(exchanging("a", "b", backward="cd"), again)
    with mock.patch.object(pipeline, "decide", decisions):
        partition, _ = pipeline.decide_joint(joint, toys.options(recompute=True))
    assert joint.partition_again.call_count == 1
    assert [limits.memory for limits in decisions.asked] == [100]
    assert partition is joint.partition.return_value


@pytest.mark.parametrize(("inputs", "planned"), [("x", True), ("", True), ("y", False), ("xy", False)])
def test_a_partition_that_reads_more_of_the_callers_is_not_planned(inputs: str, planned: bool) -> None:
    """The caller may have written into it before the backward reads it. PyTorch's own partition reads `x`."""
    first = Candidate(saving("x"), Plan("g"))
    proposal = SimpleNamespace(graph="g", recomputed_nodes=frozenset(), saved_nodes=frozenset())
    again = saving(*inputs)
    found = proposals._cut_so(joint_of(first.partition, again), first, proposal)  # type: ignore[arg-type]
    assert found is (again if planned else None)


def forecast(memory: float, compute_s: float = 1.0, stall_s: float = 0.0) -> Any:
    """Of "auto", of a graph whose floor is 10 and that has 100 with everything kept."""
    times = {"compute_s": compute_s, "write_stall_s": 0.0, "read_stall_s": stall_s}
    return SimpleNamespace(limits=Limits(memory, 0), floor=10, everything=100, **times)


@pytest.mark.parametrize(
    ("best", "again", "taken"),
    [
        (forecast(50), forecast(30, 1.01), True),
        (forecast(50), forecast(30, 1.01, 0.005), True),
        (forecast(50), forecast(30, 1.01, 0.02), False),
        (forecast(50), forecast(30, 1.03), False),
        (forecast(50), forecast(49.9), False),
        (forecast(14.5), forecast(12), False),
    ],
    ids=["recomputes", "and waits", "waits too long", "computes too long", "needs as much", "is the least share"],
)
def test_auto_takes_a_partition_that_needs_less_and_takes_hardly_longer(best: Any, again: Any, taken: bool) -> None:
    """Than everything kept: 2% here."""
    first, second = exchanging("a", "b"), exchanging("a", "b")

    def decide(partition: Partition, *, priced: bool = False, **_: Any) -> Any:
        if priced:
            return SimpleNamespace(graph="g", recomputed_nodes={"relu"}, saved_nodes=frozenset(), groups=())
        return mock.Mock(with_=lambda **_: SimpleNamespace(forecast=again))

    plan = SimpleNamespace(forecast=best, stock=None)
    own = Candidate(first, plan)  # type: ignore[arg-type]
    with mock.patch.object(proposals, "recomputed", return_value=()):
        found = proposals.smallest(joint_of(first, second), own, own, decide, 0.02)
    assert found.partition is (second if taken else first)


def test_a_graph_has_one_name_wherever_functions_lie_in_memory() -> None:
    """A Python function stands in graphs with sizes that only the run knows, as `torch.sym_max` does."""

    def named() -> str:
        def larger(a: int, b: int) -> int:
            return max(a, b)

        graph = fx.Graph()
        graph.output((graph.call_function(larger, (1, 2)),))
        return fingerprint(Partition(fx.GraphModule({}, graph), _exchanges(()), 1, frozenset(), frozenset()))

    assert named() == named()
