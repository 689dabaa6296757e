"""Direct file I/O on the pool of threads.

Direct I/O needs aligned memory. A tensor at an aligned address is transferred where it is. Its *tail*, which is shorter
than the alignment, stays in memory with the extent. Every other tensor bounces through an aligned buffer, and is
written whole, padded to the alignment.

Memory of a CUDA device goes whole and padded through pinned memory of the I/O threads (`native/staging.h`). Host memory
that a CUDA device will read is written whole too: a tensor without its tail could not be read that way.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ssd_fx.runtime.device import cuda_driver
from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE, Completion, Extent, Memory, not_readable
from ssd_fx.runtime.engines.drives import Drives, FileExtent, Piece
from ssd_fx.runtime.engines.extents import STEP, BackingFile, Opened
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.memory.buffers import Buffer
from ssd_fx.runtime.native import loader, pool

POLL_MS = 100  # a thread that waits for I/O runs signal handlers this often
_CUDA_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@dataclass(eq=False, slots=True)
class Transfer:
    """The completion of one request to the pool, which moves all pieces of an extent.

    It is *final* when nothing accesses its memory any more.
    `_bounce`: the buffer that the request uses instead of the tensor. `_target`: where a read copies its bytes to; 0
    without a copy. `_record`: called at the start, returns the event that a transfer of device memory waits for.
    """

    _pool: pool.Pool
    _request: ctypes.Array[ctypes.c_char]
    _write: bool
    _extent: FileExtent
    _bounce: Buffer | None = None
    _target: int = 0
    _record: Callable[[], torch.cuda.Event] | None = None
    _event: torch.cuda.Event | None = None
    _library: loader.Library = field(init=False)
    _address: int = field(init=False)
    _sums: pool.Words | None = field(init=False)  # kept alive while a thread may fill it
    # Held while `wait` writes to the target, so that `cancel`, in another thread, returns only afterwards.
    _copying: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._library, self._sums = self._pool.library, self._extent.sums
        self._address = ctypes.addressof(self._request)

    def start(self) -> None:
        event = self._record() if self._record else None
        self._pool.transfers[self] = None  # this keeps it alive until it is final, with event and bounce
        self._event = event
        self._library.start(self._address, event.cuda_event if event else None)

    def state(self) -> int:
        """PENDING, OK, FAILED or CANCELLED. Does not block."""
        return self._seen(self._library.state(self._address))

    def done(self) -> bool:
        return self.state() != pool.PENDING

    def wait(self) -> None:
        while (state := self._seen(self._library.wait(self._address, POLL_MS))) == pool.PENDING:
            continue
        with self._copying:
            bounce, self._bounce = self._bounce, None
            if state == pool.OK and self._target:
                if bounce is None:  # `cancel` dropped it
                    raise self._cancelled()
                ctypes.memmove(self._target, bounce.address, self._extent.nbytes)
                self._target = 0
        if state != pool.OK:
            raise self._cancelled() if state == pool.CANCELLED else self._failed()

    def cancel(self) -> bool:
        """As `Completion.cancel`. Drops what has not started, and waits for what runs."""
        state = self._seen(self._library.cancel(self._address))
        with self._copying:
            self._bounce = None
        return state != pool.OK

    def span(self) -> tuple[float, float]:
        """Start of the first part and end of the last, in seconds of time.perf_counter."""
        return self._library.started(self._address), self._library.ended(self._address)

    def _seen(self, state: int) -> int:
        if state != pool.PENDING:
            self._pool.transfers.pop(self, None)
            self._event = None
        return state

    def _failed(self) -> OSError:
        """The earliest error, one of a drive if there is any. Notes down all errors of a write in the extent."""
        found = (self._library.failure(self._address, index).contents for index in range(len(self._extent.pieces)))
        failures = {index: failure for index, failure in enumerate(found) if failure.error}
        errors = {index: self._error(index, failure) for index, failure in failures.items()}
        if self._write:
            self._extent.errors = errors
        first = min(errors, key=lambda index: (errors[index].errno in NOT_OF_THE_DRIVE, failures[index].when))
        return self._error(first, failures[first])  # a new one, because its frames would keep the extent alive

    def _cancelled(self) -> OSError:
        piece = self._extent.pieces[0]
        return OSError(errno.ECANCELED, f"{_place(self._write, piece)} was cancelled", piece.file.directory)

    def _error(self, index: int, failure: pool.Failure) -> OSError:
        piece = self._extent.pieces[index]
        place, directory = _place(self._write, piece), piece.file.directory
        code, where = failure.error, failure.where
        if code == pool.END_OF_FILE:
            return OSError(errno.EIO, f"{place} hit the end of the file at offset {where}", directory)
        if code == pool.CHECKSUM_MISMATCH:
            message = f"{place}: checksum mismatch in the block at offset {where}: it is not what was written there"
            return OSError(errno.EIO, message, directory)
        if code == pool.CUDA_FAILED:
            function, result = cuda_driver.FUNCTIONS[failure.function], failure.code
            message = f"{place} failed at offset {where}: {function} returned CUDA error {result}"
            return OSError(errno.ENOMEM if result == _CUDA_OUT_OF_MEMORY else errno.EFAULT, message, directory)
        return OSError(code, f"{place} failed at offset {where}: {os.strerror(code)}", directory)


def _place(write: bool, piece: Piece) -> str:
    what, directory = "write" if write else "read", piece.file.directory
    return f"{what} of {piece.nbytes} B at offset {piece.offset} of the unlinked file in {directory}"


class PosixEngine:
    """A backing file in each of `directories`, of at most `limit` bytes (0: no limit), with `threads` I/O threads each.

    `checksums`: sum every block. `opened`: as in `BackingFile`. `cuda`: returns the driver, when memory of a device is
    first transferred.

    Raises: what `check_directory` raises; OSError if no file can be created.
    """

    name = "posix"
    devices = frozenset({"cpu", "cuda"})

    def __init__(
        self,
        *directories: str,
        allow_tmpfs: bool = False,
        threads: int = 2,
        step: int = STEP,
        limit: int = 0,
        checksums: bool = True,
        opened: Opened = None,
        cuda: Callable[[], cuda_driver.CudaDriver] = cuda_driver.cuda,
    ) -> None:
        self._checksums = checksums
        self._cuda = cuda
        self._devices: dict[int, cuda_driver.Device] = {}  # the C code has pointers to these

        files: list[BackingFile] = []
        try:
            for directory in directories:
                check_directory(directory, allow_tmpfs)
                files.append(BackingFile(str(Path(directory)), step, limit, opened))
            self.drives = Drives(files, self.under_way)
            self._pool = loader.make_pool(len(directories), threads)  # last: nobody closes it if more fails
        except BaseException:  # a directory of no use, no threads, Ctrl-C
            for file in files:
                file.close()
            raise

    def on_device(self, device: torch.device) -> bool:
        """Whether memory of `device` goes through `device_transfer`."""
        return device.type == "cuda"

    def under_way(self) -> list[int]:
        """The bytes that each drive was given and has not moved yet."""
        return self._pool.under_way()

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return FileExtent(nbytes, self.drives.alloc(nbytes))

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, FileExtent)
        self.drives.free(extent.pieces)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr, nbytes, device, _ = memory
        extent.tail = b""
        if self.on_device(device):
            return self.device_transfer(True, extent, memory)
        file = extent.pieces[-1].file
        tail = nbytes % file.align
        if ptr % self.drives.align or nbytes < file.align or (tail and self.on_device(memory.reader)):
            padded = file.padded(nbytes)
            bounce = Buffer(padded)
            ctypes.memmove(bounce.address, ptr, nbytes)
            ctypes.memset(bounce.address + nbytes, 0, padded - nbytes)  # no bytes of other tensors go to the disk
            return self.transfer(True, extent, bounce.address, padded, bounce)
        extent.tail = ctypes.string_at(ptr + nbytes - tail, tail)
        return self.transfer(True, extent, ptr, nbytes - tail)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr, _, device, _ = memory
        if self.on_device(device):
            if extent.tail:
                raise not_readable(torch.device("cpu"), device)
            return self.device_transfer(False, extent, memory)
        body, tail, file = extent.body_bytes, extent.tail, extent.pieces[-1].file
        if ptr % self.drives.align or body % file.align:
            padded = file.padded(body)
            bounce = Buffer(padded + len(tail))  # the body is read into it, before the tail
            ctypes.memmove(bounce.address + body, tail, len(tail))
            return self.transfer(False, extent, bounce.address, padded, bounce, ptr)
        ctypes.memmove(ptr + body, tail, len(tail))
        return self.transfer(False, extent, ptr, body)

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, FileExtent)
        self.drives.failed(extent, error)

    def close(self) -> None:
        try:
            self._pool.close()
        finally:  # a Ctrl-C comes out of the call that waits for the threads, or before it
            self._pool.close()  # else threads would go on with the number of a descriptor that others get
            self.drives.close()

    def device_transfer(self, write: bool, extent: FileExtent, memory: Memory) -> Completion:
        """A transfer of the whole tensor between a device and the files, padded to the alignment."""
        device = memory.device
        assert device.index is not None, "the device of a tensor has a number"
        cuda, index = self._cuda(), device.index
        found = self._devices.get(index) or self._devices.setdefault(index, cuda_driver.describe(cuda, index))
        padded = extent.pieces[-1].file.padded(extent.nbytes)
        return self.transfer(write, extent, memory.ptr, padded, device=found, record=partial(cuda.record, index))

    def transfer(
        self,
        write: bool,
        extent: FileExtent,
        address: int,
        moved: int,
        bounce: Buffer | None = None,
        target: int = 0,
        device: cuda_driver.Device | None = None,
        record: Callable[[], torch.cuda.Event] | None = None,
    ) -> Transfer:
        """A transfer of the `moved` bytes at `address`: the tensor less its tail, or with padding behind it."""
        pieces = extent.pieces
        sizes = [piece.nbytes for piece in pieces[:-1]]
        sizes.append(moved - pieces[-1].start)
        if write:
            blocks = sum([pool.blocks(nbytes) for nbytes in sizes])
            extent.sums = array("Q", bytes(8 * blocks)) if self._checksums else None
        sums = extent.sums.buffer_info()[0] if extent.sums else 0
        places = array("q")  # of struct Place in pool.h
        for (drive, file, offset, _, start, content), nbytes in zip(pieces, sizes, strict=True):
            places.extend((drive, file.fd, address + start, nbytes, offset, sums, content))
            sums += sums and 8 * pool.blocks(nbytes)
        request = self._pool.request(write, places, ctypes.addressof(device) if device else 0)
        return Transfer(self._pool, request, write, extent, bounce, target, record)
