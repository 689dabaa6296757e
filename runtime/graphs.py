"""Stores end with the compiled graphs that use them.

A graph names its store in the arguments of its ops and nowhere else, for it may come from a compile cache. So what our
backend returns stands for the graph: it is made for a cached graph too, and whoever can run the graph holds it. The
store of an option set ends when the last of these has died and no backward can come that wants what is stored. One that
nobody named here, made by a call of an op, lives until `close`; and one that is needed again is made again.
"""

import functools
import itertools
import os
from collections.abc import Callable
from typing import NamedTuple

from ssd_fx.runtime.config import RuntimeConfig, parse
from ssd_fx.runtime.guard import Guard
from ssd_fx.runtime.store import close_stores, end_unused


class _Graph(NamedTuple):
    config: RuntimeConfig
    number: int


_NONE = -1  # the number of no graph
_numbers = itertools.count()
_living: dict[RuntimeConfig, set[int]] = {}


def uses(graph: Callable[..., object], config: str) -> None:
    """`graph` runs ops with this configuration. Waits for the end of stores whose graphs have died."""
    _GUARD.drain()
    made = _Graph(parse(config), next(_numbers))
    with _GUARD.lock:
        _living.setdefault(made.config, set()).add(made.number)
    _GUARD.watch(graph, made, now=False)  # a graph that stores nothing costs no thread


def close() -> None:
    """End all stores at once: give back their files, I/O threads and memory.

    Graphs go on to work: the next forward makes new stores. A backward whose forward ran before finds what was still in
    memory; if it wants what was on the drive, it ends in a RuntimeError that says so. Without this call a store ends
    when the last graph that was compiled with its options has gone (`torch._dynamo.reset()`, or the model's death), and
    no backward that would read from it can come any more.
    """
    _GUARD.drain()
    close_stores()


def _check(graph: _Graph) -> None:
    """A graph has died, or an entry of a store that has no graphs. Called once more if a signal ended it early."""
    living = _living.get(graph.config, set())
    living.discard(graph.number)
    if not living:
        _living.pop(graph.config, None)
        end_unused(graph.config, functools.partial(_GUARD.soon, _Graph(graph.config, _NONE)))


_GUARD: Guard[_Graph] = Guard(_check)
"""Its lock comes before that of `entries`."""


def _after_fork() -> None:
    """In the child nobody tells of the death of an inherited graph, so the stores made for those live until `close`."""
    _GUARD.reset()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork)
