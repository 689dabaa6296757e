"""A drive that is held to a rate: the engine "held", for benchmarks. It moves real bytes, and ends no sooner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ssd_fx.options import Options
from ssd_fx.runtime.engines.base import Engine
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.engines.registry import ENGINES

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the drive is that of the tests

from tests.runtime.engines import Clock, HeldEngine, Lane

NAME = "held"


def register(gbps: float) -> Callable[[float], None]:
    """Give this process the engine, with `gbps` GB/s each way on its own. Returns what sets another rate."""
    writes, reads = Lane(Clock()), Lane(Clock())

    def make(config: Options) -> Engine:
        return HeldEngine(PosixEngine(config.dirs[0], checksums=config.checksums), writes, reads)

    def hold(rate: float) -> None:
        writes.s_per_byte = reads.s_per_byte = 1 / (rate * 1e9)

    hold(gbps)
    ENGINES[NAME] = make
    return hold
