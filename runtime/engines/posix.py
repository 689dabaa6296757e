"""Direct file I/O on the pool of threads.

Direct I/O needs aligned memory, and torch's CPU allocations start 64 bytes after a page boundary. So a large tensor's
*body*, from the first aligned address on, is transferred where it is. Its *head* and *tail*, each shorter than the
alignment, stay in memory with the extent. A load into memory of the same phase (address modulo a page) needs no copy.
A small tensor, or a load into another phase, bounces through an aligned buffer, padded to the alignment.

Memory of a CUDA device goes whole and padded through pinned memory of the I/O threads (`native/staging.h`). Host memory
that a CUDA device will read is written whole too: a tensor without its head and tail could not be read that way.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch

from ssd_fx.runtime.engines.base import Completion, Extent, Memory, not_readable
from ssd_fx.runtime.engines.extents import STEP, SlabFile
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.memory.buffers import PAGE, POOL, Region
from ssd_fx.runtime.native import driver, loader
from ssd_fx.runtime.native.pool import CUDA_FAILED, OnDevice, Sums, sums_for

SMALL = 64 << 10
POLL_MS = 100  # a thread that waits for I/O runs signal handlers this often


class FileExtent(Extent):
    """Room in a slab file.

    `body_at`, `body_bytes`: the part of the tensor that is on disk. `head`, `tail`: its other bytes.
    `sums`: the checksums of the body, None without checksums.
    """

    __slots__ = ("body_at", "body_bytes", "file", "head", "size", "sums", "tail")

    def __init__(self, nbytes: int, file: SlabFile, offset: int, size: int) -> None:
        super().__init__(nbytes, file.directory, offset)
        self.file = file
        self.size = size
        self.sums: Sums | None = None
        self.whole()

    def whole(self) -> None:
        """Records that all bytes of the tensor are on disk, so that there are no head and tail."""
        self.body_at = 0
        self.body_bytes = self.nbytes
        self.head = self.tail = b""


class Transfer:
    """The completion of one request.

    `bounce`: a buffer that goes back to the pool at the end. `copy`: (target, source) of the copy out of it after a
    read. `record`: called at the start, returns the event that the transfer of a device's memory waits for.
    """

    __slots__ = ("_copy", "_extent", "_held", "_record", "_request", "_what")

    def __init__(
        self,
        what: str,
        extent: FileExtent,
        request: loader.Request,
        bounce: Region | None = None,
        copy: tuple[int, int] = (0, 0),
        record: Callable[[], driver.Event] | None = None,
    ) -> None:
        self._what = what
        self._extent = extent
        self._request = request
        self._held = {"bounce": bounce} if bounce else {}  # a dict, whose `pop` is atomic: two threads may wait
        self._copy = copy
        self._record = record

    def start(self) -> None:
        self._request.start(self._record() if self._record else None)

    def done(self) -> bool:
        return self._request.state() != loader.PENDING

    def wait(self) -> None:
        while (state := self._request.wait(POLL_MS)) == loader.PENDING:
            continue
        if state == loader.OK and self._held and self._copy[0]:
            ctypes.memmove(*self._copy, self._extent.nbytes)
        self._release()
        if state != loader.OK:
            raise self._error(state)

    def cancel(self) -> bool:
        state = self._request.cancel()
        self._release()
        return state != loader.OK

    def span(self) -> tuple[float, float]:
        return self._request.span()

    def _release(self) -> None:
        bounce = self._held.pop("bounce", None)
        if bounce:
            POOL.give(bounce)

    def _error(self, state: int) -> OSError:
        extent = self._extent
        file = f"the unlinked file in {extent.directory}"
        place = f"{self._what} of {extent.nbytes} B at offset {extent.offset} of {file}"
        if state == loader.CANCELLED:
            return OSError(errno.ECANCELED, f"{place} was cancelled", extent.directory)
        code, where = self._request.error()
        if code == loader.END_OF_FILE:
            return OSError(errno.EIO, f"{place} hit the end of the file at offset {where}", extent.directory)
        if code == loader.CHECKSUM_MISMATCH:
            message = f"{place}: checksum mismatch in the block at offset {where}: it is not what was written there"
            return OSError(errno.EIO, message, extent.directory)
        if code == CUDA_FAILED:
            function, result = self._request.cuda_error()
            message = f"{place} failed at offset {where}: {function} returned CUDA error {result}"
            return OSError(errno.EIO, message, extent.directory)
        return OSError(code, f"{place} failed at offset {where}: {os.strerror(code)}", extent.directory)


class PosixEngine:
    """One slab file in `directory`, of at most `limit` bytes (0: no limit), with `threads` I/O threads.

    `checksums`: sum every block. `cuda`: returns the driver, when memory of a device is first transferred.

    Raises: what `check_directory` raises; OSError if no file can be created.
    """

    name = "posix"
    devices = frozenset({"cpu", "cuda"})

    def __init__(
        self,
        directory: str,
        *,
        allow_tmpfs: bool = False,
        threads: int = 2,
        step: int = STEP,
        limit: int = 0,
        small: int = SMALL,
        checksums: bool = True,
        cuda: Callable[[], driver.Driver] = driver.cuda,
    ) -> None:
        check_directory(directory, allow_tmpfs)
        self._small = small
        self._checksums = checksums
        self._cuda = cuda
        self._devices: dict[int, driver.Device] = {}  # the C code has pointers to these
        self._file = SlabFile(str(Path(directory)), step, limit)
        self._pool = loader.make_pool(threads)

    @property
    def disk_bytes(self) -> int:
        return self._file.nbytes

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return FileExtent(nbytes, self._file, *self._file.room(nbytes))

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, FileExtent)
        extent.file.free(extent.offset, extent.size)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr, nbytes, device, _ = memory
        align = extent.file.align
        if device.type == "cuda":
            extent.whole()
            return self._staged(True, extent, ptr, device)
        whole = memory.reader.type == "cuda" and (ptr % align or nbytes % align)
        if whole or (nbytes < self._small and align > 1):
            return self._write_bounced(extent, ptr, nbytes, align)
        head = -ptr % align
        body = (nbytes - head) // align * align
        extent.body_at = head
        extent.body_bytes = body
        extent.head = ctypes.string_at(ptr, head)
        extent.tail = ctypes.string_at(ptr + head + body, nbytes - head - body)
        return Transfer("write", extent, self._request(True, extent, ptr + head, body))

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr = memory.ptr
        align = extent.file.align
        head, body = extent.body_at, extent.body_bytes
        if memory.device.type == "cuda":
            return self._staged(False, extent, ptr, memory.device)
        if (ptr + head) % align or body % align:
            return self._read_bounced(extent, ptr, align)
        ctypes.memmove(ptr, extent.head, head)
        ctypes.memmove(ptr + head + body, extent.tail, len(extent.tail))
        return Transfer("read", extent, self._request(False, extent, ptr + head, body))

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, FileExtent)
        self._file.failed(extent.nbytes, error)

    def close(self) -> None:
        self._pool.close()
        self._file.close()

    def _write_bounced(self, extent: FileExtent, ptr: int, nbytes: int, align: int) -> Completion:
        padded = -(-nbytes // align) * align
        bounce = POOL.take(padded)
        ctypes.memmove(bounce.address, ptr, nbytes)
        ctypes.memset(bounce.address + nbytes, 0, padded - nbytes)  # no bytes of other tensors go to the disk
        extent.whole()
        return Transfer("write", extent, self._request(True, extent, bounce.address, padded), bounce)

    def _read_bounced(self, extent: FileExtent, ptr: int, align: int) -> Completion:
        """Reads the body to a page boundary in a buffer, between head and tail; `wait` copies all three to `ptr`."""
        head, body = extent.body_at, extent.body_bytes
        padded = -(-body // align) * align
        lead = -(-head // PAGE) * PAGE
        bounce = POOL.take(lead + padded + len(extent.tail))
        at = bounce.address + lead
        ctypes.memmove(at - head, extent.head, head)
        ctypes.memmove(at + body, extent.tail, len(extent.tail))
        return Transfer("read", extent, self._request(False, extent, at, padded), bounce, (ptr, at - head))

    def _staged(self, write: bool, extent: FileExtent, ptr: int, device: torch.device) -> Completion:
        """A transfer of the whole tensor between the device and the file, padded to the alignment."""
        if extent.body_bytes != extent.nbytes:
            raise not_readable(torch.device("cpu"), device)
        assert device.index is not None, "the device of a tensor has a number"
        cuda, index = self._cuda(), device.index
        found = self._devices.get(index) or self._devices.setdefault(index, driver.describe(cuda, index))
        padded = -(-extent.nbytes // extent.file.align) * extent.file.align
        request = self._request(write, extent, ptr, padded, OnDevice(ctypes.addressof(found), extent.nbytes))
        return Transfer("write" if write else "read", extent, request, record=lambda: cuda.record(index))

    def _request(
        self, write: bool, extent: FileExtent, address: int, nbytes: int, on_device: OnDevice | None = None
    ) -> loader.Request:
        if write:
            extent.sums = sums_for(nbytes) if self._checksums else None
        return self._pool.request(write, extent.file.fd, address, nbytes, extent.offset, extent.sums, on_device)
