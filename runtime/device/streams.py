"""Devices whose streams run behind the host: what the runtime needs of them, and transfers on side streams.

Three rules keep a transfer from reading or writing the wrong bytes:

* It waits for an event of the compute stream. There a kernel may still be computing the stored tensor, or reading the
  memory that a load was given.
* Its owner keeps the memory until the *host* has seen an event fire that was recorded after the transfer, or until the
  compute stream waits for that event (`Queued.follow`). So no allocator has to know of side streams
  (`record_stream`), and memory is freed in the order of the compute stream. Where threads compute on several streams,
  a write is ordered with its tensor's stream (`in_turn_with`), and no stream gets what another one read ahead.
* The result of a transfer is asked for only after that event. Earlier it would block the host, or be wrong.

A fourth rule is for GPUs other than the first. A new thread is on device 0. A call there about an event of another
device makes a context on device 0, of some 500 MiB. A garbage collection may make such calls in any thread. So every
question to an event, and every call of a library, is made within `Streams.on`. Where torch records an event, or lets a
stream wait for one, it sets the device itself (CUDAEvent.h).
"""

import contextlib
import errno
import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ssd_fx.compat import _construct_storage_from_data_pointer, current_raw_stream
from ssd_fx.runtime.device import cuda_driver
from ssd_fx.runtime.device.clock import Anchor, anchor, timing
from ssd_fx.runtime.layout import Ints

_log = logging.getLogger("ssd_fx")

Check = Callable[[], None]
"""Called once a transfer is over; raises OSError if it went wrong."""

Event: TypeAlias = torch.Event  # torch.cuda.Event has the same methods
Stream: TypeAlias = Any  # torch.Stream, or torch.cuda.Stream, which has a `cuda_stream`

Enqueue = Callable[[Stream], Check | None]
"""Queues a transfer on a stream. None: the transfer cannot go wrong."""


class Streams:
    """The streams and the memory of torch.accelerator's devices.

    These devices are Intel's GPUs (XPU), and those that other packages add (PrivateUse1).
    """

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """A context within which `device` is this thread's current device."""
        if torch.accelerator.current_device_index() == device.index:
            return _HERE
        within: AbstractContextManager[None] = torch.accelerator.device_index(device.index)
        return within

    def current(self, device: torch.device) -> Stream:
        """The stream on which this thread computes."""
        return torch.accelerator.current_stream(device)

    def side(self, device: torch.device) -> Stream:
        """A stream for transfers, which stays the caller's until `give_back`."""
        return torch.Stream(device)

    def give_back(self, device: torch.device, stream: Stream) -> None:
        """Takes back a stream of `side`, which has nothing left to do."""

    def record(self, stream: Stream, *, timed: bool = False, sleeps: bool = False) -> Event:
        """An event after all work that has been queued on `stream`. `timed`: it can be asked when it fired. `sleeps`: a
        host that waits for it sleeps, where the device has such events; else it spins."""
        event: Event = stream.record_event(torch.Event(stream.device, enable_timing=timed))
        return event

    def idle(self, device: torch.device) -> Event:
        """A timed event that no kernel comes before."""
        return self.record(torch.Stream(device, priority=-1), timed=True)  # from another pool of streams than `side`

    def capturing(self) -> bool:
        """Whether this thread's stream is captured into a graph, and so executes nothing."""
        asked = getattr(torch.accelerator.current_stream(), "is_capturing", None)  # older streams cannot be captured
        return asked is not None and bool(asked())

    def empty(self, size: Ints, stride: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of the device with any content. It may be used by all later work of the current stream."""
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def pinned(self, nbytes: int) -> Tensor:
        """Pinned host memory for the current device, uint8. Here PyTorch allocates it, and rounds up to a power of two.

        Raises: RuntimeError if there is none.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def view(self, address: int, nbytes: int, device: torch.device) -> Tensor:
        """The memory at `address` as uint8. The view keeps nothing alive."""
        storage = _construct_storage_from_data_pointer(address, device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))

    def memory_bytes(self, device: torch.device) -> int:
        """All memory of the device; 0 if its package does not say."""
        ask = getattr(torch.get_device_module(device), "get_device_properties", None)
        return int(getattr(ask(device), "total_memory", 0)) if ask else 0

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queues `target.copy_(source)` on `stream`."""
        with stream:
            target.copy_(source, non_blocking=True)


class CudaStreams(Streams):
    """The streams of torch.cuda, which is ROCm's name too. They have handles for cuFile, and may be captured.

    PyTorch makes 32 streams and hands them out in turns, so one of them may be a user's or NCCL's. Those of `side` and
    `idle` are nobody else's. They are never destroyed, because what was queued on one may outlive its owner.

    CUDA's manual (cudaEventCreateWithFlags): events "provide the best performance when used with cudaStreamWaitEvent()
    and cudaEventQuery()" if they have no time and no host sleeps for them (cudaEventBlockingSync). So an event has that
    flag only if the host will wait for it.
    """

    def __init__(self) -> None:
        self._spare: dict[torch.device, list[Stream]] = defaultdict(list)
        self._idle: dict[torch.device, Stream] = {}
        self._known: dict[tuple[int, int], Stream] = {}  # by device and handle

    def current(self, device: torch.device) -> Stream:
        handle = current_raw_stream(device.index)  # torch makes an object each time, which takes 2 us
        found = self._known.get((device.index, handle))
        return found or self._known.setdefault((device.index, handle), torch.cuda.current_stream(device))

    def side(self, device: torch.device) -> Stream:
        spare = self._spare[device]
        return spare.pop() if spare else _own_stream(device)

    def give_back(self, device: torch.device, stream: Stream) -> None:
        self._spare[device].append(stream)

    def pinned(self, nbytes: int) -> Tensor:
        found = _driver()
        return found.pinned(torch.cuda.current_device(), nbytes) if found else super().pinned(nbytes)

    def record(self, stream: Stream, *, timed: bool = False, sleeps: bool = False) -> Event:
        event: Event = stream.record_event(torch.cuda.Event(enable_timing=timed, blocking=sleeps))
        return event

    def idle(self, device: torch.device) -> Event:
        if device not in self._idle:
            self._idle[device] = _own_stream(device)
        return self.record(self._idle[device], timed=True)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _driver() -> cuda_driver.CudaDriver | None:
    """NVIDIA's driver; None if this build of torch is not for it, or if it does not work."""
    try:
        return cuda_driver.cuda() if torch.version.cuda else None
    except RuntimeError as error:
        _log.warning("streams and pinned memory are PyTorch's: %s", error)
        return None


def _own_stream(device: torch.device) -> Stream:
    found = _driver()
    if found:
        return torch.cuda.ExternalStream(found.stream(device.index), device)
    return torch.cuda.Stream(device, priority=-1)


_HERE = contextlib.nullcontext()

BACKENDS: dict[str, Streams] = {"cuda": CudaStreams()}
"""By the type of device."""

_ACCELERATOR = Streams()
_UNSUPPORTED = ("mps",)  # its torch.Stream is a placeholder


def accelerator() -> str | None:
    """The type of device beside the CPU that this process computes on, if its streams are known here."""
    found = torch.accelerator.current_accelerator()
    return None if found is None or found.type in _UNSUPPORTED else found.type


def of(device: torch.device) -> Streams | None:
    """The streams of a device, or None if it has none: the CPU has finished its work when a call returns."""
    kind = device.type
    found = BACKENDS.get(kind)
    if found is not None or kind == "cpu":
        return found
    return _ACCELERATOR if kind == accelerator() else None


def timed(device: torch.device) -> AbstractContextManager[None]:
    """A context: transfers of `device` that are made within it are timed."""
    found = of(device)
    return timing.within(anchor(found, device)) if found else _HERE


def current(device: torch.device) -> Stream | None:
    """The stream on which this thread computes on `device`; None where a device has no streams."""
    found = of(device)
    return found.current(device) if found else None


def finish_copies_into(x: Tensor) -> None:
    """Returns when the host may read `x`. A device may still be copying into pinned memory (`non_blocking=True`).

    A program that reads `x` on the device alone is right without such a wait, so it may have none.
    """
    kind = accelerator() if x.device.type == "cpu" else None
    if kind is None or not x.is_pinned():
        return
    device = torch.device(kind, torch.accelerator.current_device_index())
    found = of(device)
    assert found, "the accelerator has streams"
    with found.on(device):
        found.record(found.current(device), sleeps=True).synchronize()


def in_turn_with(stream: Stream | None, device: torch.device) -> AbstractContextManager[None]:
    """A context: the work that it queues runs after what `stream` has so far, and before what `stream` gets later.

    It is for a tensor of `stream` that another thread's operator writes. The allocator reuses the memory of a stream in
    the order of that stream alone.
    """
    found = of(device)
    if found is None or stream is None or found.current(device) == stream:
        return _HERE
    return _in_turn(found, stream, device)


@contextlib.contextmanager
def _in_turn(found: Streams, stream: Stream, device: torch.device) -> Iterator[None]:
    with found.on(device):
        here = found.current(device)
        here.wait_event(found.record(stream))
        try:
            yield
        finally:
            stream.wait_event(found.record(here))


def is_captured(device: torch.device) -> bool:
    """Whether this thread's stream of `device` is captured in a CUDA graph."""
    found = of(device)
    if found is None:
        return False
    with found.on(device):
        return found.capturing()


def check_not_captured(device: torch.device) -> None:
    """Returns outside of the capture of a CUDA graph.

    Raises: RuntimeError within one.
    """
    if is_captured(device):
        raise RuntimeError(
            "ssd_fx cannot be captured in a CUDA graph: a replay runs kernels and no code of the host, which issues "
            "the transfers; right would be torch.cuda.graph around what is not compiled with ssd_fx"
        )


class SideStreams:
    """Two streams of one engine for every device, so that no load waits for stores."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, bool], tuple[Streams, Stream]] = {}

    def get(self, queued: Streams, device: torch.device, write: bool) -> Stream:
        """The stream for the stores of `device` if `write`, else the stream for its loads."""
        found = self._made.get((device, write))
        if found is None:
            with queued.on(device):
                found = self._made[device, write] = queued, queued.side(device)
        return found[1]

    def close(self) -> None:
        """Gives the streams back. All that was queued on them must have ended."""
        while self._made:
            (device, _), (queued, stream) = self._made.popitem()
            queued.give_back(device, stream)


_NEVER = OSError(errno.ECANCELED, "the transfer was never queued")


class Queued:
    """The completion of one transfer on the stream `side`.

    It starts after the event `after`, or else after all work that the current stream has when `start` is called. It
    cannot be taken back: `cancel` waits for its end. `wait` raises an error of the start too. `may_fail`: whether its
    outcome is known at its end only. It is timed if it is made within `timed`.
    """

    __slots__ = (
        "_after", "_anchor", "_begun", "_check", "_compute", "_device", "_ended", "_enqueue", "_error", "_fired",
        "_lock", "_may_fail", "_over", "_side", "_streams",
    )  # fmt: skip

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        side: Stream,
        enqueue: Enqueue,
        *,
        may_fail: bool = True,
        after: Event | None = None,
    ) -> None:
        self._streams = streams
        self._may_fail = may_fail
        self._after = after
        self._device = device
        self._side = side
        self._enqueue: Enqueue | None = enqueue
        self._compute: Stream | None = None  # the stream that it was started from
        self._begun: Event | None = None
        self._ended: Event | None = None
        self._fired = False  # the host has seen the end
        self._check: Check | None = None
        self._error: OSError | None = _NEVER
        self._anchor: Anchor | None = timing.anchor_of(device)
        self._over: tuple[float, float] | None = None  # its span, once its end was seen
        # Two threads may wait for one transfer and need its outcome, while a signal handler closes the store.
        self._lock = threading.RLock() if may_fail or self._anchor else _HERE

    def start(self) -> None:
        streams = self._streams
        self._compute = None if self._after else streams.current(self._device)
        self._side.wait_event(self._after or streams.record(self._compute))
        if self._anchor:
            self._begun = streams.record(self._side, timed=True)
        enqueue, self._enqueue = self._enqueue, None  # it may refer to this object
        assert enqueue, "started once"
        try:
            self._check = enqueue(self._side)
            self._error = None
        except OSError as error:
            self._error = error
        finally:
            # Streams wait for a copy that cannot fail, and the host for the outcome of others.
            timed, sleeps = self._anchor is not None, self._may_fail
            try:
                self._ended = streams.record(self._side, timed=timed, sleeps=sleeps)
            except BaseException:  # Ctrl-C: without an end, what is queued would count as never started
                self._ended = streams.record(self._side, timed=timed, sleeps=sleeps)
                raise

    def done(self) -> bool:
        if self._ended is None:
            return False
        if not self._fired:
            with self._streams.on(self._device):
                self._fired = self._ended.query()
        return self._fired

    def wait(self) -> None:
        self._see_end()
        if self._error is _NEVER:  # a new one: whoever catches it may keep it, and its frames
            raise OSError(*_NEVER.args)
        if self._error:
            raise self._error

    @property
    def is_timed(self) -> bool:
        """Whether its span will be known."""
        return self._anchor is not None

    def cannot_fail(self) -> bool:
        """Whether it was started, and its outcome is known before its end."""
        return not self._may_fail and self._error is None and self._ended is not None

    def follow(self, stream: Stream | None = None) -> bool:
        """Lets `stream`, or the device's current one, wait for the end instead of the host. Returns whether it does.

        False if the host has to see the outcome. Host memory must still be kept until the transfer has ended. Memory of
        the device may go back to the allocator, if `stream` is the next to use it.
        """
        if not self.cannot_fail():
            return False
        assert self._ended, "it was started"
        (stream or self._streams.current(self._device)).wait_event(self._ended)
        return True

    def abandon(self) -> bool:
        """As `follow`, for a transfer whose outcome nobody asks for: the stream it was started from waits for it."""
        return self._compute is not None and self.follow(self._compute)

    def cancel(self) -> bool:
        self._see_end()
        return self._error is not None

    def span(self) -> tuple[float, float]:
        """When the device started and ended it, on the host's clock; (0, 0) if untimed, or before the end was seen."""
        return self._over or (0.0, 0.0)

    def _see_end(self) -> None:
        """Returns when the device has come to the end, or at once if the transfer was never started."""
        if self._ended is None or (self._fired and not self._check and not self._anchor):
            return
        with self._streams.on(self._device):
            self._ended.synchronize()
            self._fired = True
            self._read_end(self._ended)

    def _read_end(self, ended: Event) -> None:
        with self._lock:
            if self._over is None and self._anchor and self._begun:
                self._over = (self._anchor.when(self._begun), self._anchor.when(ended))
            check, self._check = self._check, None  # a signal handler that comes here meanwhile must not ask again
            if check is None:
                return
            self._error = OSError(errno.EINPROGRESS, "the outcome of the transfer is not known yet")
            try:
                check()
                self._error = None
            except OSError as error:  # its frames would keep alive what `check` keeps, which must die right here
                self._error = error.with_traceback(None)
            except BaseException:  # Ctrl-C: the outcome is not known yet
                self._check = check
                raise
