"""A lock that the deaths of objects can live with.

A weakref callback may run in any thread at any allocation, also inside a critical section of its own thread, where
blocking on that section's lock would never end; and a Ctrl-C that arrives inside a callback's Python code is swallowed.
So the callbacks here are no Python code: they leave what is to be done in a queue and wake a thread that does it.
Whoever uses the guarded state next does it too, so that what is free by then is there.
"""

import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

PAUSE_S = 0.05  # the thread waits so long after a wake-up: while ops run they do the work, without switches of threads


class _Watcher(weakref.ref):  # type: ignore[type-arg]
    """A reference that knows what is to be done when its object is dead."""

    __slots__ = ("item",)
    item: Any


class _Wake(NamedTuple):
    """For the janitor: `item` is the guard that has something to do, as in a `_Watcher`."""

    item: Any


class Guard(Generic[T]):
    """`lock` protects the owner's state.

    `handle` is called under the lock with each item that a death or `later` left. If a signal's exception ends it early
    it is called again with the same, so it must not mind.
    """

    def __init__(self, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self.reset()

    def reset(self) -> None:
        """For the child of a fork: a lock that a vanished thread may have held is worth nothing."""
        self.lock = threading.Lock()
        self._left: deque[T | _Watcher] = deque()
        self._watchers: dict[int, tuple[_Watcher, _Watcher]] = {}

    def watch(self, thing: object, item: T, *, now: bool = True) -> None:
        """Handles `item` soon after `thing` died. Without `now` the thread that does it is not started for that: it is
        handled once the thread is wanted for something else, or by `drain`."""
        waker = _Watcher(thing, janitor().put if now else _wake.put)
        waker.item = self
        watcher = _Watcher(thing, self._left.append)  # of two references the later one is called first
        watcher.item = item
        self._watchers[id(watcher)] = (watcher, waker)

    def soon(self, item: T) -> None:
        """Handles `item` in a thread of its own. For those who hold a lock that `handle` takes."""
        self._left.append(item)
        janitor().put(_Wake(self))

    def later(self, item: T) -> None:
        """Handles `item`. Not for callbacks of the garbage collector."""
        self._left.append(item)
        self.drain()

    def drain(self) -> None:
        """Handles what was left; the lock must not be held by this thread."""
        while self._left:
            with self.lock:
                while self._left:
                    self._handle_first()

    def _handle_first(self) -> None:
        first = self._left[0]
        if isinstance(first, _Watcher):
            self._handle(first.item)
            self._watchers.pop(id(first), None)
        else:
            self._handle(first)
        self._left.popleft()


_Queue = queue.SimpleQueue[_Watcher | _Wake]
_wake: _Queue = queue.SimpleQueue()
_thread_of_process = 0


def janitor() -> _Queue:
    """The queue of the thread that follows up deaths, which is started once per process."""
    global _thread_of_process
    if _thread_of_process != os.getpid():
        _thread_of_process = os.getpid()
        threading.Thread(target=_follow_up, args=(_wake,), daemon=True, name="ssd_fx-janitor").start()
    return _wake


def _after_fork() -> None:
    global _wake
    _wake = queue.SimpleQueue()


os.register_at_fork(after_in_child=_after_fork)


def _follow_up(wake: _Queue) -> None:
    while True:
        guards = {wake.get().item}
        time.sleep(PAUSE_S)
        while not wake.empty():
            guards.add(wake.get().item)
        for guard in guards:
            try:
                guard.drain()
            except Exception:  # it is left in the queue, and the next op meets it in the user's own thread
                logging.getLogger("ssd_fx").exception("giving back what died failed")
