"""What a worker of `ssd-fx bench` may be up to. Without torch, so that the process starts at once."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection


def busy(*_: object) -> None:
    """Hears nothing, as while it compiles."""
    time.sleep(60)


def interrupted(pipe: Connection, *_: object) -> None:
    """Gets a Ctrl-C, and says whether it goes on."""
    pipe.recv()
    try:
        signal.raise_signal(signal.SIGINT)
        pipe.send("goes on")
    except KeyboardInterrupt:
        pipe.send("interrupted")
