"""An engine that is another one at each step, so that one compilation serves them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from ssd_fx.runtime import ops
from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.engines.registry import ENGINES, make_engine, make_tiers
from ssd_fx.runtime.writer import Writer

NAME = "test-switched"
ROOM = 1 << 30  # of the host tier
_now = "memory"


class Switched:
    """`devices`: what the engines of a GPU reach."""

    name, devices = NAME, frozenset({"cpu", "cuda"})

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._made: dict[str, Engine] = {}
        self._of: dict[Extent, Engine] = {}

    def _engine(self) -> Engine:
        if _now not in self._made:
            tiered = _now == "tiered"
            config = replace(self._config, engine="posix" if tiered else _now, host_budget=ROOM * tiered)
            self._made[_now] = make_tiers(config, lambda _: None)[0] if tiered else make_engine(config)
        return self._made[_now]

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

    @property
    def disk_bytes(self) -> int:
        return sum(engine.disk_bytes for engine in self._made.values())

    def close(self) -> None:
        with ExitStack() as closing:
            for engine in self._made.values():
                closing.callback(engine.close)


ENGINES[NAME] = Switched


@contextmanager
def through(engine: str) -> Iterator[None]:
    """What is stored meanwhile goes through `engine`, or "tiered": posix behind a tier of host memory."""
    global _now
    before, _now = _now, engine
    try:
        yield
    finally:
        _now = before


@contextmanager
def kept() -> Iterator[None]:
    """Nothing leaves the device."""
    with mock.patch.object(Writer, "_due", return_value=None):
        yield


@contextmanager
def graph_kept(engine: str) -> Iterator[None]:
    """As in a backward with `retain_graph=True`: what is in memory is copied, not given away."""
    with through(engine), mock.patch.object(ops, "keeps_graph", return_value=True):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    **{name: lambda name=name: through(name) for name in ("memory", "posix", "tiered")},  # type: ignore[misc]
    "memory, graph kept": lambda: graph_kept("memory"),
    "posix, graph kept": lambda: graph_kept("posix"),
}
if "kvikio-forced" in os.environ.get("GPU_ENGINES", ""):
    WAYS["kvikio-forced"] = lambda: through("kvikio-forced")
