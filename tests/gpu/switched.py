"""An engine that is another one at each step, so that one compilation serves them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

from ssd_fx.options import Options
from ssd_fx.runtime import ops
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.engines.registry import ENGINES, make_engine
from ssd_fx.runtime.engines.tiered import TieredEngine
from ssd_fx.runtime.inflight import LEAST_BYTES
from ssd_fx.runtime.writer import Writer

NAME = "test-switched"


@dataclass
class _Switch:
    """`room`: of the tier of host memory, in bytes."""

    engine: str = "memory"
    room: int = 0


_now = _Switch()


class Switched:
    """`devices`: what the engines of a GPU reach."""

    name, devices = NAME, frozenset({"cpu", "cuda"})

    def __init__(self, config: Options) -> None:
        self._config = config
        self._made: dict[str, Engine] = {}
        self._of: dict[Extent, Engine] = {}

    def _engine(self) -> Engine:
        name, config = _now.engine, self._config
        if name not in self._made:
            made = make_engine(replace(config, engine="posix" if name == "tiered" else name))
            if name == "tiered":  # as `make_tiers` makes it where a GPU is
                made = TieredEngine(
                    MemoryEngine(), made, _now.room, config.inflight_bytes or LEAST_BYTES, lambda _: None
                )
            self._made[name] = made
        return self._made[name]

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        engine = self._engine()
        extent = engine.alloc(nbytes, tier)
        self._of[extent] = engine
        return extent

    def free(self, extent: Extent) -> None:
        self._of.pop(extent).free(extent)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        return self._of[extent].write(extent, memory)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return self._of[extent].read(extent, memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        self._of[extent].failed(extent, error)

    def close(self) -> None:
        with ExitStack() as closing:
            for engine in self._made.values():
                closing.callback(engine.close)


ENGINES[NAME] = Switched


@contextmanager
def through(engine: str, room: int = 0) -> Iterator[None]:
    """What is stored meanwhile goes through `engine`, or "tiered": posix behind `room` bytes of host memory."""
    global _now
    before, _now = _now, _Switch(engine, room)
    try:
        yield
    finally:
        _now = before


@contextmanager
def kept() -> Iterator[None]:
    """Nothing leaves the device."""
    with mock.patch.object(Writer, "due", return_value=None):
        yield


@contextmanager
def graph_kept(engine: str) -> Iterator[None]:
    """As in a backward with `retain_graph=True`: what is in memory is copied, not given away."""
    with through(engine), mock.patch.object(ops, "keeps_graph", return_value=True):
        yield


def ways(saved_bytes: int) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """All ways of a step that saves so much; half of it has room in the tier of host memory."""
    found: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "memory": lambda: through("memory"),
        "posix": lambda: through("posix"),
        "tiered": lambda: through("tiered", saved_bytes // 2),
        "memory, graph kept": lambda: graph_kept("memory"),
        "posix, graph kept": lambda: graph_kept("posix"),
    }
    if "kvikio-forced" in os.environ.get("GPU_ENGINES", "") and cufile.status(forced=True).version:
        found["kvikio-forced"] = lambda: through("kvikio-forced")
    return found
