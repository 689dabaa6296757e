"""A range of addresses that costs memory only where it is used.

The range is mapped without permissions. The kernel charges that to no limit: not to vm.overcommit_memory = 2, nor to
RLIMIT_DATA. It is made accessible from the bottom upwards as it is used, and only that is charged. RLIMIT_AS does count
reserved addresses, so under that limit ranges are small, and there are several.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import weakref

from ssd_fx.runtime.memory.allocator import Allocator

PAGE = 4096
CHUNK = 2 << 20  # the unit of counting and of giving memory back: a huge page on most machines
STEP = 32 << 20  # bytes made accessible at a time
LIMITED = 64 << 20  # bytes reserved at a time under RLIMIT_AS


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The lowest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_libc.mmap.restype, _libc.mmap.argtypes = _pointer, [_pointer, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, _size]
_libc.munmap.argtypes = [_pointer, _size]
_libc.mprotect.argtypes = _libc.madvise.argtypes = [_pointer, _size, ctypes.c_int]


class AddressRange:
    """`nbytes` at `address`, both multiples of CHUNK. The first `usable` bytes are accessible.

    They are unmapped when nobody refers to this object.

    Raises: OSError if the addresses cannot be had.
    """

    def __init__(self, nbytes: int) -> None:
        start = _libc.mmap(None, nbytes + CHUNK, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start == _size(-1).value:
            raise _error(f"no addresses for {nbytes} B of buffers")
        weakref.finalize(self, _libc.munmap, start, nbytes + CHUNK).atexit = False
        self.address = round_up(start, CHUNK)
        self.nbytes = nbytes
        self.usable = 0
        _libc.madvise(self.address, nbytes, mmap.MADV_HUGEPAGE)  # may fail: a kernel without huge pages is only slower

    def make_usable(self, end: int) -> None:
        """Makes at least [0, end) accessible.

        Raises: OSError if that is more than this process may have.
        """
        if end <= self.usable:
            return
        end = min(round_up(end, STEP), self.nbytes)
        added = end - self.usable
        if _libc.mprotect(self.address + self.usable, added, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _error(f"no memory for {added} B more of buffers")
        self.usable = end

    def discard(self, start: int, end: int) -> None:
        """Gives the memory of [start, end) back to the kernel. The bytes are zeros afterwards."""
        if _libc.madvise(self.address + start, end - start, mmap.MADV_DONTNEED):
            raise _error(f"giving back {end - start} B of buffers")


def _error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


def map_range(nbytes: int, reserve: int | None = None) -> AddressRange:
    """A range of `reserve` bytes, or of less if that cannot be had, but of at least `nbytes`.

    Without `reserve` it is as large as the machine's memory.

    Raises: OSError if not even `nbytes` can be had.
    """
    if reserve is None:
        limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        reserve = LIMITED if limited else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    least = round_up(nbytes, CHUNK)
    wanted = max(round_up(reserve, CHUNK), least)
    while wanted > least:
        with contextlib.suppress(OSError):
            return AddressRange(wanted)
        wanted = max(round_up(wanted // 2, CHUNK), least)
    return AddressRange(least)


class Arena:
    """Regions of one range of addresses. `_touched` marks the chunks that may have memory."""

    def __init__(self, memory: AddressRange) -> None:
        self._memory = memory
        self._allocator = Allocator(memory.nbytes)
        self._touched = bytearray(memory.nbytes // CHUNK)
        self.address = memory.address
        # One object for the range: a ctypes array of another length is another type, and making a type takes 0.1 ms.
        whole = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
        whole.memory = memory  # type: ignore[attr-defined]  # keeps the range mapped for as long as a view of it lives
        self._bytes = memoryview(whole).cast("B")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A new object on these bytes, which keeps the range mapped."""
        return self._bytes[offset : offset + nbytes]

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """(offset, bytes that were not touched before) of a region of `nbytes`, or None if there is no room.

        `nbytes` is a multiple of a page.

        Raises: OSError if the kernel has no more memory for this process.
        """
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            return None
        first = offset // CHUNK
        behind = round_up(offset + nbytes, CHUNK) // CHUNK
        fresh = self._touched.count(0, first, behind)
        if fresh:
            try:
                self._memory.make_usable(behind * CHUNK)
            except OSError:
                self._allocator.free(offset, nbytes)
                raise
            self._touched[first:behind] = b"\1" * (behind - first)
        return offset, fresh * CHUNK

    def give(self, offset: int, nbytes: int) -> None:
        """Takes a region back."""
        self._allocator.free(offset, nbytes)

    def shrink(self, excess: int) -> int:
        """The bytes given back to the kernel: at least `excess` idle bytes if whole chunks of them are idle.

        The highest go first.
        """
        given = 0
        for offset, length in reversed(self._allocator.extents()):
            first = round_up(offset, CHUNK) // CHUNK
            behind = (offset + length) // CHUNK
            while given < excess:
                end = self._touched.rfind(1, first, behind) + 1
                if not end:
                    break
                missing = round_up(excess - given, CHUNK) // CHUNK
                start = max(self._touched.rfind(0, first, end) + 1, first, end - missing)
                self._memory.discard(start * CHUNK, end * CHUNK)
                self._touched[start:end] = bytes(end - start)
                given += (end - start) * CHUNK
        return given
