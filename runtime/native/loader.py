"""The C library of the pool of I/O threads, found or built.

It is looked for in this package (`_iopool*.so`, built with it), then in the user's cache, where it is built once with
`cc`. It is plain C without Python.h, and is loaded with ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from ssd_fx.runtime.native.pool import (
    CANCELLED,
    CHECKSUM_MISMATCH,
    END_OF_FILE,
    FAILED,
    OK,
    PENDING,
    Pool,
    Request,
)

__all__ = ["CANCELLED", "CHECKSUM_MISMATCH", "END_OF_FILE", "FAILED", "OK", "PENDING", "Pool", "Request"]

SOURCE = Path(__file__).with_name("iopool.c")


class Library:
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


def make_pool(threads: int = 2) -> Pool:
    """A pool of so many threads. Raises: what `library` and `Pool` raise."""
    return Pool(library(), threads)


def dio_alignment(fd: int) -> tuple[int, int]:
    """The alignment in bytes of (memory, file offset) for direct I/O on `fd`; 4096 if the kernel does not say."""
    memory = ctypes.c_uint32(0)
    offset = ctypes.c_uint32(0)
    if library().dio_alignment(fd, ctypes.byref(memory), ctypes.byref(offset)):
        return memory.value, offset.value
    return 4096, 4096


def source_hash() -> str:
    """The hash of the C files in 16 hex digits. Every build passes it as -DIOPOOL_SOURCE_HASH."""
    files = sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@functools.cache
def library() -> Library:
    """The C library, loaded or built once per process.

    Raises: RuntimeError, with what the compiler said, if there is none and none can be built.
    """
    return _packaged() or _built()


def _packaged() -> Library | None:
    """The library that was built with the package from this source."""
    for path in sorted(SOURCE.parent.glob("_iopool*.so")):
        if found := _load(path):
            return found
    return None


def _built() -> Library:
    """The library in the user's cache, compiled now if it is not there. Raises: as `library`."""
    digest = source_hash()
    try:
        target = cache_directory() / f"iopool-{digest}.so"
        found = _load(target) if target.is_file() else None
        if not found:
            _compile(target, digest)
            found = Library(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        raise RuntimeError(
            "ssd_fx has no native pool of I/O threads, which every engine but 'memory' needs. This installation has "
            f"none that fits its source, and building one failed ({error}{f': {said.strip()}' if said else ''}). Right "
            "would be a C compiler that is found as 'cc', or a wheel of ssd_fx, which contains the pool."
        ) from error
    return found


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


def _load(path: Path) -> Library | None:
    """The library, or None if it does not load or was built from another source."""
    try:
        found = Library(str(path))
    except (OSError, AttributeError):
        return None
    return found if found.source_hash().decode() == source_hash() else None
