"""Stores end with the compiled graphs that use them.

A graph names its store only in the arguments of its ops, because it may come from a compile cache. So we watch the
function that our backend returns: it is made for a cached graph too, and whoever can run the graph holds it. The store
of a configuration ends when the last of these functions has died and no backward can come that loads from it. If an op
is called directly and makes a store, that store lives until `close`. A store that is needed again is made again.
"""

import functools
import itertools
import os
from typing import NamedTuple

from ssd_fx.options import Options
from ssd_fx.runtime import entries, plans
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.deaths import Guard
from ssd_fx.runtime.stores import close_stores, end_unused, keep_open


class _Graph(NamedTuple):
    config: Options
    number: int


_NO_GRAPH = -1
_numbers = itertools.count()
_living: dict[Options, set[int]] = {}


def uses(graph: object, config: str) -> None:
    """Records that `graph` uses the store of a configuration. While the graph lives, the store stays, for later graphs
    too.

    Waits for the end of stores whose graphs have died.
    """
    _GUARD.drain()
    made = _Graph(parse(config), next(_numbers))
    with _GUARD.lock:
        _living.setdefault(made.config, set()).add(made.number)
        keep_open(made.config)
    _GUARD.watch(graph, made, now=False)  # a graph that stores nothing costs no thread


def close() -> None:
    """End all stores at once: give back their files, I/O threads and memory.

    Compiled graphs still work: the next forward makes new stores. A backward whose forward ran before this call finds
    what is still in memory; its load of a tensor on the drive raises a RuntimeError. Without this call a store ends
    when no graph with its options is left, after `torch._dynamo.reset()` or the model's death, and no backward that
    loads from it can come any more. If a signal handler or a `__del__` that has interrupted ssd_fx itself calls this,
    the stores end a moment later, in another thread.
    """
    if _GUARD.is_mine() or entries.GUARD.is_mine():
        _GUARD.soon(None)
        return
    _GUARD.drain()
    close_stores()


def _check(graph: _Graph | None) -> None:
    """Ends the store of a graph that died if no other graph uses it. With `_NO_GRAPH` an entry of the store died.

    None: ends all stores. Called once more if a signal ended the first call early.
    """
    if graph is None:
        close_stores()
        return
    living = _living.get(graph.config, set())
    living.discard(graph.number)
    if not living:
        _living.pop(graph.config, None)
        plans.forget(graph.config)
        end_unused(graph.config, functools.partial(_GUARD.soon, _Graph(graph.config, _NO_GRAPH)))


_GUARD: Guard[_Graph | None] = Guard(_check)
"""Its lock is taken before that of `entries`."""


def _after_fork() -> None:
    """In the child the deaths of inherited graphs go unnoticed, so the stores made for those live until `close`."""
    _GUARD.reset()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork)
