"""The engines by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ssd_fx.options import Options
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines import gds, staged
from ssd_fx.runtime.engines.base import Engine
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.engines.tiered import TieredEngine
from ssd_fx.runtime.inflight import LEAST_BYTES
from ssd_fx.runtime.native import loader


def _memory(config: Options) -> MemoryEngine:
    return MemoryEngine(config.ranks.count)


def _posix(config: Options) -> Engine:
    if not config.dirs:
        raise ValueError("engine 'posix' needs at least one directory on a drive in dirs")
    device = staged.needed()
    make: Callable[..., Engine] = functools.partial(staged.StagedEngine, device) if device else PosixEngine
    return make(*config.dirs, allow_tmpfs=config.allow_tmpfs, limit=config.disk_limit, checksums=config.checksums)


_GDS = {"kvikio": False, "kvikio-forced": True}
"""By engine, whether it may copy through the host."""


def check_engine(name: str) -> None:
    """Returns if this machine has what the engine needs, apart from its directories.

    Raises: RuntimeError, which names an engine that works here.
    """
    if name in _GDS:
        gds.check_machine(forced=_GDS[name])
    if name != "memory":
        loader.library()


ENGINES: dict[str, Callable[[Options], Engine]] = {
    "auto": lambda config: gds.usable(config) or _posix(config),
    "posix": _posix,
    "memory": _memory,
    **{name: functools.partial(gds.make, forced=forced) for name, forced in _GDS.items()},
}


def make_tiers(config: Options, engine: Engine, moved: Callable[[int], None]) -> tuple[Engine, int]:
    """The engine of `config` with a tier before it, if it has one, and the bytes that may be resident before they go to
    it.

    `engine`: of `make_engine`. `moved` is called with the bytes that have moved from the tier to it.

    On a device with memory of its own `host_budget` is the room of a tier to which tensors are copied. On the CPU
    tensors are in host memory already, so `host_budget` adds to the bytes that may be resident.
    """
    has_memory = torch.accelerator.is_available() and streams.accelerator() in engine.devices
    if not (config.host_budget and has_memory):
        return engine, config.resident + config.host_budget
    tiers = TieredEngine(_memory(config), engine, config.host_budget, config.inflight_bytes or LEAST_BYTES, moved)
    return tiers, config.resident


def make_engine(config: Options) -> Engine:
    """The engine that `config` names.

    Raises: ValueError for an unknown name; what the engine raises for its directories.
    """
    if config.engine not in ENGINES:
        raise ValueError(f"unknown engine {config.engine!r}; known are {sorted(ENGINES)}")
    return ENGINES[config.engine](config)
