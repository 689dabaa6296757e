"""The mixed-integer program against every plan there is, and the planner against the program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from ssd_fx.passes.axis import Choice, Item, Shared, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.plan import Limits
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.planner.solve import solve
from tests.passes.planner.brute_force import TINY, best_of_all
from tests.passes.planner.instances import Instance, chained_instance, instances, limits, random_instance, scheduled
from tests.passes.planner.memory_rows import memory_rows
from tests.passes.planner.optimum import Program, optimum
from tests.passes.planner.sequenced import Sequenced, least_seconds

EXACT = 1e-5  # HiGHS's tolerances, on a step that takes 1
pytestmark = pytest.mark.slow  # they hold the bound of benchmarks/optimality.py, which no plan is made by
MOVABLE = frozenset({Choice.KEEP, Choice.OFFLOAD})


def compared(
    seed: int, share: float, program: type[Program] = Program, made: Callable[..., Instance] = random_instance
) -> tuple[float, float]:
    """The best of all plans of a tiny instance, and the program's optimum, in steps that take 1.

    At the floor itself: with the planner's headroom above it many an instance has nothing to decide.
    """
    tiny = made(seed, *TINY)
    least = tiny.step.floor
    memory = least + share * (tiny.step.everything - least)
    at = Limits(memory, share * sum(item.nbytes for item in tiny.step.items if item.choices != {Choice.KEEP}))
    best = best_of_all(tiny.step, tiny.machine, at.memory, at.kept)
    bound = optimum(tiny.step, tiny.machine, at.memory, at.kept, gap=1e-6, program=program)
    return best / sum(tiny.step.seconds), bound.seconds / sum(tiny.step.seconds)


QUICK = [
    (0, 0.0),
    (0, 0.6),
    (1, 0.0),
    (3, 0.3),
    (4, 0.0),
    (6, 0.0),
    (7, 0.0),
    (9, 0.3),
    (13, 0.3),
    (14, 0.0),
    (50, 0.3),
    (59, 0.3),
]


@pytest.mark.parametrize(("seed", "share"), QUICK)
def test_the_program_is_as_fast_as_the_best_of_all_plans(seed: int, share: float) -> None:
    best, bound = compared(seed, share)
    assert bound == pytest.approx(best, rel=EXACT)


@pytest.mark.parametrize("seed", [126, 135, 148, 149])
def test_lanes_in_order_reach_the_best_where_interrupted_ones_do_not(seed: int) -> None:
    best, interrupted = compared(seed, 0.0)
    _, in_order = compared(seed, 0.0, Sequenced)
    assert interrupted < best * (1 - EXACT)
    assert in_order == pytest.approx(best, rel=EXACT)


@pytest.mark.parametrize("made", [random_instance, chained_instance])
@pytest.mark.parametrize("program", [Program, Sequenced])
def test_no_plan_beats_the_program_and_few_do_not_reach_it(
    program: type[Program], made: Callable[..., Instance]
) -> None:
    """Of these 50 instances, those on which the bound is below every plan, and how far."""
    looser: dict[int, float] = {}
    for seed, share in itertools.product(range(100, 150), (0.0, 0.3, 0.6, 1.0)):
        best, bound = compared(seed, share, program, made)
        assert best >= bound * (1 - EXACT), f"seed {seed} at {share}: {best} is below the bound {bound}"
        if best > bound * (1 + EXACT):
            looser[seed] = max(looser.get(seed, 1.0), best / bound)
    assert {seed: round(ratio, 3) for seed, ratio in looser.items()} == LOOSER.get((program, made), {})


LOOSER: dict[tuple[type[Program], Callable[..., Instance]], dict[int, float]] = {
    (Program, random_instance): {115: 1.001, 126: 1.073, 131: 1.007, 135: 1.425, 147: 1.0, 148: 1.093, 149: 1.012},
    (Program, chained_instance): {126: 1.073, 135: 1.395, 145: 1.169, 147: 1.0, 148: 1.093},
}


@pytest.mark.parametrize(
    "rows", ["_memory_rows", "_write_rows", "_read_rows", "_choice_rows", "_order_rows", "_hand_back_rows"]
)
def test_rows_that_are_missing_are_found(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, rows, lambda self: None)
    assert any(bound < best * (1 - EXACT) for best, bound in itertools.starmap(compared, QUICK))


@pytest.mark.parametrize("rows", ["_need_rows", "_any_of", "_both"])
def test_rows_of_chains_that_are_missing_are_found(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, rows, lambda *_: None)
    pairs = (compared(seed, 0.0, made=chained_instance) for seed in range(100, 110))
    assert any(bound < best * (1 - EXACT) for best, bound in pairs)


def test_what_several_items_share_is_computed_once() -> None:
    """Attention's result and its logsumexp: 3.5 s each alone, of which 3 s are the same.

    f0 1 s | f1 1 s | b0 1 s | again 4 s | b1 1 s
    """
    again = frozenset({Choice.RECOMPUTE})
    items = (Item(10, 0, 0, 3, 3, 3.5, again), Item(10, 0, 0, 3, 3, 3.5, again))
    step = Step((1.0,) * 4, (0,) * 4, 2, items, shared=(Shared(3.0, (0, 1)),))
    assert optimum(step, Machine(1, 1, 1, 1), 20, None).seconds == 8.0


def test_what_a_chain_needs_is_in_memory_when_it_runs() -> None:
    """f2 has no room for the second item, which b0 uses. Its chain begins at the first one, which only b2 uses.

    f0 1 s | f1 1 s | f2 1 s | b0 1 s, the first again 1 s, the second again 2 s | b1 1 s | b2 1 s
    """
    items = (
        Item(10, 0, 0, 5, 5, 1.0, frozenset({Choice.RECOMPUTE})),
        Item(10, 1, 1, 3, 3, 2.0, frozenset({Choice.KEEP, Choice.RECOMPUTE}), needs=(0,)),
    )
    machine = Machine(1, 1, write_bw=2, read_bw=2, latency_s=0.0)
    tight, loose = (Step((1.0,) * 6, (0, 0, transient, 0, 0, 0), 3, items) for transient in (19, 20))
    assert not optimum(tight, machine, 19, None).feasible
    found = optimum(loose, machine, 20, None)
    assert (found.seconds, found.choices) == (9.0, (Choice.RECOMPUTE, Choice.RECOMPUTE))


@pytest.mark.parametrize("wrong", [0.9, 1.1])
@pytest.mark.parametrize("lane", ["write_bw", "read_bw"])
def test_a_wrong_coefficient_is_found(lane: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane a tenth too fast makes the bound too low, one a tenth too slow makes it no bound."""
    right = Program.__init__

    def init(self: Program, step: Step, machine: Machine, *rest: object) -> None:
        fields = {name: getattr(machine, name) for name in machine.__dataclass_fields__}
        right(self, step, Machine(**{**fields, lane: fields[lane] * wrong}), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Program, "__init__", init)
    pairs = list(itertools.starmap(compared, QUICK))
    if wrong > 1:
        assert any(bound < best * (1 - EXACT) for best, bound in pairs)
    else:
        assert any(bound > best * (1 + EXACT) for best, bound in pairs)


def test_a_load_at_its_use_counts_from_the_end_of_the_operator_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a load is issued before the wait; counted from the use's own start, it would have no time at all."""
    monkeypatch.setattr(Program, "_issued", lambda self, q: (0.0, [(self.start[q], 1.0)]))
    assert any(bound > best * (1 + EXACT) for best, bound in itertools.starmap(compared, QUICK))


def test_one_item_by_hand() -> None:
    """f0 makes 10 B that b1 reads; f1 has no room for them: write 5 s behind f0, read 2 s of which b0 covers one.

    f0 1 s | stall 5 s | f1 1 s | b0 1 s | stall 1 s | b1 1 s
    """
    item = Item(10, 0, 0, 3, 3, choices=MOVABLE)
    step = Step((1.0, 1.0, 1.0, 1.0), (0, 10, 0, 0), 2, (item,))
    bound = optimum(step, Machine(1, 1, write_bw=2, read_bw=5, latency_s=0.0), 10, None)
    assert (bound.seconds, bound.lower_bound, bound.choices) == (10.0, 10.0, (Choice.OFFLOAD,))


def test_what_the_drive_has_not_written_is_handed_back() -> None:
    """Nothing may be kept and everything fits: the forward ends 1 s into a write of 5 s, so the item never leaves."""
    item = Item(10, 0, 0, 3, 3, choices=MOVABLE)
    step = Step((1.0, 1.0, 1.0, 1.0), (0, 0, 0, 0), 2, (item,))
    machine = Machine(1, 1, write_bw=2, read_bw=5, latency_s=0.0)
    assert optimum(step, machine, 10, 0).seconds == 4.0 == best_of_all(step, machine, 10, 0)


def test_what_the_drive_can_write_leaves() -> None:
    """A drive that needs 0.5 s: storing late to have it back unwritten is no plan. Of 2 s of reading, 1 is hidden.

    f0 1 s | f1 1 s | b0 1 s | stall 1 s | b1 1 s
    """
    item = Item(10, 0, 0, 3, 3, choices=MOVABLE)
    step = Step((1.0, 1.0, 1.0, 1.0), (0, 0, 0, 0), 2, (item,))
    machine = Machine(1, 1, write_bw=20, read_bw=5, latency_s=0.0)
    choices = (Choice.OFFLOAD,)
    late = replay(step, choices, scheduled(step, choices, {0: {"store": 1, "release": 1, "load": 2}}), machine)
    assert (late.seconds, late.idle_lane) == (4.0, True)
    assert optimum(step, machine, 10, 0).seconds == 5.0 == best_of_all(step, machine, 10, 0)
    assert solve(step, machine, limit=10, share_bytes=0).seconds == 5.0


def test_what_cannot_fit_is_proven_so() -> None:
    item = Item(10, 0, 0, 3, 3, choices=MOVABLE)
    step = Step((1.0, 1.0, 1.0, 1.0), (0, 11, 0, 0), 2, (item,))
    bound = optimum(step, Machine(1, 1, 1, 1), 10, None)
    assert not bound.feasible
    assert bound.lower_bound == math.inf


def test_fewer_rows_never_raise_the_bound() -> None:
    """Seed 35 has the most rows of the first: all ten, then the four of the highest base."""
    instance = random_instance(35)
    at = limits(instance.step, 0.2)
    assert len(memory_rows(instance.step, at.memory, None)) > 4
    full = optimum(instance.step, instance.machine, at.memory, at.kept)
    few = optimum(instance.step, instance.machine, at.memory, at.kept, rows=4)
    assert few.lower_bound <= full.seconds


def ratio(instance: Instance, share: float) -> float:
    """The planner's predicted seconds over the least that any plan can take."""
    step, machine, at = instance.step, instance.machine, limits(instance.step, share)
    found = solve(step, machine, limit=at.memory, share_bytes=at.kept)
    assert found.peak <= at.memory
    return found.seconds / least_seconds(step, machine, at.memory, at.kept, found.seconds)


@settings(max_examples=5, deadline=None)
@given(instances)
def test_the_planner_is_never_below_the_bound(instance: Instance) -> None:
    assert ratio(instance, 0.2) >= 1 - 2e-3  # the program's gap, and the tolerance of its rows
