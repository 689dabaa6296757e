"""What moves bytes: the interface of the engines, the one in memory, and their names.

An engine's methods are called by one thread at a time (the store's lock); completions are used by any thread.
"""

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ssd_fx.runtime.buffers import POOL, Region
from ssd_fx.runtime.config import RuntimeConfig


class Memory(NamedTuple):
    """`nbytes` at address `ptr` of a device, which its owner keeps alive for as long as somebody transfers it."""

    ptr: int
    nbytes: int
    device: torch.device

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
    """Moves the bytes of an extent to and from memory, which the caller keeps until that is done."""

    name: str

    def alloc(self, nbytes: int) -> Extent:
        """Room for `nbytes` > 0.

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


class _HostExtent(Extent):
    __slots__ = ("region",)

    def __init__(self, nbytes: int, region: Region) -> None:
        super().__init__(nbytes, "memory")
        self.region = region


class MemoryEngine:
    """Extents are host memory and transfers are copies: the reference that others are compared with."""

    name = "memory"
    disk_bytes = 0

    def alloc(self, nbytes: int) -> Extent:
        return _HostExtent(nbytes, POOL.take(nbytes))

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, _HostExtent)
        POOL.give(extent.region)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        return Copy(extent.region.address, memory.ptr, memory.nbytes)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        return Copy(memory.ptr, extent.region.address, memory.nbytes)

    def failed(self, extent: Extent, error: OSError) -> None:
        raise AssertionError(f"a copy in memory cannot fail: {error}")

    def close(self) -> None:
        return


def check_device(engine: Engine, device: torch.device) -> None:
    """Raises: NotImplementedError for a device whose memory the engine cannot reach."""
    if device.type != "cpu":
        message = f"engine {engine.name!r} moves CPU tensors only, and got one on {device}; compile for the CPU"
        raise NotImplementedError(message)


def _posix(config: RuntimeConfig) -> Engine:
    from ssd_fx.runtime.posix import PosixEngine

    return PosixEngine(config.dirs, allow_tmpfs=config.allow_tmpfs, checksums=config.checksums)


ENGINES: dict[str, Callable[[RuntimeConfig], Engine]] = {
    "auto": _posix,
    "posix": _posix,
    "memory": lambda _: MemoryEngine(),
}

_made: list[Engine] = []


def make_engine(config: RuntimeConfig) -> Engine:
    """The engine that `config` names.

    Raises: ValueError for an unknown name; what the engine raises for its directories.
    """
    if config.engine not in ENGINES:
        raise ValueError(f"unknown engine {config.engine!r}; known are {sorted(ENGINES)}")
    engine = ENGINES[config.engine](config)
    _made.append(engine)
    return engine


def disk_bytes() -> int:
    """Space on disk that the engines of this process hold."""
    return sum(engine.disk_bytes for engine in list(_made))


def forget_engines() -> None:
    """Their files do not count any more: they are closed, or a parent's before a fork."""
    _made.clear()
