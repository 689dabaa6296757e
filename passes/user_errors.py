"""Let a `ValueError` or `OSError` of the backend reach the user with its own type.

Dynamo wraps an error of a backend in `BackendCompilerFailed`. Then `except ValueError` around the first call of a model
would miss a bad option. Dynamo does not wrap its own `ShortenTraceback`, so we raise an error of both types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ssd_fx.compat import ShortenTraceback


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise a ValueError or OSError of the body as an error of its type that is a `ShortenTraceback` too."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise _passing(error) from None


def _passing(error: ValueError | OSError) -> Exception:
    """An error that Dynamo does not wrap, with the type, arguments and traceback of `error`."""
    kind = type(error)
    trace = error.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    caller = trace.tb_next.tb_frame  # the frame of `with user_errors()`; Dynamo shows the traceback from there on

    both = type(kind.__name__, (ShortenTraceback, kind), {"__str__": kind.__str__})
    made: Exception = kind.__new__(both, *error.args)  # its own `__init__` may want other arguments than `args`
    if isinstance(error, UnicodeError):
        kind.__init__(made, *error.args)  # its text is in fields that only this sets
    if isinstance(error, OSError):
        numbered = error.errno is not None  # then `args` lacks the file's name
        OSError.__init__(made, *((error.errno, error.strerror, error.filename) if numbered else error.args))
    made.__dict__ |= error.__dict__ | {"first_useful_frame": caller}
    return made.with_traceback(trace)
