"""What the tests of ways of working share: options for code that passes only the name of a backend on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.loops.loops import Compile


@contextmanager
def by_name(compile: Compile) -> Iterator[str]:
    """The name of the backend; its options are in the environment meanwhile."""
    how = compile.keywords  # type: ignore[attr-defined]
    options = how.get("options", {}).items()
    texts = {f"SSD_FX_{name.upper()}": ":".join(x) if isinstance(x, list) else str(x) for name, x in options}
    with mock.patch.dict(os.environ, texts):
        yield how["backend"]
