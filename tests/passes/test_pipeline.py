"""How often a joint graph is partitioned, and under which limits each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import tests.communicating  # noqa: F401  (defines the operator)
from ssd_fx.passes import candidates, pipeline, proposals
from ssd_fx.passes.candidates import Candidate
from ssd_fx.passes.joint.layers import Between
from ssd_fx.passes.joint.recompute import CutError
from ssd_fx.passes.partition import NOT_CHECKED, Partition, fingerprint
from ssd_fx.passes.plan import Limits, Plan, Recompute
from ssd_fx.passes.planner.solve import BudgetError
from tests.passes import toys


@pytest.fixture(autouse=True)
def no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a plan here has no step in which nodes of ours would stand."""
    monkeypatch.setattr(proposals, "with_nodes", lambda partition, plan: plan)


def replayed(seconds: float, *, peak: int = 100, floor: int = 60, written: int = 10) -> Any:
    """Of a graph that computes for 1 s."""
    step = SimpleNamespace(floor=floor, everything=200)
    nothing = {"kept_bytes": 0, "stays": 0}
    return SimpleNamespace(seconds=seconds, compute_s=1.0, peak=peak, written=written, step=step, **nothing)


class Decisions:
    """Stands in for `decide`; `asked` has the limit of every proposal, and the slots that it must save.

    A step takes 2 s in PyTorch's partition, `proposed_s` where groups may be computed again, and `again_s` in the
    partition that does so, whose floor is `floor`; it fails where that is more than the limit of 100.
    """

    def __init__(self, proposed_s: float = 1.5, again_s: float = 1.5, floor: int = 60) -> None:
        self.proposed_s, self.again_s, self.floor = proposed_s, again_s, floor
        self.asked: list[tuple[float, set[int]]] = []

    def __call__(
        self, partition: object, options: object = None, *, budget: Any = None, priced: bool = False, **more: Any
    ) -> Any:
        if priced:
            self.asked.append((getattr(budget, "memory", 100), set(more.get("saved", ()))))
            nodes = {slot: f"relu_{slot}" for slot in range(3) if slot not in self.asked[-1][1]}
            decisions = {slot: Recompute(frozenset({name})) for slot, name in nodes.items()}
            names = frozenset({*nodes.values(), f"limit {self.asked[-1][0]}"})
            return plan(replayed(self.proposed_s), recomputed_nodes=names, decisions=decisions)
        if more.get("analysed") is not None:
            return plan(replayed(2.0))
        if isinstance(budget, Limits) and budget.memory < self.floor:
            raise BudgetError(budget.memory, self.floor)
        return plan(replayed(self.again_s, floor=self.floor))


def plan(replay: Any, **values: Any) -> Any:
    """Under a limit of 100 bytes."""
    defaults = {
        "recomputed_nodes": frozenset(),
        "saved_nodes": frozenset(),
        "decisions": {},
        "groups": (),
        "origin": None,
    }
    found = SimpleNamespace(graph="g", replay=replay, limits=Limits(100, 50), **(defaults | values))
    found.with_ = lambda **changes: SimpleNamespace(**(vars(found) | changes))
    return found


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


def reading(*readers: str, checked: bool = False) -> Partition:
    """Saves the input `x`, which nodes of these names read in the backward. `checked`: by autograd."""
    partition = saving("x")
    partition.saved[0].meta[NOT_CHECKED] = not checked
    backward = fx.Graph()
    received = backward.placeholder("x")
    with FakeTensorMode():
        received.meta["val"] = torch.empty(4)
    made = [backward.create_node("call_function", torch.ops.aten.sin.default, (received,), name=n) for n in readers]
    backward.output(tuple(made))
    return replace(partition, backward=fx.GraphModule({}, backward))


def joint_of(first: Partition, again: Partition) -> mock.Mock:
    """Stands in for a joint graph that is partitioned so, and so from the second time on."""
    joint = mock.Mock(has_own_budget=False)
    joint.partition.return_value, joint.partition_again.return_value = first, again
    return joint


@pytest.mark.parametrize(
    ("again_s", "floor", "asked"),
    [(1.5, 60, [100]), (1.6, 60, [100]), (1.6, 75, [100, 85, 70, 60]), (1.5, 75, [100])],
    ids=["as predicted", "slower for no reason", "slower", "higher floor"],
)
def test_a_partition_that_is_slower_than_proposed_is_proposed_for_a_lower_limit(
    again_s: float, floor: int, asked: list[int]
) -> None:
    """By what its floor is higher than that of PyTorch's partition, and not below that one."""
    decisions, joint = Decisions(again_s=again_s, floor=floor), joint_of(exchanging("a", "b"), exchanging("a", "b"))
    with mock.patch.object(proposals, "decide", decisions):
        pipeline.decide_joint(joint, toys.options(recompute=True))
    assert decisions.asked == [(memory, set()) for memory in asked]


def test_between_limits_that_are_met_and_not_met_the_next_one_is_half_way() -> None:
    """The cut for 100 is slower than proposed, with a floor of 80. That for 80 is as proposed, and no other one is."""
    decisions, joint = Decisions(again_s=1.6, floor=80), joint_of(exchanging("a", "b"), exchanging("a", "b"))

    def decide(*args: Any, priced: bool = False, **more: Any) -> Any:
        if priced and decisions.asked:
            decisions.again_s = 1.4
            decisions.proposed_s -= 0.1
        return decisions(*args, priced=priced, **more)

    with mock.patch.object(proposals, "decide", decide):
        pipeline.decide_joint(joint, toys.options(recompute=True))
    assert [memory for memory, _ in decisions.asked] == [100, 80, 90, 85]


def test_what_is_computed_again_where_memory_is_short_is_saved_in_the_next_proposal() -> None:
    decisions, joint = Decisions(floor=110), joint_of(exchanging("a", "b"), exchanging("a", "b"))
    over = mock.Mock(side_effect=[frozenset({"relu_1"}), frozenset({"relu_2"}), frozenset()])
    with mock.patch.object(proposals, "decide", decisions), mock.patch.object(proposals, "over", over):
        partition, _ = pipeline.decide_joint(joint, toys.options(recompute=True))
    assert decisions.asked == [(100, set()), (100, {1}), (100, {1, 2})]
    assert partition is joint.partition.return_value


@pytest.mark.parametrize(
    ("proposed", "cuts"),
    [(replayed(1.96), 1), (replayed(1.985), 0), (replayed(2.0), 0), (replayed(2.0, written=8), 1)],
    ids=["faster", "hardly faster", "as fast", "writes less"],
)
def test_a_proposal_that_gains_too_little_is_not_cut(proposed: Any, cuts: int) -> None:
    """A cut takes a second and more with many layers."""
    joint, decisions = joint_of(exchanging("a", "b"), exchanging("a", "b")), Decisions()

    def decide(*args: Any, priced: bool = False, **more: Any) -> Any:
        return plan(proposed, recomputed_nodes=frozenset({"relu"})) if priced else decisions(*args, **more)

    with mock.patch.object(proposals, "decide", decide):
        pipeline.decide_joint(joint, toys.options(recompute=True))
    assert joint.partition_again.call_count == cuts


def test_proposals_that_save_other_tensors_get_other_partitions() -> None:
    """As those that begin from two partitions, and compute the same again."""
    joint = joint_of(exchanging("a", "b"), exchanging("a", "b"))
    own = Candidate(joint.partition.return_value, Plan("g"))
    found = proposals.Proposals(joint, own, toys.options(), Plan("g"))
    for saved in ("x", "x", "y"):
        proposal = plan(None, recomputed_nodes=frozenset({"relu"}), saved_nodes=frozenset({saved}))
        found._partition_for(proposal, own)
    assert joint.partition_again.call_count == 2


def test_a_partition_that_pytorch_cannot_make_is_done_without_aloud() -> None:
    decisions, joint = Decisions(), joint_of(exchanging("a", "b"), exchanging("a", "b"))
    joint.partition_again.side_effect = CutError("AOT Autograd failed to partition")
    with mock.patch.object(proposals, "decide", decisions), pytest.warns(RuntimeWarning, match="failed to partition"):
        partition, _ = pipeline.decide_joint(joint, toys.options(recompute=True))
    assert joint.partition_again.call_count == 1
    assert partition is joint.partition.return_value


def test_layers_that_pytorch_cannot_cut_at_are_done_without_aloud() -> None:
    joint = joint_of(exchanging("a", "b"), exchanging("a", "b"))
    joint.partition_again.side_effect = CutError("no")
    own = Candidate(joint.partition.return_value, Plan("g"))
    between = mock.patch.object(candidates, "between_layers", return_value=Between(frozenset({"x"}), frozenset()))
    with between, pytest.warns(RuntimeWarning, match="begins no plan of graph g from its layers, .*: no"):
        assert candidates.layered(joint, own, toys.options()) is None
    maybe = mock.patch.object(candidates, "made_of", return_value=frozenset({"y"}))
    with maybe, between, pytest.warns(RuntimeWarning, match="begins no plan of graph g from its products, .*: no"):
        assert candidates.selective(joint, own, Plan("g"), toys.options()) is None


@pytest.mark.parametrize(
    "again",
    [exchanging("b", "a", backward="cd"), exchanging("a", "b", backward="dc"), exchanging("a", "b", backward="acd")],
    ids=["forward", "backward", "twice"],
)
def test_a_partition_that_communicates_in_another_order_is_not_planned(again: Partition) -> None:
    """Other ranks may not take it, and would wait for what this one does later."""
    decisions, joint = Decisions(), joint_of(exchanging("a", "b", backward="cd"), again)
    with mock.patch.object(proposals, "decide", decisions):
        partition, _ = pipeline.decide_joint(joint, toys.options(recompute=True))
    assert joint.partition_again.call_count == 1
    assert len(decisions.asked) == 1
    assert partition is joint.partition.return_value


@pytest.mark.parametrize(("inputs", "planned"), [("x", True), ("", True), ("y", False), ("xy", False)])
def test_a_partition_that_reads_more_of_the_callers_is_not_planned(inputs: str, planned: bool) -> None:
    """The caller may have written into it before the backward reads it. PyTorch's own partition reads `x`."""
    first = Candidate(saving("x"), Plan("g"))
    proposal = SimpleNamespace(graph="g", recomputed_nodes=frozenset(), saved_nodes=frozenset())
    again = saving(*inputs)
    found = candidates.cut_so(joint_of(first.partition, again), first, frozenset(), proposal)  # type: ignore[arg-type]
    assert found is (again if planned else None)


@pytest.mark.parametrize(
    ("again", "taken"),
    [(reading("a"), True), (reading(), True), (reading("a", "b"), False), (reading("a", checked=True), False)],
    ids=["as it does", "nowhere", "elsewhere too", "checked"],
)
def test_a_partition_reads_what_nobody_checks_where_pytorchs_own_does(again: Partition, taken: bool) -> None:
    """The caller may change it without an error, so that is no reason for one, and no other node may see the change."""
    first = Candidate(reading("a"), Plan("g"))
    proposal = SimpleNamespace(graph="g", recomputed_nodes=frozenset(), saved_nodes=frozenset())
    found = candidates.cut_so(joint_of(first.partition, again), first, frozenset(), proposal)  # type: ignore[arg-type]
    assert found is (again if taken else None)


def candidate(seconds: float, *, peak: int = 100, written: int = 10) -> Candidate:
    return Candidate(exchanging("a", "b"), plan(replayed(seconds, peak=peak, written=written)))


def test_of_plans_within_the_limits_the_fastest_is_taken_and_of_those_the_one_that_writes_least() -> None:
    slow, fast, spares = candidate(2.0), candidate(1.5), candidate(1.503, written=5)
    over = candidate(1.0, peak=101)
    assert proposals.best_within([slow, fast, over], Limits(100, 0)) is fast
    assert proposals.best_within([slow, fast, spares], Limits(100, 0)) is spares
    assert proposals.best_within([over], Limits(100, 0)) is None


@pytest.mark.parametrize(("slowdown", "limits"), [(0.5, [100]), (0.45, [100, 107, 121, 149, 205])])
def test_auto_allows_more_memory_where_a_partition_is_slower_than_it_may_be(slowdown: float, limits: list[int]) -> None:
    """By one share of the range from the floor to everything kept, then two, four, eight, until everything may stay."""
    decisions, joint = Decisions(), joint_of(exchanging("a", "b"), exchanging("a", "b"))
    with mock.patch.object(proposals, "decide", decisions):
        pipeline.decide_joint(joint, toys.options(recompute=True, budget="auto", slowdown=slowdown))
    assert [memory for memory, _ in decisions.asked] == limits


def test_a_graph_has_one_name_wherever_functions_lie_in_memory() -> None:
    """A Python function stands in graphs with sizes that only the run knows, as `torch.sym_max` does."""

    def named() -> str:
        def larger(a: int, b: int) -> int:
            return max(a, b)

        graph = fx.Graph()
        graph.output((graph.call_function(larger, (1, 2)),))
        return fingerprint(Partition(fx.GraphModule({}, graph), _exchanges(()), 1, frozenset(), frozenset()))

    assert named() == named()
