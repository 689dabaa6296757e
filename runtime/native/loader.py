"""The C library of the pool of I/O threads, found or built.

It is looked for in this package (`_iopool*.so`, built with it), then in the user's cache, where it is built once with
`cc`. It is plain C without Python.h, and is loaded with ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import subprocess
from pathlib import Path

from ssd_fx.runtime.build import cache_directory, compile_library, failure
from ssd_fx.runtime.native.pool import Failure, Pool

SOURCE = Path(__file__).with_name("iopool.c")


class Library:
    """The C functions. Those that take a few us and never block keep the GIL; those that may wait release it."""

    def __init__(self, path: str) -> None:
        held = ctypes.PyDLL(path)
        released = ctypes.CDLL(path)
        pointer, i32 = ctypes.c_void_p, ctypes.c_int

        def bind(dll: ctypes.CDLL, name: str, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
            function = getattr(dll, name)
            function.restype = result
            function.argtypes = list(arguments)
            return function  # type: ignore[no-any-return]

        self.source_hash = bind(held, "iopool_source_hash", ctypes.c_char_p)
        self.create = bind(released, "pool_create", pointer, i32, i32)
        self.destroy = bind(released, "pool_destroy", None, pointer)
        self.summed_bytes = bind(held, "pool_summed_bytes", ctypes.c_uint64, pointer)
        self.under_way = bind(held, "pool_under_way", ctypes.c_uint64, pointer, i32)
        self.request_size = bind(held, "req_size", ctypes.c_size_t, i32)
        self.init = bind(held, "req_init", None, pointer, pointer, i32, i32, pointer, pointer)
        self.start = bind(held, "req_start", None, pointer, pointer)
        self.state = bind(held, "req_state", i32, pointer)
        self.wait = bind(released, "req_wait", i32, pointer, i32)
        self.cancel = bind(released, "req_cancel", i32, pointer)
        self.failure = bind(held, "req_failure", ctypes.POINTER(Failure), pointer, i32)
        self.started = bind(held, "req_started", ctypes.c_double, pointer)
        self.ended = bind(held, "req_ended", ctypes.c_double, pointer)
        self.dio_alignment = bind(held, "dio_alignment", i32, i32, pointer, pointer)


def make_pool(drives: int, threads: int) -> Pool:
    """A pool of so many drives, and threads for each. Raises: what `library` and `Pool` raise."""
    return Pool(library(), drives, threads)


def dio_alignment(fd: int) -> tuple[int, int]:
    """The alignment in bytes of (memory, file offset) for direct I/O on `fd`; 4096 if the kernel does not say.

    Raises: OSError with EINVAL if the file system has no direct I/O for this file.
    """
    memory = ctypes.c_uint32(0)
    offset = ctypes.c_uint32(0)
    found = library().dio_alignment(fd, ctypes.byref(memory), ctypes.byref(offset))
    if found < 0:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return (memory.value, offset.value) if found else (4096, 4096)


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
            compile_library(target, "cc", ["-std=gnu11", f'-DIOPOOL_SOURCE_HASH="{digest}"', str(SOURCE)])
            found = Library(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(
            "ssd_fx has no native pool of I/O threads, which every engine but 'memory' needs. This installation has "
            f"none that fits its source, and building one failed ({failure(error)}). Right "
            "would be a C compiler that is found as 'cc', or a wheel of ssd_fx, which contains the pool."
        ) from error
    return found


def _load(path: Path) -> Library | None:
    """The library, or None if it does not load or was built from another source."""
    try:
        found = Library(str(path))
    except (OSError, AttributeError):
        return None
    return found if found.source_hash().decode() == source_hash() else None
