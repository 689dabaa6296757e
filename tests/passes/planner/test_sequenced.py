"""The program with lanes in order says what `simulate` says: every plan solves it, and its solutions can be played."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

import pytest

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.replay import first_uses, replay
from ssd_fx.passes.planner.solve import BudgetError, solve
from ssd_fx.passes.schedule import Replay, Schedule, Trip
from tests.passes.planner.instances import BUDGETS, Instance, chained_instance, limits, random_instance, undeferred
from tests.passes.planner.layered import layered_instance
from tests.passes.planner.optimum import Program, Terms, optimum
from tests.passes.planner.sequenced import Sequenced

pytestmark = pytest.mark.slow  # they hold the bound of benchmarks/optimality.py, which no plan is made by
EXACT = 1e-5  # HiGHS's tolerances, on a step that takes 1
INFEASIBLE = 2  # of scipy.optimize.milp
SAME = 1e-5  # narrower, HiGHS ends with errors of its own


def random_plan(random: Random, instance: Instance) -> Replay:
    """Any choices, with nodes anywhere they may stand; nothing is held back."""
    step, forward = instance.step, instance.step.forward
    while True:
        choices = tuple(random.choice(sorted(item.choices, key=lambda c: c.value)) for item in step.items)
        trips, firsts = [], first_uses(step, choices)
        for i, item in enumerate(step.items):
            if choices[i] is Choice.OFFLOAD:
                store = random.choice((item.produced, random.randrange(item.produced, forward)))
                release = random.choice((forward - 1, random.randrange(max(store, item.last_use), forward)))
                load = random.randint(forward, firsts[i])
                trips.append(Trip.of(i, store, release, load, firsts[i], block=random.random() < 0.5))
        found = replay(step, choices, Schedule(trips, step.items), instance.machine)
        if not found.idle_lane:
            return found


def solves(program: Program, found: Replay) -> bool:
    """Whether the program has a solution with these choices and nodes, in which every operator starts as replayed."""
    fixed: Terms = [(program.chosen[i][choice], 1.0) for i, choice in enumerate(undeferred(found.choices))]
    for i in program.moved:
        trip = found.schedule.get(i)
        fixed.append((program.left[i], float(trip is not None and i not in found.forwarded)))
        if trip and isinstance(program, Sequenced):
            fixed.append((program.paid[i][trip.store.at], 1.0))
            if i not in found.forwarded:
                fixed.append((program.loaded[i][trip.load.at], 1.0))
    for column, value in fixed:
        program._add([(column, 1.0)], value, value)
    for p, column in program.start.items():
        start = found.starts[p] / program.unit_s
        program._add([(column, 1.0)], start - SAME, start + SAME)
    return bool(program.solve(gap=1.0, time_limit=60.0).success)


def not_solutions(
    program: type[Program], seeds: range, plans: int, made: Callable[[int], Instance] = random_instance
) -> list[tuple[int, int]]:
    """Which of the random plans of each seed are none, under the bytes that each of them needs."""
    found = []
    for seed, plan in itertools.product(seeds, range(plans)):
        instance = made(seed)
        played = random_plan(Random(1000 * seed + plan), instance)
        built = program(instance.step, instance.machine, played.peak, played.kept_bytes)
        if not solves(built, played):
            found.append((seed, plan))
    return found


PROGRAMS = pytest.mark.parametrize("program", [Program, Sequenced])
MADE = pytest.mark.parametrize("made", [random_instance, chained_instance])


@PROGRAMS
def test_random_plans_of_layers_are_solutions(program: type[Program]) -> None:
    assert not_solutions(program, range(5), 2, layered_instance) == []


@PROGRAMS
@MADE
def test_many_random_plans_are_solutions(made: Callable[[int], Instance], program: type[Program]) -> None:
    assert not_solutions(program, range(10, 110), 10, made) == []


@PROGRAMS
@MADE
def test_plans_of_the_planner_are_solutions(made: Callable[[int], Instance], program: type[Program]) -> None:
    for seed, share in itertools.product(range(2000, 2030), BUDGETS):
        instance = made(seed)
        at = limits(instance.step, share)
        try:
            found = solve(instance.step, instance.machine, limit=at.memory, share_bytes=at.kept)
        except BudgetError:
            assert not optimum(instance.step, instance.machine, at.memory, at.kept).feasible, (seed, share)
            continue
        built = program(instance.step, instance.machine, at.memory, at.kept)
        assert solves(built, found), (seed, share)


def played(seed: int, share: float, made: Callable[[int], Instance] = random_instance) -> None:
    """The program's solution, simulated, takes as long, fits, and holds nothing back."""
    instance = made(seed)
    step, machine, at = instance.step, instance.machine, limits(instance.step, share)
    program = Sequenced(step, machine, at.memory, at.kept)
    result = program.solve(gap=1e-3, time_limit=60.0)
    if result.status == INFEASIBLE:
        return
    choices = program.choices(result.x)
    found = replay(step, choices, program.schedule(result.x, choices), machine)
    assert found.seconds == pytest.approx(result.fun * program.unit_s, rel=EXACT), (seed, share)
    assert not found.idle_lane
    assert found.peak <= at.memory
    assert found.kept_bytes <= at.kept


def all_played(seeds: Iterable[int], made: Callable[[int], Instance] = random_instance) -> None:
    for seed in seeds:
        played(seed, 0.2, made)


@MADE
def test_many_solutions_can_be_played(made: Callable[[int], Instance]) -> None:
    all_played(range(60), made)


@pytest.mark.parametrize("rows", ["_release_stall_rows", "_wait_stall_rows", "_prompt_rows", "_ready_rows"])
def test_rows_that_are_missing_are_found(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a solution is faster than the plan that it is, or is none."""
    monkeypatch.setattr(Sequenced, rows, lambda self: None)
    with pytest.raises(AssertionError):
        all_played((*range(2000, 2003), 2023, 2028, 2055))


@pytest.mark.parametrize(("lane", "wrong"), [("write_bw", 0.9), ("read_bw", 0.9), ("write_bw", 1.1), ("read_bw", 1.1)])
def test_a_lane_of_another_speed_is_found(lane: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sequenced.__init__

    def init(self: Sequenced, step: Step, machine: Machine, *rest: float) -> None:
        right(self, step, replace(machine, **{lane: getattr(machine, lane) * wrong}), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Sequenced, "__init__", init)
    assert not_solutions(Sequenced, range(10), 2)
