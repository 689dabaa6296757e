"""Lets PyTorch take the memory of large CPU tensors from `native/allocator.cpp`, from the first compilation on.

The source is compiled once for each version of torch, against the headers in its wheel, into the user's cache.
`install` puts it in place. `forward` and `backward` tell it where a step ends. `native/allocator.cpp` says when idle
memory goes back (`IDLE_PERIODS`, `PERIOD_S`), and `deaths.py` how often an idle process looks (`IDLE_S`).

A process that brings its own malloc (a preloaded jemalloc, mimalloc or sanitizer) is left alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import resource
import shlex
import subprocess
import threading
import warnings
from pathlib import Path

import torch

from ssd_fx.runtime.build import cache_directory, compile_library, failure

log = logging.getLogger(__name__)

LEAST = 64 << 10  # bytes; smaller tensors stay with malloc
SOURCE = Path(__file__).parents[1] / "native" / "allocator.cpp"
_TORCH = Path(torch.__file__).parent


class _Library:
    """The C functions. Those that may give memory back run without the GIL."""

    def __init__(self, path: Path) -> None:
        held, released = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.install = held.allocator_install
        self.install.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self.end_of_step, self.trim = released.allocator_end_of_step, released.allocator_trim
        self.tick = released.allocator_tick
        self.end_of_step.restype = self.trim.restype = self.tick.restype = None
        self.observe = held.allocator_observe
        self.observe.argtypes, self.observe.restype = [ctypes.c_void_p], None
        self.live_bytes, self.touched_bytes = held.allocator_live_bytes, held.allocator_touched_bytes
        self.live_bytes.restype = self.touched_bytes.restype = ctypes.c_int64
        self.take_peak, self.owns = held.allocator_take_peak, held.allocator_owns
        self.take_peak.restype, self.owns.argtypes = ctypes.c_int64, [ctypes.c_void_p]


class CpuAllocator:
    """The allocator of this process, which is installed once and stays."""

    def __init__(self) -> None:
        self._library: _Library | None = None
        self._lock = threading.Lock()
        self._tried = False
        self._backward_ran = False
        self._observer: int | None = None

    @property
    def live_bytes(self) -> int:
        """The bytes of all living tensors that have their memory from here."""
        return int(self._library.live_bytes()) if self._library else 0

    @property
    def touched_bytes(self) -> int:
        """The bytes of memory that the kernel has given to this allocator, in huge pages."""
        return int(self._library.touched_bytes()) if self._library else 0

    @property
    def is_installed(self) -> bool:
        return self._library is not None

    def take_peak(self) -> int:
        """The most that `live_bytes` was since the last call."""
        return int(self._library.take_peak()) if self._library else 0

    def owns(self, address: int) -> bool:
        """Whether the memory at an address is this allocator's."""
        return bool(self._library and self._library.owns(address))

    def install(self) -> None:
        """Installs the allocator, at the first call. RuntimeWarning if it cannot be built."""
        with self._lock:
            if self._tried:
                return
            try:
                if reason := _left_alone():
                    log.info("CPU tensors come from the allocator that was there: %s", reason)
                else:
                    self._library = _installed()
                    self._library.observe(self._observer)
            except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
                warnings.warn(
                    "ssd_fx leaves CPU tensors to malloc, which keeps much of what is freed: its own allocator could "
                    f"not be installed ({failure(error)}). A C++ compiler as 'g++' is needed; "
                    "cpu_allocator=False turns this off.",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self._tried = True  # not after Ctrl-C in the compiler: then the next compilation tries again

    def after_fork(self) -> None:
        """For the child: a thread that does not exist here may have held the lock, in the middle of `install`."""
        self._lock = threading.Lock()

    def forward(self) -> None:
        """A forward begins. The first one after a backward begins a step: idle memory goes back to the kernel."""
        if self._backward_ran and self._library:
            self._backward_ran = False
            self._library.end_of_step()

    def backward(self) -> None:
        """A backward runs."""
        self._backward_ran = True

    def tick(self) -> None:
        """Gives back what is idle if no step has ended for some seconds. Called now and then by a thread."""
        if self._library:
            self._library.tick()

    def trim(self) -> None:
        """Gives all free memory back to the kernel."""
        if self._library:
            self._library.trim()

    def observe(self, function: int | None) -> None:
        """For measurements: the C function at this address is called with the bytes of every block that is taken, and
        with their negative when it is given back.
        """
        self._observer = function
        if self._library:
            self._library.observe(function)


CPU_ALLOCATOR = CpuAllocator()
os.register_at_fork(after_in_child=CPU_ALLOCATOR.after_fork)


def _left_alone() -> str:
    """Why this process keeps its allocator; empty if it need not."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "RLIMIT_AS counts reserved addresses"
    # Not `malloc`: its address may be that of an executable which calls it. Every other malloc has this function too.
    malloc, libc = _file_of("malloc_usable_size"), _file_of("abort")
    return "" if malloc == libc else f"malloc is that of {malloc}"


class _Info(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def _file_of(function: str) -> str:
    """The file from which this process has a C function. Source: dladdr(3)."""
    process, info = ctypes.CDLL(None), _Info()
    address = ctypes.cast(getattr(process, function), ctypes.c_void_p)
    process.dladdr(address, ctypes.byref(info))
    return os.fsdecode(info.file or b"")


def _addresses() -> int:
    """The bytes of addresses to reserve: twice the machine's memory, so that free ranges in between do no harm."""
    return 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _installed() -> _Library:
    """The library, which is the allocator of CPU tensors from now on.

    Raises: OSError, AttributeError, ValueError or subprocess.SubprocessError if that fails.
    """
    library = _load()
    if not library.install(LEAST, _addresses()):
        raise OSError("torch has another allocator of CPU tensors, or there are no addresses for a range")
    return library


def _load() -> _Library:
    """The library in the user's cache, compiled now if it is not there or does not load. Raises: as `_installed`."""
    compiler, *flags = shlex.split(os.environ.get("CXX", "g++"))
    flags += ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{_TORCH / 'include'}", str(SOURCE)]
    flags += [f"-L{_TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{_TORCH / 'lib'}"]
    made_of = f"{torch.__version__} {torch.version.git_version} {platform.machine()} {compiler} {flags}"
    digest = hashlib.sha256(made_of.encode() + SOURCE.read_bytes()).hexdigest()
    target = cache_directory() / f"allocator-{digest[:16]}.so"
    if target.is_file():
        try:
            return _Library(target)
        except (OSError, AttributeError) as error:
            log.info("%s is compiled again: %s", target, error)
    compile_library(target, compiler, flags)
    return _Library(target)
