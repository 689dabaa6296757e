"""Direct file I/O on the pool of threads.

Torch's CPU allocations sit 64 bytes behind a page boundary, where direct I/O does not reach. So a large tensor's
*body*, from the first boundary on, is transferred in place, and its *head* and *tail* (each shorter than the alignment)
stay in memory with the extent. A load into memory of the same phase (address modulo a page) does the same without a
copy. What is small, or has another phase, bounces through an aligned buffer, padded to the alignment.
"""

import ctypes
import errno
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from ssd_fx.runtime import native
from ssd_fx.runtime.buffers import PAGE, POOL, Region
from ssd_fx.runtime.engines import Completion, Extent, Memory
from ssd_fx.runtime.extents import STEP, SlabFile
from ssd_fx.runtime.fallback import sums_for
from ssd_fx.runtime.preflight import check_directory

SMALL = 64 << 10
POLL_MS = 100  # how long a signal handler waits for its turn while a thread waits here


class FileExtent(Extent):
    """A piece of a slab file. `body_at` and `body_bytes`: the part of the tensor that is on disk, the rest is here.
    `sums`: the checksums of that part, None without."""

    __slots__ = ("body_at", "body_bytes", "file", "head", "size", "sums", "tail")

    def __init__(self, nbytes: int, file: SlabFile, offset: int, size: int) -> None:
        super().__init__(nbytes, file.directory, offset)
        self.file, self.size = file, size
        self.body_at, self.body_bytes = 0, nbytes
        self.head = self.tail = b""
        self.sums: native.Sums | None = None


class Transfer:
    """The completion of one request. `bounce` goes back to the pool when it is over; a read copies it out."""

    __slots__ = ("_copy", "_extent", "_held", "_request", "_what")

    def __init__(
        self,
        what: str,
        extent: FileExtent,
        request: native.Request,
        bounce: Region | None = None,
        copy: tuple[int, int] = (0, 0),
    ) -> None:
        self._what, self._extent, self._request = what, extent, request
        self._held = {"bounce": bounce} if bounce else {}
        self._copy = copy  # (target, source)

    def start(self) -> None:
        self._request.start()

    def done(self) -> bool:
        return self._request.state() != native.PENDING

    def wait(self) -> None:
        while (state := self._request.wait(POLL_MS)) == native.PENDING:
            continue
        if state == native.OK and self._held and self._copy[0]:
            ctypes.memmove(*self._copy, self._extent.nbytes)
        self._release()
        if state != native.OK:
            raise self._error(state)

    def cancel(self) -> bool:
        state = self._request.cancel()
        self._release()
        return state != native.OK

    def span(self) -> tuple[float, float]:
        return self._request.span()

    @property
    def seconds(self) -> float:
        started, ended = self._request.span()
        return ended - started

    def _release(self) -> None:
        bounce = self._held.pop("bounce", None)  # atomic: two threads may wait for one write
        if bounce:
            POOL.give(bounce)

    def _error(self, state: int) -> OSError:
        extent = self._extent
        file = f"the unlinked file in {extent.directory}"
        place = f"{self._what} of {extent.nbytes} B at offset {extent.offset} of {file}"
        if state == native.CANCELLED:
            return OSError(errno.ECANCELED, f"{place} was cancelled", extent.directory)
        code, where = self._request.error()
        if code == native.END_OF_FILE:
            return OSError(errno.EIO, f"{place} hit the end of the file at offset {where}", extent.directory)
        if code == native.CHECKSUM_MISMATCH:
            message = f"{place}: checksum mismatch in the block at offset {where}: it is not what was written there"
            return OSError(errno.EIO, message, extent.directory)
        return OSError(code, f"{place} failed at offset {where}: {os.strerror(code)}", extent.directory)


class PosixEngine:
    """Slab files in `dirs`, dealt round robin, behind `threads` I/O threads; `checksums` over every block of them.

    Raises: ValueError without directories; what `check_directory` raises; OSError if no file can be created.
    """

    name = "posix"

    def __init__(
        self,
        dirs: Sequence[str],
        *,
        allow_tmpfs: bool = False,
        threads: int = 2,
        step: int = STEP,
        small: int = SMALL,
        checksums: bool = True,
    ) -> None:
        if not dirs:
            raise ValueError("engine 'posix' needs at least one directory on a drive in dirs")
        for path in dirs:
            check_directory(path, allow_tmpfs)
        self._small = small
        self._checksums = checksums
        self._turn = 0
        self._warned: set[str] = set()
        self._files = [SlabFile(str(Path(path)), step) for path in dirs]
        self._pool = native.make_pool(threads)

    @property
    def disk_bytes(self) -> int:
        return sum(file.nbytes for file in self._files)

    def alloc(self, nbytes: int) -> Extent:
        error = OSError(errno.ENOSPC, "no directory takes writes any more", self._files[0].directory)
        for _ in self._files:
            file = self._files[self._turn % len(self._files)]
            self._turn += 1
            if not file.writable:
                continue
            try:
                return FileExtent(nbytes, file, *file.allocate(nbytes))
            except OSError as failure:
                error = failure
                self._warn(file, nbytes, failure)
        raise error

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, FileExtent)
        extent.file.free(extent.offset, extent.size)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr, nbytes, _ = memory
        align = extent.file.align
        if nbytes < self._small and align > 1:
            return self._write_bounced(extent, ptr, nbytes, align)
        head = -ptr % align
        body = (nbytes - head) // align * align
        extent.body_at, extent.body_bytes = head, body
        extent.head = ctypes.string_at(ptr, head)
        extent.tail = ctypes.string_at(ptr + head + body, nbytes - head - body)
        return Transfer("write", extent, self._request(True, extent, ptr + head, body))

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        ptr = memory.ptr
        align = extent.file.align
        head, body = extent.body_at, extent.body_bytes
        if (ptr + head) % align or body % align:
            return self._read_bounced(extent, ptr, align)
        ctypes.memmove(ptr, extent.head, head)
        ctypes.memmove(ptr + head + body, extent.tail, len(extent.tail))
        return Transfer("read", extent, self._request(False, extent, ptr + head, body))

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, FileExtent)
        extent.file.writable = False
        self._warn(extent.file, extent.nbytes, error)

    def close(self) -> None:
        self._pool.close()
        for file in self._files:
            file.close()

    def _write_bounced(self, extent: FileExtent, ptr: int, nbytes: int, align: int) -> Completion:
        padded = -(-nbytes // align) * align
        bounce = POOL.take(padded)
        ctypes.memmove(bounce.address, ptr, nbytes)
        ctypes.memset(bounce.address + nbytes, 0, padded - nbytes)  # nothing of others goes to the disk
        extent.body_at, extent.body_bytes, extent.head, extent.tail = 0, nbytes, b"", b""
        return Transfer("write", extent, self._request(True, extent, bounce.address, padded), bounce)

    def _read_bounced(self, extent: FileExtent, ptr: int, align: int) -> Completion:
        """The body lands on a page boundary of a buffer, head and tail around it; `wait` copies all of it to `ptr`."""
        head, body = extent.body_at, extent.body_bytes
        padded = -(-body // align) * align
        lead = -(-head // PAGE) * PAGE
        bounce = POOL.take(lead + padded + len(extent.tail))
        at = bounce.address + lead
        ctypes.memmove(at - head, extent.head, head)
        ctypes.memmove(at + body, extent.tail, len(extent.tail))
        return Transfer("read", extent, self._request(False, extent, at, padded), bounce, (ptr, at - head))

    def _request(self, write: bool, extent: FileExtent, address: int, nbytes: int) -> native.Request:
        if write:
            extent.sums = sums_for(nbytes) if self._checksums else None
        return self._pool.request(write, extent.file.fd, address, nbytes, extent.offset, extent.sums)

    def _warn(self, file: SlabFile, nbytes: int, error: OSError) -> None:
        if file.directory in self._warned:
            return
        self._warned.add(file.directory)
        warnings.warn(
            f"ssd_fx keeps activations in memory that do not go to {file.directory}: storing {nbytes} B failed "
            f"({error.strerror}); the file there holds {file.nbytes} B. Training goes on and needs more memory.",
            RuntimeWarning,
            stacklevel=2,
        )
