"""Room on disk: one preallocated unlinked file per directory, cut into extents that are reused.

Overwriting is the fastest kind of write, so a file grows only when no free extent is large enough. It never shrinks:
cutting a written GiB off its end took 2.3 s (ext4 mounted with `discard`), and punching holes 0.15 s. Free extents
coalesce, and serve any graph. The space goes back when the store is closed or the process ends.
"""

import contextlib
import errno
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol

from ssd_fx.runtime.memory.buffers import PAGE
from ssd_fx.runtime.memory.free_extents import FreeExtents
from ssd_fx.runtime.native.loader import dio_alignment
from ssd_fx.runtime.pause import Pause

_log = logging.getLogger("ssd_fx")

STEP = 32 << 20  # a file grows by at least that much where there is room, and by at most LARGEST_STEP
LARGEST_STEP = 1 << 30
SHARE = 8  # in between by 1/SHARE of its size, so that little more is reserved than a step needs
RESERVE = 1 << 30
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # others may make room on a full drive


class Closable(Protocol):
    """A file of a library."""

    def close(self) -> None: ...


Opened = Callable[[str], Closable] | None


class BackingFile:
    """The unlinked file of one directory, of at most `limit` bytes (0: what the file system has).

    `align`: the alignment of transfers in bytes, 1 without direct I/O.
    `opened`: called with the path before it is unlinked, for libraries that open files by name only. It returns what
    the library has opened, `opened_by`, which is closed with the file.

    Raises: OSError if no file can be created.
    """

    def __init__(
        self,
        directory: str,
        step: int = STEP,
        limit: int = 0,
        opened: Opened = None,
    ) -> None:
        self.directory = directory
        self.no_writes = Pause()  # while it lasts `room` raises
        self.no_growth = Pause()  # while it lasts only free extents are used
        self.opened_again: tuple[int, int] | None = None  # device and inode, if a library has opened the file too
        self._free = FreeExtents()  # before others find the file, and ask for its size
        with _no_fork:
            self.fd, self.opened_by, direct = _open_direct_if_possible(directory, opened)
            _open_files.add(self)
            if opened:
                found = os.fstat(self.fd)
                self.opened_again = (found.st_dev, found.st_ino)
        memory, offset = dio_alignment(self.fd) if direct else (1, 1)
        self.align = max(memory, offset)
        self._granularity = max(PAGE, self.align)
        self._step = step
        self._limit = limit
        self._lock = threading.Lock()
        self._warned = False

    @property
    def nbytes(self) -> int:
        """The size of the file, 0 once it is closed."""
        return 0 if self.fd < 0 else self._free.end

    def padded(self, nbytes: int) -> int:
        """The bytes of a transfer of `nbytes`."""
        return -(-nbytes // self.align) * self.align

    def room(self, nbytes: int) -> tuple[int, int]:
        """As `allocate`, for an engine: warns of the first failure, and raises OSError after a failed write too."""
        if self.no_writes:
            raise OSError(errno.ENOSPC, "an earlier write here failed, so there are no new ones", self.directory)
        try:
            return self.allocate(nbytes)
        except OSError as error:
            self._warn(nbytes, error)
            raise

    def failed(self, nbytes: int, error: OSError) -> None:
        """Records that a write of `nbytes` failed: there is no new room for a while, or for good if it was not for
        want of space.
        """
        self.no_writes.begin(for_good=error.errno not in FULL)
        self._warn(nbytes, error)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """(offset, size) of an extent of at least `nbytes`.

        Raises: OSError if the file is full and cannot grow, or closed.
        """
        size = -(-nbytes // self._granularity) * self._granularity
        with self._lock:
            if self.fd < 0:
                raise OSError(errno.EBADF, "the file is closed", self.directory)
            offset = self._free.allocate(size)
            if offset is None:
                self._grow(size - self._free.tail_bytes())
                offset = self._free.allocate(size)
            assert offset is not None, "the file has grown by what was missing"
        return offset, size

    def free(self, offset: int, size: int) -> None:
        """Takes back an extent whose I/O has ended."""
        with self._lock:
            self._free.free(offset, size)

    def close(self) -> None:
        """Closes the descriptor, which frees the file's space. May be called again."""
        try:
            if self.opened_by and self.fd >= 0:
                self.opened_by.close()
        finally:
            with _no_fork:
                with self._lock:
                    fd, self.fd = self.fd, -1  # the operating system may give the number to another file
                if fd >= 0:
                    os.close(fd)

    def _warn(self, nbytes: int, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"ssd_fx keeps activations in memory that do not go to {self.directory}: storing {nbytes} B failed "
            f"({error.strerror}); the file there holds {self.nbytes} B. Training goes on and needs more memory, "
            "unless another directory takes them.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _grow(self, missing: int) -> None:
        """Grows the file by at least `missing` bytes.

        Raises: OSError if it cannot grow.
        """
        allowed = self._allowed(missing)
        if not self.nbytes:
            _log.info("activations go to a new file in %s; the first writes to it are slower", self.directory)
        share = self.nbytes // SHARE // self._granularity * self._granularity  # extents begin at multiples of it
        step = max(self._step, min(share, LARGEST_STEP))
        try:
            added = self._extend(max(missing, step) if step <= allowed else missing, missing)
        except OSError:
            self.no_growth.begin()
            raise
        self._free.grow(added)

    def _allowed(self, missing: int) -> int:
        """The bytes by which the file may grow.

        A refusal begins no pause, because a smaller extent may still fit.

        Raises: OSError if these are fewer than `missing`.
        """
        held = self.nbytes
        if self._limit and held + missing > self._limit:
            message = f"the file would have {held + missing} B, and disk_limit is {self._limit} B"
            raise OSError(errno.ENOSPC, message, self.directory)
        if self.no_growth:
            raise OSError(errno.ENOSPC, "the file could not grow earlier and has no room left", self.directory)
        available = beyond_the_reserve(os.fstatvfs(self.fd))
        if missing > available:
            message = f"{missing} B more are needed and {max(0, available)} B are free beyond the reserve"
            raise OSError(errno.ENOSPC, message, self.directory)
        return min(available, self._limit - held) if self._limit else available

    def _extend(self, wanted: int, missing: int) -> int:
        """The bytes preallocated: `wanted`, or `missing` if `wanted` cannot be had.

        Raises: OSError if not even `missing` can be had.
        """
        if self._preallocate(wanted) is None:
            return wanted
        reason = self._preallocate(missing)
        if reason is None:
            return missing
        message = f"growing the file by {missing} B to {self._free.end + missing} B: {reason.strerror}"
        raise OSError(reason.errno, message, self.directory)

    def _preallocate(self, nbytes: int) -> OSError | None:
        """Why `nbytes` behind the end cannot be preallocated, None if they are now.

        Raises: OSError if there is no fallocate and the sparse file cannot grow.
        """
        try:
            os.posix_fallocate(self.fd, self._free.end, nbytes)
            return None
        except OSError as error:
            reason = error
        if reason.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            with contextlib.suppress(OSError):  # nothing depends on it
                os.ftruncate(self.fd, self._free.end)  # a file system such as ext4 keeps the blocks that it found
            return reason
        os.ftruncate(self.fd, self._free.end + nbytes)  # no fallocate: a sparse file serves
        return None


_open_files: weakref.WeakSet[BackingFile] = weakref.WeakSet()
_no_fork = threading.RLock()  # held while a descriptor is open that `_after_fork` would not find


def disk_bytes() -> int:
    """The space on disk that the files of this process hold. Closed ones hold none."""
    with _no_fork:  # nobody opens one meanwhile
        return sum(file.nbytes for file in _open_files)


def _after_fork() -> None:
    """Closes the child's descriptors of the parent's files: their room comes back when the last descriptor closes."""
    others = {file.opened_again for file in _open_files if file.opened_again and file.fd >= 0}
    for file in list(_open_files):
        fd, file.fd = file.fd, -1
        if fd >= 0:
            os.close(fd)
    if others:
        _close_all(others)
    _open_files.clear()
    _no_fork.release()


def _close_all(files: set[tuple[int, int]]) -> None:
    """Closes every descriptor of the files, which are named by device and inode."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list itself is closed by now
            found = os.fstat(int(name))
            if (found.st_dev, found.st_ino) in files:
                os.close(int(name))


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork)


def beyond_the_reserve(status: os.statvfs_result) -> int:
    """The bytes we may take: the free ones, less 5% of the file system or 1 GiB, whichever is smaller."""
    return status.f_bavail * status.f_frsize - min(status.f_blocks * status.f_frsize // 20, RESERVE)


def _open_direct_if_possible(directory: str, opened: Opened) -> tuple[int, Closable | None, bool]:
    try:
        return *_open_unlinked(directory, os.O_DIRECT, opened), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    warnings.warn(
        f"{directory} takes no direct I/O: ssd_fx writes through the page cache, which is slower, and takes the memory "
        "that offloading was to free; name a directory on a local NVMe file system such as ext4 or xfs",
        RuntimeWarning,
        stacklevel=2,
    )
    return *_open_unlinked(directory, 0, opened), False


def _open_unlinked(directory: str, flags: int, opened: Opened) -> tuple[int, Closable | None]:
    """A descriptor of a file without a name: nobody else can open it, and a crash leaves nothing on the drive."""
    try:
        if opened is None:
            return _open(directory, os.O_TMPFILE | flags), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
    path = os.path.join(directory, f".ssd_fx-{os.urandom(8).hex()}")
    try:
        fd = _open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags)
        try:
            return fd, opened(path) if opened else None
        except BaseException:
            os.close(fd)
            raise
    finally:
        with contextlib.suppress(FileNotFoundError):  # Linux makes the file before it refuses O_DIRECT
            os.unlink(path)


def _open(path: str, flags: int) -> int:
    """A descriptor, for this user only.

    Raises: OSError with EINVAL too if the file system accepts O_DIRECT and would go through the page cache.
    """
    fd = os.open(path, os.O_RDWR | flags, 0o600)
    try:
        if flags & os.O_DIRECT:
            dio_alignment(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd
