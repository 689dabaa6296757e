"""Says what takes long: in the log, and on the standard error where that is a terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

log = logging.getLogger("ssd_fx")
PLANNING_S, MEASURING_S = 10.0, 0.5  # work that is shorter goes unmentioned


@contextmanager
def announced(what: str, after_s: float) -> Iterator[None]:
    """Within, `what` is under way. Says so after `after_s` seconds, and then at the end how long it took."""
    started = time.perf_counter()
    timer = threading.Timer(after_s, _say, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        took = time.perf_counter() - started
        if took >= after_s:
            _say(f"{what}: {took:.1f} s")


planning = partial(announced, "planning what goes to the drive; recompute=False plans faster", PLANNING_S)
"""Within, a graph is planned."""


def _say(text: str) -> None:
    with suppress(Exception):  # the standard error may be None, closed, or an object of the program's own
        log.info("%s", text)
        if sys.stderr.isatty() and not log.isEnabledFor(logging.INFO):
            print(f"ssd_fx: {text}", file=sys.stderr, flush=True)
