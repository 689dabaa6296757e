"""Queued work: what the runtime needs of a device whose streams run behind the host, and a transfer on a side stream.

Three rules keep a transfer from seeing or leaving garbage:

* it waits for an event of the compute stream: what is stored may still be in the making there, and the memory that a
  load was given may still have a user there;
* its owner keeps the memory until an event recorded behind it has fired, as the *host* saw it. So no allocator has to
  know of side streams (`record_stream`), and memory goes back in the order of the compute stream, where it came from;
* what was transferred is asked for only after that event: asking earlier would block the host, or be wrong.

And one for GPUs that are not the first: a thread is on device 0 until somebody says otherwise, and a call there about
an event or a stream of another device makes a context on device 0, of some 500 MiB. So whoever asks an event, or calls
a library, is within `Streams.on`: the garbage of a tensor may be collected in any thread.
"""

import errno
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ssd_fx.runtime.device.clock import Anchor, anchor
from ssd_fx.runtime.layout import Ints

Check = Callable[[], None]
"""Called once a transfer is over; raises OSError if it went wrong."""

Enqueue = Callable[["Stream"], Check]
"""Queues a transfer on a stream."""


class Event(Protocol):
    """A point in a stream. To be asked within `Streams.on`."""

    def query(self) -> bool:
        """Whether the device has come there."""

    def synchronize(self) -> None:
        """Blocks the host until it has."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds of the device from here to `end`; both have fired."""


class Stream(Protocol):
    """A queue of a device. `cuda_stream`: its raw handle."""

    @property
    def cuda_stream(self) -> int: ...

    def wait_event(self, event: Any) -> None:
        """What is queued here from now on starts after `event`."""


class Streams(Protocol):
    """The streams and the memory of one type of device."""

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Within it `device` is the one that this thread is on."""

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread computes."""

    def side(self, device: torch.device) -> Stream:
        """Another one."""

    def record(self, stream: Stream) -> Event:
        """An event behind all that has been queued on `stream`."""

    def idle(self, device: torch.device) -> Event:
        """An event behind no kernel."""

    def capturing(self) -> bool:
        """Whether this thread's stream records a graph, instead of doing what it is told."""

    def empty(self, size: Ints, stride: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the device, free from here on in the order of the current stream, with any content."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory, uint8, that the device copies to and from without the host."""

    def view(self, address: int, nbytes: int, device: torch.device) -> Tensor:
        """The memory there as uint8; it keeps nothing alive."""

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queues `target.copy_(source)` on `stream`."""


class Exposed:
    """Memory of a device for whoever reads `__cuda_array_interface__` (version 3), as bytes; keeps nothing alive."""

    __slots__ = ("__cuda_array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",  # whatever the tensor's dtype: bool, bfloat16 and float8 have no name here
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaStreams:
    """torch.cuda's. Its calls go to the device of their stream, but for `query` and `synchronize` of an event."""

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        within: AbstractContextManager[None] = torch.cuda.device(device)
        return within

    def current(self, device: torch.device) -> Stream:
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)

    def record(self, stream: Any) -> Event:
        event: Event = stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))  # wait without spinning
        return event

    def idle(self, device: torch.device) -> Event:
        return self.record(torch.cuda.Stream(device, priority=-1))  # from a pool that the transfers do not use

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def empty(self, size: Ints, stride: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def view(self, address: int, nbytes: int, device: torch.device) -> Tensor:
        return torch.as_tensor(Exposed(address, nbytes), device=device)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


BACKENDS: dict[str, Streams] = {"cuda": CudaStreams()}
"""By the type of device. What is not here (the CPU) has done what it was told when the call returns."""


def of(device: torch.device) -> Streams | None:
    """The streams of a device that has some."""
    return BACKENDS.get(device.type)


def check_not_captured(device: torch.device) -> None:
    """Raises: RuntimeError within the capture of a CUDA graph."""
    found = of(device)
    if not found:
        return
    with found.on(device):
        capturing = found.capturing()
    if capturing:
        raise RuntimeError(
            "ssd_fx cannot be captured in a CUDA graph: a replay runs kernels and no code of the host, which issues "
            "the transfers; right would be torch.cuda.graph around what is not compiled with ssd_fx"
        )


class SideStreams:
    """For every device two streams, so that no load waits behind stores; `prepare` is called with each new one."""

    def __init__(self, prepare: Callable[[Stream], None] = lambda _: None) -> None:
        self._prepare = prepare
        self._made: dict[tuple[torch.device, bool], Stream] = {}

    def get(self, device: torch.device, write: bool) -> Stream:
        """The stream for the stores to or from `device`, or for its loads."""
        stream = self._made.get((device, write))
        if stream is None:
            queued = of(device)
            assert queued, "asked for such a device"
            with queued.on(device):
                stream = queued.side(device)
                self._prepare(stream)
            self._made[device, write] = stream
        return stream

    def all(self) -> list[Stream]:
        """Those made so far."""
        return list(self._made.values())


class Queued:
    """A completion: one transfer on the side stream `side`, behind all that the current stream has when it is started.

    It cannot be taken back: `cancel` waits for its end. An error at its start is raised by `wait`, as later ones are.
    """

    __slots__ = ("_anchor", "_begun", "_check", "_device", "_ended", "_enqueue", "_error", "_lock", "_over", "_side")

    def __init__(self, device: torch.device, side: Stream, enqueue: Enqueue) -> None:
        self._device, self._side, self._enqueue = device, side, enqueue
        self._begun: Event | None = None
        self._ended: Event | None = None
        self._check: Check | None = None
        self._error: OSError | None = OSError(errno.ECANCELED, "the transfer was never queued")
        self._anchor: Anchor | None = None
        self._over: tuple[float, float] | None = None  # its span, once somebody saw its end
        self._lock = threading.Lock()  # two threads may wait for one transfer, and both want to know how it ended

    def start(self) -> None:
        streams = of(self._device)
        assert streams, "made for such a device"
        with streams.on(self._device):
            self._start(streams)

    def _start(self, streams: Streams) -> None:
        self._anchor = anchor(streams, self._device)
        self._side.wait_event(streams.record(streams.current(self._device)))
        self._begun = streams.record(self._side)
        try:
            self._check = self._enqueue(self._side)
            self._error = None
        except OSError as error:
            self._error = error
        finally:
            self._ended = streams.record(self._side)

    def done(self) -> bool:
        if self._ended is None:
            return False
        with self._on_device():
            return self._ended.query()

    def wait(self) -> None:
        self._see_end()
        if self._error:
            raise self._error

    def cancel(self) -> bool:
        self._see_end()
        return self._error is not None

    def span(self) -> tuple[float, float]:
        """As the device says; (0, 0) before somebody saw the end."""
        return self._over or (0.0, 0.0)

    @property
    def seconds(self) -> float:
        started, ended = self.span()
        return ended - started

    def _see_end(self) -> None:
        """Returns when the device has come to the end, or at once if it was never to start."""
        if self._ended is None:
            return
        with self._on_device():
            self._ended.synchronize()
            self._read_end(self._ended)

    def _read_end(self, ended: Event) -> None:
        with self._lock:
            if self._over is None:
                assert self._begun, "recorded before the end"
                assert self._anchor, "taken before the events"
                self._over = (self._anchor.when(self._begun), self._anchor.when(ended))
            if self._check:
                try:
                    self._check()
                except OSError as error:  # its frames have what `_check` has, which is to go here and nowhere else
                    self._error = error.with_traceback(None)
                self._check = None

    def _on_device(self) -> AbstractContextManager[None]:
        streams = of(self._device)
        assert streams, "made for such a device"
        return streams.on(self._device)
