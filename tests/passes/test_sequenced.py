"""The program with lanes in order says what `simulate` says: every plan solves it, and its solutions can be played."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from random import Random

import pytest

from ssd_fx.passes.machine import Machine
from ssd_fx.passes.refine import fits, kept_bytes
from ssd_fx.passes.simulate import Choice, Item, Outcome, Step, Transfer, simulate
from ssd_fx.passes.solve import solve
from tests.passes.instances import BUDGETS, Instance, limits, random_instance
from tests.passes.optimum import Program, Terms, negative
from tests.passes.sequenced import Sequenced

EXACT = 1e-5  # HiGHS's tolerances, on a step that takes 1
SAME = 1e-5


def random_plan(random: Random, instance: Instance) -> tuple[tuple[Choice, ...], dict[int, Transfer], Outcome]:
    """Any choices, with nodes anywhere they may stand; nothing is held back."""
    step, forward = instance.step, instance.step.forward
    while True:
        choices = tuple(random.choice(sorted(item.choices, key=lambda c: c.value)) for item in step.items)
        transfers = {}
        for i, item in enumerate(step.items):
            if choices[i] is Choice.OFFLOAD:
                store = random.choice((item.produced, random.randrange(item.produced, forward)))
                release = random.choice((forward - 1, random.randrange(max(store, item.last_use), forward)))
                load = random.randint(forward, item.first_use)
                transfers[i] = Transfer(store, release, random.random() < 0.5, load)
        outcome = simulate(step, choices, transfers, instance.machine)
        if not outcome.held_back:
            return choices, transfers, outcome


def solves(program: Program, choices: tuple[Choice, ...], transfers: Mapping[int, Transfer], outcome: Outcome) -> bool:
    """Whether the program has a solution with these choices and nodes, in which every operator starts as simulated."""
    fixed: Terms = [(program.chosen[i][choice], 1.0) for i, choice in enumerate(choices)]
    for i in program.moved:
        transfer = transfers.get(i)
        fixed.append((program.left[i], float(transfer is not None and i not in outcome.handed_back)))
        if transfer and isinstance(program, Sequenced):
            fixed.append((program.paid[i][transfer.store_after], 1.0))
            if i not in outcome.handed_back:
                fixed.append((program.loaded[i][transfer.load_before], 1.0))
    for column, value in fixed:
        program._add([(column, 1.0)], value, value)
    for p, column in program.start.items():
        start = outcome.starts[p] / program.unit_s
        program._add([(column, 1.0)], start - SAME, start + SAME)
    return bool(program.solve(gap=1.0, time_limit=60.0).success)


def not_solutions(program: type[Program], seeds: range, plans: int) -> list[tuple[int, int]]:
    """Which of the random plans of each seed are none, under the bytes that each of them needs."""
    found = []
    for seed, plan in itertools.product(seeds, range(plans)):
        instance = random_instance(seed)
        choices, transfers, outcome = random_plan(Random(1000 * seed + plan), instance)
        kept = kept_bytes(instance.step, choices)
        built = program(instance.step, instance.machine, outcome.peak, kept)
        if not solves(built, choices, transfers, outcome):
            found.append((seed, plan))
    return found


@pytest.mark.parametrize("program", [Program, Sequenced])
def test_random_plans_are_solutions(program: type[Program]) -> None:
    assert not_solutions(program, range(10), 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", [Program, Sequenced])
def test_many_random_plans_are_solutions(program: type[Program]) -> None:
    assert not_solutions(program, range(10, 210), 10) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", [Program, Sequenced])
def test_plans_of_the_planner_are_solutions(program: type[Program]) -> None:
    for seed, share in itertools.product(range(2000, 2100), BUDGETS):
        instance = random_instance(seed)
        at = limits(instance.step, share)
        found = solve(instance.step, instance.machine, limit=at.memory, share_bytes=at.kept)
        built = program(instance.step, instance.machine, at.memory, at.kept)
        assert solves(built, found.choices, found.transfers, found.outcome), (seed, share)


def played(step: Step, machine: Machine, limit: float, share_bytes: float) -> tuple[float, float]:
    """Seconds of the program's solution, and of the plan that it is."""
    program = Sequenced(step, machine, limit, share_bytes)
    result = program.solve(gap=1e-4, time_limit=60.0)
    choices, transfers = program.choices(result.x), program.transfers(result.x)
    outcome = simulate(step, choices, transfers, machine)
    return float(result.fun) * program.unit_s, outcome.seconds


