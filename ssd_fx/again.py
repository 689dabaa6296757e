"""Makes the plan once more when it is known how much memory the steps leave: the option `memory`.

    steps are steady -- `_steady` --> a looser plan is predicted to be worth it --> Dynamo forgets the function
    its next call compiles it, as for another reason -- `planned` --> the room to plan for

Compiled code does not change: a graph that waits for its backward keeps the code of its forward. docs/design.md
("A limit of memory") says why it is done so.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType

from ssd_fx import traced
from ssd_fx.compat import (
    CompileId,
    compiled_entries,
    entries_allowed,
    forget_compiled,
    may_compile_again,
    syncs_decisions,
)
from ssd_fx.options import Options
from ssd_fx.passes.planner.budget import SHARES
from ssd_fx.passes.proposals import GAIN
from ssd_fx.report.model import GraphReport
from ssd_fx.runtime import account, graphs, plans
from ssd_fx.runtime.allowance import Steady
from ssd_fx.runtime.config import parse
from ssd_fx.sizes import format_bytes, format_seconds

log = logging.getLogger("ssd_fx")
MOST = 2  # times that a function is compiled again
PAYS_WITHIN = 1000  # steps, which must gain as much time as compiling takes


class User:
    """Uses a store until the new graph does. Else the store would end with the old graph, and lose what it measured."""


@dataclass(eq=False)
class _Function:
    """A function that was compiled to train.

    `config`: the options of the runtime. `number`: Dynamo's number of this compilation. `entries`: how often Dynamo may
    have compiled the function, so that half of the compilations that it allows are left for other reasons. `rooms`: the
    rooms that it was planned for, in order, beginning with 0. `user`: None until Dynamo has forgotten this compilation.
    `seconds`: the time that this compilation took.
    """

    config: str
    code: weakref.ref[CodeType]
    number: CompileId
    entries: int
    rooms: tuple[float, ...] = (0.0,)
    user: User | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Room:
    """The room to plan for, as in `PlanOptions.room`. It has to live until the new graph uses its store."""

    share: float = 0.0
    user: User | None = field(default=None, repr=False)
    function: _Function | None = field(default=None, repr=False)

    def took(self, seconds: float) -> None:
        """Adds the seconds in which a graph of the function was compiled."""
        if self.function is not None:
            self.function.seconds += seconds


_functions: dict[Options, list[_Function]] = {}
_LOCK = threading.Lock()


def planned(config: str) -> Room:
    """The room to plan for, in the function that Dynamo compiles now, to train with the runtime's options `config`."""
    compiling = traced.compilation()
    if compiling is None:
        return Room()
    code, number = compiling
    with _LOCK:
        known = _functions.setdefault(parse(config), [])
        known[:] = [each for each in known if each.code() is not None]
        same = [each for each in known if each.code() is code]
        for each in same:
            if each.number == number:  # one of several graphs, as DDP makes them
                return Room(each.rooms[-1], function=each)
        if not compiled_entries(code):  # after `torch._dynamo.reset`
            known[:] = [each for each in known if each not in same]
            same = []
        now = _Function(config, weakref.ref(code), number, entries_allowed() // 2 - 1)
        known.append(now)
        for before in same:
            if before.user is not None:
                known.remove(before)
                now.rooms = before.rooms
                return Room(now.rooms[-1], before.user, now)
        return Room(function=now)


@dataclass(frozen=True)
class _Forecast:
    """What is predicted of one forward of a graph and its backward.

    compute_s: seconds without transfers. again_s: those of them that go if nothing is computed again. peak_bytes,
    stay_bytes: how much more memory keeping everything takes, at the peak and between forward and backward.
    """

    compute_s: float
    again_s: float
    peak_bytes: int
    stay_bytes: int


@functools.lru_cache(maxsize=64)
def _forecast(about: str) -> _Forecast:
    """The forecast of the plan that a graph carries."""
    found = GraphReport.unpacked(about)
    compute_s = found.predicted["compute_s"]
    return _Forecast(
        compute_s=compute_s,
        again_s=max(0.0, compute_s - found.stock.end_s),
        peak_bytes=max(0, found.stock.peak - found.own.peak),
        stay_bytes=max(0, found.stock.stays - found.own.stays),
    )


def _worth(parts: Sequence[_Forecast], room_bytes: int) -> tuple[float, float, float]:
    """The room as a share of what keeping everything needs, rounded down, and by how much it shortens a step: as a
    share of the step, and in seconds.

    With more room a plan first stops computing again what is dearest for its bytes. So it saves at least that share of
    the time.
    """
    needed = parts[0].peak_bytes if len(parts) == 1 else sum(part.stay_bytes for part in parts)
    compute_s = math.fsum(part.compute_s for part in parts)
    if not needed or not compute_s:
        return 0.0, 0.0, 0.0
    share = min(1.0, max(0, math.floor(SHARES * room_bytes / needed)) / SHARES)
    gain_s = share * math.fsum(part.again_s for part in parts)
    return share, gain_s / compute_s, gain_s


def _steady(config: Options, found: Steady) -> None:
    """Has functions compiled again if that is worth it. For `account.when_steady`."""
    packed = plans.packed()
    if not all(packed.get(graph) for graph in found.runs):
        return
    share, gain, gain_s = _worth(
        [_forecast(packed[g]) for g, runs in found.runs.items() for _ in range(runs)], found.room
    )
    if gain <= GAIN or syncs_decisions() or not may_compile_again():
        return
    with _LOCK:
        known = [each for each in _functions.get(config, ()) if _may_forget(each, share)]
        cost_s = math.fsum(each.seconds for each in known)
        if cost_s > PAYS_WITHIN * gain_s:
            return
        forgotten = [each for each in known if _forget(each, share)]
    if forgotten:
        log.warning(
            "memory=%s: steps leave %s of it, so %d functions are compiled once more when they are called next. Less "
            "is computed again then, and a step is predicted to be %.0f%% shorter, by %s. Compiling took %s before, so "
            "that pays within %d steps; adapt=False leaves it out",
            *(format_bytes(found.limit), format_bytes(found.room), len(forgotten), 100 * gain),
            *(format_seconds(gain_s), format_seconds(cost_s), PAYS_WITHIN),
        )


def _may_forget(function: _Function, share: float) -> bool:
    """Whether a function was compiled for less room, and may be compiled again."""
    code = function.code()
    if code is None or function.user is not None or len(function.rooms) > MOST or share <= function.rooms[-1]:
        return False
    return compiled_entries(code) <= function.entries


def _forget(function: _Function, share: float) -> bool:
    """Makes Dynamo forget a compiled function. Returns whether it has."""
    code = function.code()
    if code is None:
        return False
    user = User()
    graphs.uses(user, function.config)
    if not forget_compiled(code, function.number, "ssd_fx plans once more: it knows how much memory the steps leave"):
        return False
    function.rooms += (share,)
    function.user = user
    return True


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.Lock()


account.when_steady.append(_steady)
os.register_at_fork(after_in_child=_after_fork)
