"""Files for devices whose memory the I/O threads cannot reach: every transfer goes through pinned host memory.

device --copy--> pinned memory --write--> file        a store
file --read--> pinned memory --copy--> device         a load

This works on every device of torch.accelerator. It is slower than the staging of engine "posix" on CUDA
(`native/staging.h`): each tensor is copied whole before its first byte is written, and pinned memory is allocated for
each transfer.
"""

from __future__ import annotations

import errno
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Memory
from ssd_fx.runtime.engines.drives import FileExtent
from ssd_fx.runtime.engines.posix import PosixEngine


class StagedEngine(PosixEngine):
    """`PosixEngine` with pinned memory between its files and devices of the type `device`."""

    def __init__(self, device: str, *directories: str, **options: Any) -> None:
        warnings.warn(
            f"ssd_fx has no fast way between {device} and files: tensors go through pinned memory, one copy each",
            RuntimeWarning,
            stacklevel=2,
        )
        self.devices = PosixEngine.devices | {device}
        self._sides = streams.SideStreams()
        self._writes = ThreadPoolExecutor(1, "ssd_fx-staged")  # two threads, so that no load waits for stores
        self._reads = ThreadPoolExecutor(1, "ssd_fx-staged")
        super().__init__(*directories, **options)

    def on_device(self, device: torch.device) -> bool:
        return streams.of(device) is not None

    def device_transfer(self, write: bool, extent: FileExtent, memory: Memory) -> Completion:
        nbytes, device = memory.nbytes, memory.device
        queued = streams.of(device)
        assert queued, "only asked for devices with streams"
        padded, align = extent.pieces[-1].file.padded(nbytes), self.drives.align
        try:
            found = queued.pinned(padded + align)
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no pinned memory for a tensor of {nbytes} B") from error
        start = -found.data_ptr() % align
        whole = found[start : start + padded]
        staging = whole[:nbytes]
        whole[nbytes:].zero_()  # no bytes of other tensors go to the disk
        file = self.transfer(write, extent, whole.data_ptr(), padded)
        side = self._sides.get(queued, device, write)

        def enqueue(side: streams.Stream) -> None:
            ours = queued.view(memory.ptr, nbytes, device)
            target, source = (staging, ours) if write else (ours, staging)
            queued.copy(side, target, source)

        if write:
            return Chain(streams.Queued(queued, device, side, enqueue), file, self._writes, found)
        # Work that was queued before the caller got `memory` may still use it, so the copy waits for an event of now.
        # It need not wait for later work, and the thread that starts it has another current stream.
        with queued.on(device):
            ready = queued.record(queued.current(device))
        return Chain(file, streams.Queued(queued, device, side, enqueue, after=ready), self._reads, found)

    def close(self) -> None:
        with ExitStack() as closing:  # if one fails, or a Ctrl-C comes, the others are closed too
            closing.callback(self._sides.close)
            closing.callback(super().close)
            closing.callback(self._reads.shutdown)
            closing.callback(self._writes.shutdown)


def needed() -> str | None:
    """The type of the device for which files need `StagedEngine`, if this process computes on one."""
    found = streams.accelerator()
    return None if found is None or (found == "cuda" and torch.version.hip is None) else found


class Chain:
    """The completion of `first` and then `second`.

    A thread of `follow` starts `second` when `first` has ended. It takes transfers in the order in which they started.
    `keep` is what both use. It is dropped when they have ended.
    """

    __slots__ = ("_cancelled", "_error", "_first", "_follow", "_followed", "_keep", "_lock", "_second", "_went_on")

    def __init__(self, first: Completion, second: Completion, follow: ThreadPoolExecutor, keep: object) -> None:
        self._first = first
        self._second = second
        self._follow = follow
        self._keep = keep
        self._followed: Future[None] | None = None
        self._error: OSError | None = OSError(errno.ECANCELED, "the transfer was never queued")
        self._went_on = False  # `second` has started
        self._cancelled = False
        self._lock = threading.Lock()  # `cancel` sees `second` either started or not to be started

    def start(self) -> None:
        self._first.start()
        try:
            self._followed = self._follow.submit(self._go_on)
        except RuntimeError:  # the interpreter is ending, and gives threads no work
            self._go_on()
            self._followed = Future()
            self._followed.set_result(None)

    def _go_on(self) -> None:
        try:
            self._first.wait()
            with self._lock:
                if self._cancelled:
                    self._error = OSError(errno.ECANCELED, "the transfer was cancelled")
                    return
                self._second.start()
                self._went_on, self._error = True, None
        except OSError as error:
            self._error = error.with_traceback(None)  # its frames would keep the memory alive
        except RuntimeError as error:  # torch's, of a device
            self._error = OSError(errno.EFAULT, f"a copy between device and host memory failed: {error}")

    def done(self) -> bool:
        if self._followed is None or not self._followed.done():
            return False
        return not self._went_on or self._second.done()

    def wait(self) -> None:
        if self._followed is not None:
            self._followed.result()
        if self._error is not None:
            raise self._error
        self._second.wait()
        self._keep = None

    def cancel(self) -> bool:
        with self._lock:
            self._cancelled = True
        if not self._went_on:
            self._first.cancel()
        if self._followed is not None:
            wait([self._followed])
        cut_short = self._second.cancel() if self._went_on else True
        self._keep = None
        return cut_short

    def span(self) -> tuple[float, float]:
        timed = [span for span in (self._first.span(), self._second.span()) if span[1]]  # a copy may be untimed
        return (timed[0][0], timed[-1][1]) if timed else (0.0, 0.0)
