"""How a command ends that cannot do what it was asked for: one line on the standard error, and a status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ssd_fx.runtime.errors import without_number


class Refused(Exception):
    """`cli.main` prints the text and returns `status`."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@contextmanager
def refusing(status: int) -> Iterator[None]:
    """Within, a ValueError or an OSError ends the command. Results are printed outside: that fails for other reasons.

    Raises:
        Refused: what the error says.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise Refused(without_number(error), status) from None
