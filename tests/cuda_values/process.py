"""Starts the process that trains, and reads what it prints."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tests.cuda_codegen.process import pretending
from tests.cuda_values.results import Trained


def trained(
    cases: Iterable[str], engines: Iterable[str], orders: Iterable[str | int], *, steps: int = 3, plant: str = ""
) -> dict[tuple[str, str], list[Trained]]:
    """By case and engine, what happened in each order; `plant` is a fault of `plants`.

    Raises: RuntimeError with what the process wrote, when it failed.
    """
    planted = ["--plant", plant] if plant else []
    arguments = ["--engines", ",".join(engines), "--orders", ",".join(map(str, orders)), "--steps", str(steps)]
    lines = pretending("tests.cuda_values.run", [*arguments, *planted, *cases], os.environ | {"TRITON_INTERPRET": "1"})
    found: dict[tuple[str, str], list[Trained]] = {}
    for line in lines:
        each = Trained.of(line)
        found.setdefault((each.case, each.engine), []).append(each)
    return found
