"""The pool of I/O threads: the C one if its library is found or can be built, else Python threads.

The library is looked for in this package (`_iopool*.so`, built with it), then in the user's cache, where it is built
once with `cc`. It is plain C without Python.h, and is loaded with ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
import warnings
from pathlib import Path

from ssd_fx.runtime.native.driver import FUNCTIONS, Event
from ssd_fx.runtime.native.fallback import ThreadPool
from ssd_fx.runtime.native.pool import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    END_OF_FILE,
    FAILED,
    OK,
    PENDING,
    Counts,
    OnDevice,
    Pool,
    Request,
    Sums,
)

__all__ = ["CANCELLED", "CHECKSUM_MISMATCH", "END_OF_FILE", "FAILED", "OK", "PENDING", "Pool", "Request", "ThreadPool"]

SOURCE = Path(__file__).with_name("iopool.c")
VERSION = "3"


class _Library:
    """The C functions. Those that take a few us and never block keep the GIL; those that may wait release it."""

    def __init__(self, path: str) -> None:
        held = ctypes.PyDLL(path)
        released = ctypes.CDLL(path)
        pointer, size, i32, i64, real = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64, ctypes.c_double

        def bind(dll: ctypes.CDLL, name: str, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
            function = getattr(dll, name)
            function.restype = result
            function.argtypes = list(arguments)
            return function  # type: ignore[no-any-return]

        self.version = bind(held, "iopool_version", ctypes.c_char_p)
        self.source_hash = bind(held, "iopool_source_hash", ctypes.c_char_p)
        self.create = bind(released, "pool_create", pointer, i32)
        self.destroy = bind(released, "pool_destroy", None, pointer)
        self.request_type = ctypes.c_char * int(bind(held, "req_size", size)())
        self.init = bind(held, "req_init", None, pointer, pointer, i32, i32, pointer, size, i64, pointer)
        self.on_device = bind(held, "req_on_device", None, pointer, pointer, size)
        self.counts = bind(held, "pool_counts", None, pointer, pointer)
        self.block_bytes = int(bind(held, "block_size", size)())
        self.device_bytes = int(bind(held, "device_size", size)())
        self.checksum_by = bind(released, "checksum_by", i32, i32, pointer, size, pointer, pointer)
        self.start = bind(held, "req_start", None, pointer, pointer)
        self.state = bind(held, "req_state", i32, pointer)
        self.wait = bind(released, "req_wait", i32, pointer, i32)
        self.cancel = bind(released, "req_cancel", i32, pointer)
        self.error = bind(held, "req_error", i32, pointer)
        self.error_offset = bind(held, "req_error_offset", i64, pointer)
        self.cuda_function = bind(held, "req_cuda_function", i32, pointer)
        self.cuda_code = bind(held, "req_cuda_code", i32, pointer)
        self.started = bind(held, "req_started", real, pointer)
        self.ended = bind(held, "req_ended", real, pointer)
        self.dio_alignment = bind(held, "dio_alignment", i32, i32, pointer, pointer)


class _NativeRequest:
    __slots__ = ("_address", "_event", "_library", "_memory", "_sums", "_under_way")

    def __init__(self, library: _Library, under_way: dict[_NativeRequest, None]) -> None:
        self._library = library
        self._under_way = under_way
        self._memory = library.request_type()
        self._address = ctypes.addressof(self._memory)
        self._event: Event | None = None

    def prepare(
        self, pool: int, write: bool, fd: int, address: int, nbytes: int, offset: int, sums: Sums | None
    ) -> None:
        self._sums = sums  # kept alive while a thread may fill it
        sums_at = sums.buffer_info()[0] if sums else None
        self._library.init(self._address, pool, int(write), fd, address, nbytes, offset, sums_at)

    def on_device(self, where: OnDevice) -> None:
        self._library.on_device(self._address, where.device, where.nbytes)

    def start(self, event: Event | None = None) -> None:
        self._under_way[self] = None
        self._event = event
        self._library.start(self._address, event.cuda_event if event else None)

    def state(self) -> int:
        return self._seen(int(self._library.state(self._address)))

    def wait(self, timeout_ms: int) -> int:
        return self._seen(int(self._library.wait(self._address, timeout_ms)))

    def cancel(self) -> int:
        return self._seen(int(self._library.cancel(self._address)))

    def error(self) -> tuple[int, int]:
        return int(self._library.error(self._address)), int(self._library.error_offset(self._address))

    def cuda_error(self) -> tuple[str, int]:
        return FUNCTIONS[self._library.cuda_function(self._address)], int(self._library.cuda_code(self._address))

    def span(self) -> tuple[float, float]:
        return float(self._library.started(self._address)), float(self._library.ended(self._address))

    def _seen(self, state: int) -> int:
        if state != PENDING:
            self._under_way.pop(self, None)
            self._event = None
        return state


class NativePool:
    """`Pool` with the threads of the C library."""

    def __init__(self, library: _Library, threads: int) -> None:
        self._library = library
        self._pool = library.create(threads)
        self._under_way: dict[_NativeRequest, None] = {}  # the C code has pointers to these
        if not self._pool:
            raise MemoryError(f"could not start {threads} I/O threads")

    def request(
        self,
        write: bool,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        sums: Sums | None = None,
        on_device: OnDevice | None = None,
    ) -> Request:
        made = _NativeRequest(self._library, self._under_way)
        made.prepare(self._pool, write, fd, address, nbytes, offset, sums)
        if on_device:
            made.on_device(on_device)
        return made

    def counts(self) -> Counts:
        numbers = (ctypes.c_uint64 * len(Counts._fields))()
        self._library.counts(self._pool, numbers)
        return Counts(*numbers)

    def close(self) -> None:
        self._library.destroy(self._pool)


def make_pool(threads: int = 2) -> Pool:
    """The native pool, or Python threads, with one RuntimeWarning per process."""
    found = library()
    return NativePool(found, threads) if found else ThreadPool(threads)


def dio_alignment(fd: int) -> tuple[int, int]:
    """The alignment in bytes of (memory, file offset) for direct I/O on `fd`; 4096 if the kernel does not say."""
    found = library()
    memory = ctypes.c_uint32(0)
    offset = ctypes.c_uint32(0)
    if found and found.dio_alignment(fd, ctypes.byref(memory), ctypes.byref(offset)):
        return memory.value, offset.value
    return 4096, 4096


def source_hash() -> str:
    """The hash of the C files in 16 hex digits, "" without them. Every build passes it as -DIOPOOL_SOURCE_HASH."""
    if not SOURCE.is_file():
        return ""
    files = sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@functools.cache
def library() -> _Library | None:
    """The C library, loaded or built once per process. None, after a RuntimeWarning, if neither works."""
    reasons = []
    for locate in (_packaged, _built_once):
        found, reason = locate()
        if found:
            return found
        reasons.append(reason)
    warnings.warn(
        "ssd_fx runs its I/O on Python threads, which stand still while Inductor's kernels hold the GIL (up to 5 times "
        f"slower): no native pool, because {'; '.join(reasons)}. Install a C compiler as 'cc', or reinstall ssd_fx.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _packaged() -> tuple[_Library | None, str]:
    """The library that was built with the package from this source, or None and the reason."""
    for path in sorted(Path(__file__).parent.glob("_iopool*.so")):
        found = _load(path)
        if found:
            return found, ""
    return None, "none that fits was built with the package"


def _built_once() -> tuple[_Library | None, str]:
    """The library in the user's cache, compiled now if it is not there, or None and the reason."""
    digest = source_hash()
    if not digest:
        return None, f"{SOURCE} is missing"
    try:
        target = cache_directory() / f"iopool-{digest}.so"
        found = _load(target) if target.is_file() else None
        if not found:
            _compile(target, digest)
            found = _load(target)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None)
        return None, f"building it failed ({error}{': ' + detail.strip() if detail else ''})"
    return found, f"{target} does not load"


def cache_directory() -> Path:
    """The directory for the library, which is made. We load code from there, so nobody else may write to it.

    Raises: OSError if it cannot be made, or another user could write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "ssd_fx"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} must belong to this user and be writable by nobody else")
    return path


def _compile(target: Path, digest: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "iopool.so"
        define = f'-DIOPOOL_SOURCE_HASH="{digest}"'
        command = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", define, str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        os.replace(built, target)


def _load(path: Path) -> _Library | None:
    """The library, or None if it does not load or was built from another source."""
    try:
        found = _Library(str(path))
    except (OSError, AttributeError):
        return None
    if found.version().decode() != VERSION:
        return None
    digest = source_hash()
    return found if not digest or found.source_hash().decode() == digest else None


def source_version() -> str:
    """The VERSION that iopool.c declares. It must equal `VERSION`."""
    match = re.search(r'#define VERSION "(\w+)"', SOURCE.read_text())
    assert match, f"{SOURCE} declares no VERSION"
    return match.group(1)
