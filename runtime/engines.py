"""What moves bytes: the interface of the engines, and their names.

An engine's methods are called by one thread at a time (the store's lock); completions are used by any thread.
"""

import ctypes
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ssd_fx.runtime.config import RuntimeConfig


class Memory(NamedTuple):
    """`nbytes` at address `ptr` of a device, which its owner keeps alive for as long as somebody transfers it.

    `home`: the device whose tensor these bytes are, where they are a copy in host memory: it will ask for them.
    """

    ptr: int
    nbytes: int
    device: torch.device
    home: torch.device | None = None

    @property
    def reader(self) -> torch.device:
        """The device to which what is written from here will be read: an engine writes so that it can."""
        return self.home or self.device

    @staticmethod
    def of(x: torch.Tensor) -> "Memory":
        """The memory that a dense tensor spans."""
        return Memory(x.data_ptr(), x.numel() * x.itemsize, x.device)


class Extent:
    """Room for one stored tensor of `nbytes`; `directory` is where, `offset` its place there (messages only)."""

    __slots__ = ("directory", "nbytes", "offset")

    def __init__(self, nbytes: int, directory: str, offset: int = 0) -> None:
        self.nbytes, self.directory, self.offset = nbytes, directory, offset


class Completion(Protocol):
    """A transfer, which keeps all it needs but the tensor's memory alive."""

    def start(self) -> None:
        """Begins it. Apart from its making, so that its owner can note it down first: an exception that comes between
        (Ctrl-C) leaves no transfer behind that nobody knows of. May raise OSError like `wait`."""

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    def wait(self) -> None:
        """Returns when all bytes are where they belong; may be called again.

        Raises: OSError with path, offset and bytes.
        """

    def cancel(self) -> bool:
        """Ends the transfer soon. After it nothing touches the memory. True: not all bytes had been transferred."""

    def span(self) -> tuple[float, float]:
        """Start and end of the transfer on the clock of time.perf_counter, once done."""

    @property
    def seconds(self) -> float:
        """How long the transfer took, once done."""


class Engine(Protocol):
    """Moves the bytes of an extent to and from memory, which the caller keeps until that is done.

    `devices`: the types of device, beside the CPU, whose memory it reaches.
    """

    name: str
    devices: frozenset[str]

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        """Room for `nbytes` > 0; `tier`: where the plan wants it, which only an engine of several tiers looks at.

        Raises: OSError if there is none.
        """

    def free(self, extent: Extent) -> None:
        """Takes back room whose transfers are done."""

    def write(self, extent: Extent, memory: Memory) -> Completion:
        """What will store the bytes of `memory` in `extent` once it is started."""

    def read(self, extent: Extent, memory: Memory) -> Completion:
        """What will load the bytes of `extent` into `memory` once it is started."""

    def failed(self, extent: Extent, error: OSError) -> None:
        """Told that a write to `extent` failed, so that no new extents come from there."""

    @property
    def disk_bytes(self) -> int:
        """Space that the engine holds on disk."""

    def close(self) -> None:
        """Cancels or finishes what is under way; the engine is of no use afterwards."""


def outcome(completion: Completion) -> OSError | None:
    """Waits; the error instead of raising it."""
    try:
        completion.wait()
    except OSError as error:
        return error.with_traceback(None)  # whose frames would keep handles alive until a garbage collection
    return None


class Copy:
    """A completion that copies `nbytes` at its start."""

    __slots__ = ("_nbytes", "_source", "_span", "_target")

    def __init__(self, target: int, source: int, nbytes: int) -> None:
        self._target, self._source, self._nbytes = target, source, nbytes
        self._span = (0.0, 0.0)

    def start(self) -> None:
        started = time.perf_counter()
        ctypes.memmove(self._target, self._source, self._nbytes)
        self._span = (started, time.perf_counter())

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def cancel(self) -> bool:
        return self._span == (0.0, 0.0)

    def span(self) -> tuple[float, float]:
        return self._span

    @property
    def seconds(self) -> float:
        return self._span[1] - self._span[0]


def not_readable(stored: torch.device, wanted: torch.device) -> NotImplementedError:
    """To be raised by a read for another device than the one the bytes were written for, where it has not their form.

    What a graph stores it loads to the same device, so nobody should see it.
    """
    origin = "the CPU" if stored.type == "cpu" else str(stored)
    return NotImplementedError(f"what was stored from {origin} cannot be loaded to {wanted}")


def check_device(engine: Engine, device: torch.device) -> None:
    """Raises: NotImplementedError for a device whose memory the engine cannot reach."""
    if device.type != "cpu" and device.type not in engine.devices:
        reach = " and ".join(sorted(engine.devices))
        message = f"engine {engine.name!r} moves tensors on {reach}, and got one on {device}; compile for one of those"
        raise NotImplementedError(message)


def _memory(_: RuntimeConfig) -> Engine:
    from ssd_fx.runtime.host import MemoryEngine

    return MemoryEngine()


def _posix(config: RuntimeConfig) -> Engine:
    from ssd_fx.runtime.posix import PosixEngine
    from ssd_fx.runtime.striped import StripedEngine

    if not config.dirs:
        raise ValueError("engine 'posix' needs at least one directory on a drive in dirs")
    made: list[Engine] = []
    try:
        for path in config.dirs:
            made.append(
                PosixEngine(path, allow_tmpfs=config.allow_tmpfs, limit=config.disk_limit, checksums=config.checksums)
            )
    except BaseException:
        for engine in made:
            engine.close()
        raise
    return made[0] if len(made) == 1 else StripedEngine(made)


_GDS = {"kvikio": ("kvikio", False), "kvikio-forced": ("kvikio", True)}  # the driver, whether it may copy in the host


def _gds(name: str) -> Callable[[RuntimeConfig], Engine]:
    def make(config: RuntimeConfig) -> Engine:
        from ssd_fx.runtime import cufile, gds

        driver, forced = _GDS[name]
        return gds.make(cufile.driver(driver), config, forced=forced)

    return make


def check_engine(name: str) -> None:
    """Returns if this machine has what the engine needs, its directories aside.

    Raises: RuntimeError, which names the engine that would do.
    """
    from ssd_fx.runtime import cufile, gds

    if name in _GDS:
        driver, forced = _GDS[name]
        gds.check_machine(cufile.driver(driver), forced=forced)


def _auto(config: RuntimeConfig) -> Engine:
    from ssd_fx.runtime import cufile, gds

    return gds.usable(cufile.driver("kvikio"), config) or _posix(config)


ENGINES: dict[str, Callable[[RuntimeConfig], Engine]] = {
    "auto": _auto,
    "posix": _posix,
    "memory": _memory,
    **{name: _gds(name) for name in _GDS},
}

_made: list[weakref.ref[Engine]] = []


def make_tiers(config: RuntimeConfig) -> tuple[Engine, int]:
    """The engine of `config`, and how many bytes may rest where they are before they go to it.

    Where a GPU computes, `host_budget` is a tier of its own, which tensors are copied to; else they are there already.

    Raises: as `make_engine`.
    """
    engine = make_engine(config)
    if not (config.host_budget and torch.cuda.is_available() and "cuda" in engine.devices):
        return engine, config.resident + config.host_budget
    from ssd_fx.runtime.host import MemoryEngine
    from ssd_fx.runtime.tiered import TieredEngine

    host = MemoryEngine()
    return TieredEngine(host, engine, host.located, config.host_budget, config.inflight), config.resident


def make_engine(config: RuntimeConfig) -> Engine:
    """The engine that `config` names.

    Raises: ValueError for an unknown name; what the engine raises for its directories.
    """
    if config.engine not in ENGINES:
        raise ValueError(f"unknown engine {config.engine!r}; known are {sorted(ENGINES)}")
    engine = ENGINES[config.engine](config)
    _made[:] = [*(made for made in _made if made()), weakref.ref(engine)]
    return engine


def disk_bytes() -> int:
    """Space on disk that the engines of this process hold; those that are closed hold none."""
    return sum(engine.disk_bytes for made in list(_made) if (engine := made()))


def forget_engines() -> None:
    """Their files do not count any more: they are a parent's, before a fork."""
    _made.clear()
