"""The stores of this process, by configuration. Each is made at first use, and ends with its last graph or with all.

What concerns all of them is here too: a forward, the child of a fork, the end of the process.
"""

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack

from ssd_fx.options import Options
from ssd_fx.runtime import entries, stats
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.deaths import before_work, janitor, when_idle
from ssd_fx.runtime.device import clock, cuda_driver, device_trace, streams
from ssd_fx.runtime.engines import registry
from ssd_fx.runtime.entries import GUARD
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.store import Store

stores: dict[Options, Store] = {}


def get_store(config: str) -> Store:
    """The store of a configuration, made at the first use.

    Raises: ValueError for a bad configuration; OSError if its directories cannot be used.
    """
    parsed = parse(config)
    found = stores.get(parsed)
    if found is None:
        with GUARD.lock:
            found = stores.get(parsed) or _make(parsed)
        janitor()  # this thread follows up the death of the store's last graph
    return found


def _make(config: Options) -> Store:
    """The new store of a configuration. Raises: as `get_store`."""
    engine = registry.make_engine(config)
    try:
        return stores.setdefault(config, Store(config, *registry.make_tiers(config, engine, stats.moved)))
    except BaseException:  # Ctrl-C: else its threads and its file would stay
        stores.pop(config, None)
        engine.close()
        raise


def forward_begins() -> None:
    """Lets tensors that were stored for `later` be written, when a forward begins under any options.

    The backwards of the forwards before come after it. In the capture of a CUDA graph nothing may be written.
    """
    if any(streams.is_captured(store.device) for store in list(stores.values())):
        return
    GUARD.drain()
    with GUARD.lock:
        for store in list(stores.values()):
            store.writer.forward_begins()
    for store in list(stores.values()):
        store.writer.go_on()


def go_on(but: Store) -> None:
    """Starts writes that found no room in flight when the last forward began, in all stores but one."""
    with GUARD.lock:
        due = [store for store in stores.values() if store is not but and store.writer.due()]
    for store in due:
        store.writer.go_on()


def keep_open(config: Options) -> None:
    """Takes back that the store of a configuration, if there is one, is to end: a graph uses it again."""
    store = stores.get(config)
    if store is not None:
        store.when_left = None


def end_unused(config: Options, when_left: Callable[[], None]) -> None:
    """Ends the store of a configuration that no graph uses any more.

    A store that has entries does not end, because a backward may come. It then calls `when_left` under the lock after
    the death of each entry.
    """
    GUARD.drain()
    with ExitStack() as closing, GUARD.lock:
        store = stores.get(config)
        if store is None:
            return
        if entries.of(store):
            store.when_left = when_left
            return
        _end(config, closing)
    if not stores:
        CPU_ALLOCATOR.trim()


def close_stores() -> None:
    """Ends the I/O, threads and files of all stores. What is in memory can still be loaded, and nothing else."""
    GUARD.drain()
    with ExitStack() as closing, GUARD.lock, ExitStack() as ending:  # they close without the lock
        for config in stores:  # if one fails, or a Ctrl-C comes, the others end and close too
            ending.callback(_end, config, closing)
    CPU_ALLOCATOR.trim()


def _end(config: Options, closing: ExitStack) -> None:
    """Ends a store, which closes with `closing`, without the lock."""
    store = stores[config]
    del stores[config]  # first: whatever interrupts the end, no later step finds a store that writes nothing
    try:
        store.end()
    finally:
        closing.callback(store.close)


_inherited: list[object] = []
"""In the child of a fork: the objects with events of a device. They stay, because the destructor of a CUDA event would
end the child, which cannot use CUDA."""


def _after_fork() -> None:
    inherited = list(stores.values())
    held = entries.after_fork()
    events = [*clock.forget(), *device_trace.clear()]
    if events or any(streams.of(store.device) for store in inherited):
        _inherited.extend((inherited, held, events))
    stores.clear()


def _at_exit() -> None:
    entries.close()
    try:
        close_stores()
    finally:
        entries.forget()


def _let_go() -> None:
    """Drops copies in vain that have ended, for a process that trains no more, where no op comes to do so."""
    with GUARD.lock:
        for store in list(stores.values()):
            store.writer.in_vain.let_go()


when_idle += [CPU_ALLOCATOR.tick, _let_go]
before_work += [cuda_driver.capture_apart]
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
