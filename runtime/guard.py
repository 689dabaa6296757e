"""A lock that finalizers can live with.

A weakref callback may run in any thread at any allocation, also inside a critical section of its own thread, where
blocking on that section's lock would never end. So it leaves its work here; who holds the lock does it on leaving.
"""

import threading
from collections import deque
from collections.abc import Callable


class Guard:
    """`lock` protects the owner's state; `later` is for finalizers; `drain` follows every `with guard.lock`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """For the child of a fork: a lock that a vanished thread may have held is worth nothing."""
        self.lock = threading.Lock()
        self._left: deque[Callable[[], None]] = deque()

    def later(self, action: Callable[[], None]) -> None:
        """Runs `action` under the lock: now if nobody holds it, else when its holder drains."""
        self._left.append(action)
        self.drain()

    def drain(self) -> None:
        """Runs what finalizers left. Never blocks on a section of the same thread, because it looks first.

        `with` rather than a non-blocking acquire: a signal handler's exception cannot come between it and the release.
        """
        while self._left and not self.lock.locked():
            with self.lock:
                while self._left:
                    self._left.popleft()()
