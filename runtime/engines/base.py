"""The interface of the engines, which move bytes.

An engine's methods are called under the lock of `entries`, so by one thread at a time. Any thread uses completions.
"""

import ctypes
import errno
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

# Errors of a write after which the next one may succeed. EFAULT: the tensor was given other memory, or the driver of a
# GPU could not copy it.
NOT_OF_THE_DRIVE = (errno.ECANCELED, errno.EFAULT, errno.ENOMEM)


class Memory(NamedTuple):
    """`nbytes` at address `ptr` of a device. The owner keeps them alive while a transfer uses them.

    `home`: the device of the tensor, if these bytes are a copy of it in host memory.
    """

    ptr: int
    nbytes: int
    device: torch.device
    home: torch.device | None = None

    @property
    def reader(self) -> torch.device:
        """The device that the bytes will be read to, for which an engine must write them."""
        return self.home or self.device

    @staticmethod
    def of(x: torch.Tensor) -> "Memory":
        """The memory that a dense tensor spans."""
        return Memory(x.data_ptr(), x.numel() * x.itemsize, x.device)


@dataclass(eq=False, slots=True)
class Extent:
    """Room for one stored tensor of `nbytes`."""

    nbytes: int
    on_drive = True  # a write to it wears a drive


class Completion(Protocol):
    """A transfer. It keeps everything alive that it needs, except the tensor's memory."""

    def start(self) -> None:
        """Starts the transfer.

        The owner notes the transfer down between its construction and this call. So a Ctrl-C in between leaves no
        transfer running that nobody knows of.

        Raises: OSError, as `wait` does.
        """

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    def wait(self) -> None:
        """Returns when all bytes are where they belong. May be called again.

        Raises: OSError with path, offset and bytes.
        """

    def cancel(self) -> bool:
        """Whether bytes were left to transfer. Ends the transfer; afterwards nothing touches the memory."""

    def span(self) -> tuple[float, float]:
        """Start and end of the transfer in seconds of time.perf_counter, once it is done."""


class Engine(Protocol):
    """Moves the bytes of an extent to and from memory, which the caller keeps alive until that is done.

    `devices`: the types of device, beside the CPU, whose memory it reaches.
    """

    name: str
    devices: frozenset[str]

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        """Room for `nbytes` > 0. `tier`: where the plan wants it; only an engine of several tiers looks at this.

        Raises: OSError if there is no room.
        """

    def free(self, extent: Extent) -> None:
        """Takes back an extent whose transfers are done. A copy on a stream that cannot fail may go on: it is in vain.

        The engine sees to it that such a copy does not touch what has the extent's room later.
        """

    def write(self, extent: Extent, memory: Memory) -> Completion:
        """A transfer of the bytes of `memory` to `extent`, which the caller starts."""

    def read(self, extent: Extent, memory: Memory) -> Completion:
        """A transfer of the bytes of `extent` to `memory`, which the caller starts."""

    def failed(self, extent: Extent, error: OSError) -> None:
        """Records that a write to `extent` failed, so that `alloc` gives no new room there.

        Not called for `NOT_OF_THE_DRIVE`.
        """

    def close(self) -> None:
        """Ends all transfers. The engine must not be used afterwards."""


def outcome(completion: Completion) -> OSError | None:
    """The error of a transfer, or None. Waits for its end."""
    try:
        completion.wait()
    except OSError as error:
        return error.with_traceback(None)  # its frames would keep handles alive until a garbage collection
    return None


def cut_short(completion: Completion | None) -> OSError | None:
    """Ends a transfer. Returns None if all bytes had been transferred, else the error.

    The error is ECANCELED, unless the transfer had failed before. None: it was never made, and counts as cancelled.
    """
    if completion and not completion.cancel():
        return None
    error = outcome(completion) if completion else None
    return error or OSError(errno.ECANCELED, "the transfer was cancelled")


@dataclass(eq=False, slots=True)
class Copy:
    """A completion that copies bytes at its start. It keeps alive the owner of the engine's memory."""

    _target: int
    _source: int
    _nbytes: int
    _owner: object = None
    _copied: bool = field(default=False, init=False)
    _span: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def start(self) -> None:
        started = time.perf_counter()
        ctypes.memmove(self._target, self._source, self._nbytes)
        self._copied = True
        self._span = (started, time.perf_counter())

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if not self._copied:  # interrupts (Ctrl-C) ended its start, and then its cancellation
            raise OSError(errno.ECANCELED, "the transfer was never queued")

    def cancel(self) -> bool:
        return not self._copied

    def span(self) -> tuple[float, float]:
        return self._span


def not_readable(stored: torch.device, wanted: torch.device) -> NotImplementedError:
    """The error of a read to a device for which the bytes were not written.

    A graph loads to the device that it stored from, so users should never see it.
    """
    origin = "the CPU" if stored.type == "cpu" else str(stored)
    return NotImplementedError(f"what was stored from {origin} cannot be loaded to {wanted}")


def check_device(engine: Engine, device: torch.device) -> None:
    """Returns if the engine reaches the memory of `device`.

    Raises: NotImplementedError if it does not.
    """
    if device.type != "cpu" and device.type not in engine.devices:
        reach = " and ".join(sorted(engine.devices))
        message = f"engine {engine.name!r} moves tensors on {reach}, and got one on {device}; compile for one of those"
        raise NotImplementedError(message)
