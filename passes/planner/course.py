"""The simulated step over time, for people: memory, and the life of every group."""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import replace
from types import MappingProxyType

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.plan import Course, Life, Plan, Stock
from ssd_fx.passes.planner.items import Transfer
from ssd_fx.passes.planner.place import everything, floor
from ssd_fx.passes.planner.solution import Solution
from ssd_fx.passes.planner.step import Modelled


def stock(plan: Plan, modelled: Modelled) -> Stock:
    """The step with everything kept and nothing transferred."""
    step = modelled.step
    starts = tuple(itertools.accumulate(step.seconds, initial=0.0))
    memory = tuple(itertools.accumulate(step.columns.change[:-1]))
    return Stock(plan.saved_bytes, floor(step), everything(step), starts, memory, step.forward)


def course(plan: Plan, modelled: Modelled, solution: Solution, machine: Machine, later: Set[int]) -> Course:
    """The step that `solution` was chosen for. `later`: the slots whose writes begin with another forward."""
    outcome, step = solution.outcome, modelled.step
    items = {slot: i for i, slot in enumerate(modelled.slots)}
    lives = {}
    for slot in plan.lifetimes:
        place = modelled.places[slot]
        life = Life(
            produced=outcome.ends[place.produced],
            released=outcome.ends[place.last_use],
            used=outcome.starts[place.first_use],
            last_used=outcome.ends[place.last_bwd_use],
        )
        transfer = solution.transfers.get(items.get(slot, -1))
        moved = life if transfer is None else _moved(life, items[slot], transfer, modelled, solution, machine)
        lives[slot] = replace(moved, write=None) if slot in later else moved
    return Course(outcome.starts, outcome.memory, step.forward, MappingProxyType(lives))


def _moved(life: Life, i: int, transfer: Transfer, modelled: Modelled, solution: Solution, machine: Machine) -> Life:
    """`life`, of a group that is offloaded as the item `i`."""
    outcome, lane = solution.outcome, modelled.step.seconds_of(machine, transfer.tier)
    released = outcome.ends[transfer.release_after]
    written = outcome.write_ends[i]
    load, begin = outcome.starts[transfer.load_before], written - lane.latency - lane.write[i]
    write_wait = max(0.0, written - released) if transfer.block else 0.0
    read_wait = max(0.0, outcome.waits.get(i, 0.0) - write_wait)
    life = replace(life, released=released, write_wait_s=write_wait, read_wait_s=read_wait)
    if i in outcome.forwarded:  # its write is cut short
        return replace(life, write=(min(begin, load), load))
    read, gone = outcome.read_ends[i], max(released, written)
    return replace(
        life,
        write=(begin, written),
        read=(read - lane.latency - lane.read[i], read),
        gone=(gone, max(load, gone)),
    )
