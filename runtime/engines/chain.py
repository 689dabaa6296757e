"""Two transfers one after the other, as one.

device --copy--> pinned memory --write--> file        a store through pinned memory
file --read--> pinned memory --copy--> device         a load
"""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ssd_fx.runtime.engines.base import Completion


class Chain:
    """The completion of `first` and then `second`.

    A thread of `follow` starts `second` when `first` has ended. It takes transfers in the order in which they started.
    `keep` is what both use. It is dropped when they have ended.
    """

    __slots__ = ("_cancelled", "_error", "_first", "_follow", "_followed", "_keep", "_lock", "_second", "_went_on")

    def __init__(self, first: Completion, second: Completion, follow: ThreadPoolExecutor, keep: object) -> None:
        self._first = first
        self._second = second
        self._follow = follow
        self._keep = keep
        self._followed: Future[None] | None = None
        self._error: OSError | None = OSError(errno.ECANCELED, "the transfer was never queued")
        self._went_on = False  # `second` has started
        self._cancelled = False
        self._lock = threading.Lock()  # `cancel` sees `second` either started or not to be started

    def start(self) -> None:
        self._first.start()
        try:
            self._followed = self._follow.submit(self._go_on)
        except RuntimeError:  # the interpreter is ending, and gives threads no work
            self._go_on()
            self._followed = Future()
            self._followed.set_result(None)

    def _go_on(self) -> None:
        try:
            self._first.wait()
            with self._lock:
                if self._cancelled:
                    self._error = OSError(errno.ECANCELED, "the transfer was cancelled")
                    return
                self._second.start()
                self._went_on, self._error = True, None
        except OSError as error:
            self._error = error.with_traceback(None)  # its frames would keep the memory alive
        except RuntimeError as error:  # torch's, of a device
            self._error = OSError(errno.EIO, f"a copy between device and host memory failed: {error}")

    def done(self) -> bool:
        if self._followed is None or not self._followed.done():
            return False
        return not self._went_on or self._second.done()

    def wait(self) -> None:
        if self._followed is not None:
            self._followed.result()
        if self._error is not None:
            raise self._error
        self._second.wait()
        self._keep = None

    def cancel(self) -> bool:
        with self._lock:
            self._cancelled = True
        if not self._went_on:
            self._first.cancel()
        if self._followed is not None:
            wait([self._followed])
        cut_short = self._second.cancel() if self._went_on else True
        self._keep = None
        return cut_short

    def span(self) -> tuple[float, float]:
        timed = [span for span in (self._first.span(), self._second.span()) if span[1]]  # a copy may be untimed
        return (timed[0][0], timed[-1][1]) if timed else (0.0, 0.0)
