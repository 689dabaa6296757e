"""What ssd_fx moved during one step, as a part of what the benchmarks report of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Figures of `ssd_fx.stats()` under the names that they have there; zero for a step without ssd_fx."""

    stores: int = 0
    loads: int = 0
    stall_s: float = 0.0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    forwarded_bytes: int = 0

    @classmethod
    def figures(cls, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `stats` that the class, or one derived from it, has a field for."""
        names = {each.name for each in fields(cls)}
        return {name: value for name, value in stats.items() if name in names}
