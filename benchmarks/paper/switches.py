"""Parts of ssd_fx that can be switched off in a worker, to see what each is worth. None of it is meant for training.

off("packing")  # before the model is compiled, in a process that compiles with no cache
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

from ssd_fx.passes import decide
from ssd_fx.passes.alias import packing, storages
from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.lowering import order
from ssd_fx.passes.plan import Limits
from ssd_fx.passes.planner import select
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.schedule import Replay, Schedule, Trip


def off(part: str) -> None:
    """Switch `part` of this process off: a key of `SWITCHES`.

    Raises:
        KeyError: no such part.
    """
    SWITCHES[part]()


def _packing() -> None:
    mock.patch.object(storages, "pack", functools.partial(_whole, packing.pack)).start()


def _whole(pack: Any, owner: Any, members: Any, *, part: bool, restride: bool) -> Any:
    return pack(owner, members, part=False, restride=restride)


def _copies() -> None:
    mock.patch.object(decide, "merge_copies", lambda partition, plan: plan).start()


def _functions() -> None:
    mock.patch.object(order, "move_out_of_functions", lambda planned, *_: planned).start()


def _planner() -> None:
    mock.patch.object(select, "solve_for", _at_once).start()


def _at_once(step: Step, budget: object, machine: Machine, *rest: object, **more: object) -> tuple[Replay, Limits]:
    """Everything is stored where it is made, released behind its last use, and loaded where it is used."""
    choices = tuple(Choice.OFFLOAD if Choice.OFFLOAD in item.choices else Choice.KEEP for item in step.items)
    trips = [
        Trip.of(i, store=item.produced, release=item.last_use, load=item.first_use, wait=item.first_use)
        for i, item in enumerate(step.items)
        if choices[i] is Choice.OFFLOAD
    ]
    found = replay(step, choices, Schedule(trips, step.items), machine)
    return found, Limits(found.peak, 0)


SWITCHES = {
    "caches": lambda: None,  # all of it, compiled without a cache, as the others are
    "packing": _packing,
    "copies": _copies,
    "planner": _planner,
    "functions": _functions,
}
