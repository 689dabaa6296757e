"""What moves bytes: the interface of the engines.

An engine's methods are called by one thread at a time (the store's lock); completions are used by any thread.
"""

import ctypes
import time
from typing import NamedTuple, Protocol

import torch


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
