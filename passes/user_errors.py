"""How a user's mistake gets from the backend through Dynamo unchanged.

Dynamo wraps what a backend raises into `BackendCompilerFailed`, so that `except ValueError` around the first call of a
model would miss a bad option. It lets its own `ShortenTraceback` pass, and takes its frames off the traceback: an error
that is both arrives as what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import ShortenTraceback


@contextmanager
def user_errors() -> Iterator[None]:
    """Within it, a ValueError or OSError is raised as its own type and as `ShortenTraceback`, with equal arguments."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise _passing(error) from None


def _passing(error: ValueError | OSError) -> Exception:
    kind, trace = type(error), error.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    caller = trace.tb_next.tb_frame  # whoever said `with user_errors()`; Dynamo shows the traceback from there on

    def init(self: Exception, *args: object) -> None:
        kind.__init__(self, *args)
        self.first_useful_frame = caller  # type: ignore[attr-defined]

    both = type(kind.__name__, (ShortenTraceback, kind), {"__init__": init, "__str__": kind.__str__})
    made = both(error.errno, error.strerror, error.filename) if isinstance(error, OSError) else both(*error.args)
    return made.with_traceback(trace)  # type: ignore[no-any-return]
