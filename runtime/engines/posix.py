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
from collections.abc import Callable
from pathlib import Path

import torch

from ssd_fx.runtime.device import driver
from ssd_fx.runtime.engines.base import Completion, Extent, Memory, not_readable
from ssd_fx.runtime.engines.extents import STEP, BackingFile
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.memory.buffers import Buffer
from ssd_fx.runtime.native import loader, pool

POLL_MS = 100  # a thread that waits for I/O runs signal handlers this often
_CUDA_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class FileExtent(Extent):
    """Room in an engine's file.

    `tail`: the last bytes of the tensor if they are not on disk. `sums`: the checksums of the others, None without
    checksums.
    """

    __slots__ = ("size", "sums", "tail")

    def __init__(self, nbytes: int, directory: str, offset: int, size: int) -> None:
        super().__init__(nbytes, directory, offset)
        self.size = size
        self.sums: pool.Sums | None = None
        self.tail = b""

    @property
    def body_bytes(self) -> int:
        """The bytes of the tensor that are on disk."""
        return self.nbytes - len(self.tail)


class Transfer:
    """The completion of one request.

    `bounce`: the buffer that the request uses instead of the tensor. `target`: where a read copies the bytes from
    there. `record`: called at the start, returns the event that the transfer of a device's memory waits for.
    """

    __slots__ = ("_bounce", "_copying", "_extent", "_record", "_request", "_target", "_what")

    def __init__(
        self,
        what: str,
        extent: FileExtent,
        request: pool.Request,
        bounce: Buffer | None = None,
        target: int = 0,
        record: Callable[[], torch.cuda.Event] | None = None,
    ) -> None:
        self._what = what
        self._extent = extent
        self._request = request
        self._bounce = bounce
        self._target = target
        self._copying = threading.Lock()  # `cancel` returns when `wait`, in another thread, has left the target alone
        self._record = record

    def start(self) -> None:
        self._request.start(self._record() if self._record else None, self._bounce)

    def done(self) -> bool:
        return self._request.state() != pool.PENDING

    def wait(self) -> None:
        while (state := self._request.wait(POLL_MS)) == pool.PENDING:
            continue
        with self._copying:
            bounce, self._bounce = self._bounce, None
            if state == pool.OK and self._target:
                if bounce is None:  # `cancel` dropped it
                    raise self._error(pool.CANCELLED)
                ctypes.memmove(self._target, bounce.address, self._extent.nbytes)
                self._target = 0
        if state != pool.OK:
            raise self._error(state)

    def cancel(self) -> bool:
        state = self._request.cancel()
        with self._copying:
            self._bounce = None
        return state != pool.OK

    def span(self) -> tuple[float, float]:
        return self._request.span()

    def _error(self, state: int) -> OSError:
        extent = self._extent
        file = f"the unlinked file in {extent.directory}"
        place = f"{self._what} of {extent.nbytes} B at offset {extent.offset} of {file}"
        if state == pool.CANCELLED:
            return OSError(errno.ECANCELED, f"{place} was cancelled", extent.directory)
        code, where = self._request.error()
        if code == pool.END_OF_FILE:
            return OSError(errno.EIO, f"{place} hit the end of the file at offset {where}", extent.directory)
        if code == pool.CHECKSUM_MISMATCH:
            message = f"{place}: checksum mismatch in the block at offset {where}: it is not what was written there"
            return OSError(errno.EIO, message, extent.directory)
        if code == pool.CUDA_FAILED:
            function, result = self._request.cuda_error()
            message = f"{place} failed at offset {where}: {function} returned CUDA error {result}"
            return OSError(errno.ENOMEM if result == _CUDA_OUT_OF_MEMORY else errno.EFAULT, message, extent.directory)
        return OSError(code, f"{place} failed at offset {where}: {os.strerror(code)}", extent.directory)


class PosixEngine:
    """One backing file in `directory`, of at most `limit` bytes (0: no limit), with `threads` I/O threads.

    `beside`: as in `BackingFile`.
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
        checksums: bool = True,
        beside: Callable[[], int] = lambda: 0,
        cuda: Callable[[], driver.CudaDriver] = driver.cuda,
    ) -> None:
        check_directory(directory, allow_tmpfs)
        self._checksums = checksums
        self._cuda = cuda
        self._devices: dict[int, driver.Device] = {}  # the C code has pointers to these
        self._file = BackingFile(str(Path(directory)), step, limit, beside=beside)
        try:
            self._pool = loader.make_pool(threads)
        except BaseException:  # no thread could be started
            self._file.close()
            raise

    @property
    def disk_bytes(self) -> int:
        return self._file.nbytes

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return FileExtent(nbytes, self._file.directory, *self._file.room(nbytes))

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, FileExtent)
        self._file.free(extent.offset, extent.size)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr, nbytes, device, _ = memory
        align = self._file.align
        extent.tail = b""
        if device.type == "cuda":
            return self._staged(True, extent, ptr, device)
        tail = nbytes % align
        if ptr % align or nbytes < align or (tail and memory.reader.type == "cuda"):
            return self._write_bounced(extent, ptr)
        extent.tail = ctypes.string_at(ptr + nbytes - tail, tail)
        return Transfer("write", extent, self._request(True, extent, ptr, nbytes - tail))

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr, _, device, _ = memory
        align, body = self._file.align, extent.body_bytes
        if device.type == "cuda":
            return self._staged(False, extent, ptr, device)
        if ptr % align or body % align:
            return self._read_bounced(extent, ptr)
        ctypes.memmove(ptr + body, extent.tail, len(extent.tail))
        return Transfer("read", extent, self._request(False, extent, ptr, body))

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, FileExtent)
        self._file.failed(extent.nbytes, error)

    def close(self) -> None:
        try:
            self._pool.close()
        finally:  # a Ctrl-C comes out of the call that waits for the threads, or before it
            self._pool.close()  # else threads would go on with the number of a descriptor that others get
            self._file.close()

    def _write_bounced(self, extent: FileExtent, ptr: int) -> Completion:
        nbytes, padded = extent.nbytes, self._file.padded(extent.nbytes)
        bounce = Buffer(padded)
        ctypes.memmove(bounce.address, ptr, nbytes)
        ctypes.memset(bounce.address + nbytes, 0, padded - nbytes)  # no bytes of other tensors go to the disk
        return Transfer("write", extent, self._request(True, extent, bounce.address, padded), bounce)

    def _read_bounced(self, extent: FileExtent, ptr: int) -> Completion:
        """Reads the body into a buffer, before the tail; `wait` copies both to `ptr`."""
        padded = self._file.padded(extent.body_bytes)
        bounce = Buffer(padded + len(extent.tail))
        ctypes.memmove(bounce.address + extent.body_bytes, extent.tail, len(extent.tail))
        return Transfer("read", extent, self._request(False, extent, bounce.address, padded), bounce, ptr)

    def _staged(self, write: bool, extent: FileExtent, ptr: int, device: torch.device) -> Completion:
        """A transfer of the whole tensor between the device and the file, padded to the alignment."""
        if extent.tail:
            raise not_readable(torch.device("cpu"), device)
        assert device.index is not None, "the device of a tensor has a number"
        cuda, index = self._cuda(), device.index
        found = self._devices.get(index) or self._devices.setdefault(index, driver.describe(cuda, index))
        padded = self._file.padded(extent.nbytes)
        request = self._request(write, extent, ptr, padded, pool.OnDevice(ctypes.addressof(found), extent.nbytes))
        return Transfer("write" if write else "read", extent, request, record=lambda: cuda.record(index))

    def _request(
        self, write: bool, extent: FileExtent, address: int, nbytes: int, on_device: pool.OnDevice | None = None
    ) -> pool.Request:
        if write:
            extent.sums = pool.sums_for(nbytes) if self._checksums else None
        return self._pool.request(write, self._file.fd, address, nbytes, extent.offset, extent.sums, on_device)
