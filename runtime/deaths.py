"""A lock over state that must follow the deaths of objects.

A weakref callback has two hazards. It may run in any thread at any allocation, also while that thread holds the lock:
taking the lock again would block for ever. And Python swallows a Ctrl-C that arrives inside a callback.
So the callbacks here run no Python code. They put an item in a queue and wake a thread, the *janitor*, which handles
it. Whoever uses the guarded state next handles the queue too, and so finds everything that is free by then.
"""

import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

PAUSE_S = 0.05  # from a wake-up to the janitor's work: running ops do it meanwhile, without thread switches
IDLE_S = 5.0  # the janitor calls `when_idle` where nothing has died for so long


class _Watcher(weakref.ref):  # type: ignore[type-arg]
    """A weakref that carries the item to handle when its object is dead."""

    __slots__ = ("item",)
    item: Any


class _Given(NamedTuple):
    """An item that comes of no death. In a queue it looks like a `_Watcher`."""

    item: Any


class Guard(Generic[T]):
    """`lock` protects the owner's state.

    `handle` is called under the lock with each item that was queued. If the exception of a signal ends it early, it is
    called again with the same item, and must bear that.
    """

    def __init__(self, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self.reset()

    def reset(self) -> None:
        """For the child of a fork: a fresh lock, since a thread that does not exist here may have held the old one."""
        self.lock = threading.RLock()  # not a Lock, because `is_mine` asks which thread holds it
        self._queued: deque[_Given | _Watcher] = deque()
        self._watchers: dict[int, tuple[_Watcher, _Watcher]] = {}

    def watch(self, thing: object, item: T, *, now: bool = True) -> None:
        """Handles `item` soon after `thing` died.

        Without `now` this starts no janitor. The item is then handled by `drain`, or once a janitor runs for another
        reason.
        """
        waker = _Watcher(thing, janitor().put if now else _wake.put)
        waker.item = self
        watcher = _Watcher(thing, self._queued.append)  # made later, so called first: queued before the janitor wakes
        watcher.item = item
        self._watchers[id(watcher)] = (watcher, waker)

    def soon(self, item: T) -> None:
        """Handles `item` in the janitor, for callers who hold a lock that `handle` takes."""
        self._queued.append(_Given(item))
        janitor().put(_Given(self))

    def is_mine(self) -> bool:
        """Whether this thread holds the lock: a signal handler or a `__del__` has then interrupted the owner's code."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined] # as threading.Condition asks it

    def drain(self) -> None:
        """Handles what was queued.

        Raises: RuntimeError if this thread holds the lock: the state is half changed then.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined] # `is_mine`, which every node would call
            raise RuntimeError(
                "a signal handler or a __del__ uses ssd_fx, and has interrupted ssd_fx itself; right would be to set a "
                "flag there, and to look at it between steps"
            )
        while self._queued:
            with self.lock:
                while self._queued:
                    self._handle_first()

    def _handle_first(self) -> None:
        first = self._queued[0]
        self._handle(first.item)
        self._watchers.pop(id(first), None)
        self._queued.popleft()  # after `handle`, so that an item that a signal interrupted is handled again


_Queue = queue.SimpleQueue[_Given | _Watcher]
_wake: _Queue = queue.SimpleQueue()  # the janitor's
_started = False  # the janitor of this process
when_idle: list[Callable[[], None]] = []
before_work: list[Callable[[], None]] = []  # the janitor calls them whenever it wakes


def janitor() -> _Queue:
    """The queue of the janitor, which is started once per process."""
    global _started
    if not _started:
        _started = True  # before it starts: other threads may ask meanwhile
        try:
            threading.Thread(target=_follow_up, args=(_wake,), daemon=True, name="ssd_fx-janitor").start()
        except BaseException:  # no thread can be started now, or a Ctrl-C: the next call tries again
            _started = False
            raise
    return _wake


def _after_fork() -> None:
    global _wake, _started
    _wake, _started = queue.SimpleQueue(), False


os.register_at_fork(after_in_child=_after_fork)


def _call(functions: Iterable[Callable[[], None]], failing: set[Callable[[], None]]) -> None:
    """Calls functions, and logs their errors. `failing`: those that failed the last time, too, which are logged once.

    An error, of a device for example, must not end the janitor: while no op runs, nobody else handles deaths.
    """
    for function in functions:
        try:
            function()
            failing.discard(function)
        except Exception:
            if function not in failing:
                logging.getLogger("ssd_fx").exception("a task between steps failed")
            failing.add(function)


def _follow_up(wake: _Queue) -> None:
    failing: set[Callable[[], None]] = set()
    while True:
        try:
            guards = {wake.get(timeout=IDLE_S).item}
        except queue.Empty:
            _call((*before_work, *when_idle), failing)
            continue
        time.sleep(PAUSE_S)
        while not wake.empty():
            guards.add(wake.get().item)
        _call(before_work, failing)
        for guard in guards:
            try:
                guard.drain()
            except Exception:  # the item stays queued, so the next op raises this in the user's thread
                logging.getLogger("ssd_fx").exception("giving back what died failed")
