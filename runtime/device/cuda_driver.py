"""NVIDIA's driver: streams of our own, and the functions that the native pool's threads call, without the GIL.

We use the driver API and not the runtime API: a process has one libcuda, and may have several copies of the runtime.
Streams, events and primary contexts that torch made with its runtime are objects of the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

FUNCTIONS = (  # in the order of struct Cuda in native/pool.h
    "cuCtxSetCurrent",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuMemcpyAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuThreadExchangeStreamCaptureMode",
)

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_PORTABLE = ctypes.c_uint(1)  # CU_MEMHOSTALLOC_PORTABLE
_NON_BLOCKING = ctypes.c_uint(1)  # CU_STREAM_NON_BLOCKING
_PRIORITY = ctypes.c_int(-1)  # one above that of PyTorch's streams, which is 0
DEVICES = 32  # as in native/pool.h


class Device(ctypes.Structure):
    """struct Device of native/pool.h."""

    _fields_ = (
        ("functions", ctypes.c_void_p * len(FUNCTIONS)),
        ("context", ctypes.c_void_p),
        ("index", ctypes.c_int),
    )


def describe(driver: CudaDriver, index: int) -> Device:
    """The record of device `index` for the pool's threads. The caller keeps it alive until the pool is closed.

    Raises: ValueError for an index beyond `DEVICES`.
    """
    if index >= DEVICES:
        raise ValueError(f"device {index} is beyond the {DEVICES} devices that the I/O threads have room for")
    return Device((ctypes.c_void_p * len(FUNCTIONS))(*driver.functions()), driver.context(index), index)


class CudaDriver:
    """libcuda.so.1, and the streams of torch.

    Raises: RuntimeError if there is no driver, or it does not work. Not OSError, which would be blamed on a directory.
    """

    def __init__(self) -> None:
        try:
            self._library = load_library("libcuda.so.1")
            self._functions = [_address(getattr(self._library, name)) for name in FUNCTIONS]
        except (OSError, AttributeError) as error:
            raise _unusable(str(error)) from error
        self._call("cuInit", ctypes.c_uint(0))
        self._contexts: dict[int, int] = {}

    def functions(self) -> Sequence[int]:
        """The addresses of FUNCTIONS."""
        return self._functions

    def context(self, index: int) -> int:
        """The context that has the memory of device `index`."""
        if index not in self._contexts:
            device = ctypes.c_int()
            context = ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # it is never released
            self._contexts[index] = context.value or 0
        return self._contexts[index]

    def record(self, index: int) -> torch.cuda.Event:
        """An event after all work that was queued on the current stream of device `index`."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(torch.cuda.current_stream(index))
        return event

    def stream(self, index: int) -> int:
        """The handle of a new stream of device `index`: it waits for no default stream, and has a higher priority."""
        made = ctypes.c_void_p()
        with self._within(index):
            self._call("cuStreamCreateWithPriority", ctypes.byref(made), _NON_BLOCKING, _PRIORITY)
        return made.value or 0

    def pinned(self, index: int, nbytes: int) -> torch.Tensor:
        """Pinned host memory for device `index`, uint8, of just that size. It is freed with the tensor.

        Raises: torch.OutOfMemoryError if there is none; RuntimeError for another failure of the driver.
        """
        made = ctypes.c_void_p()
        with self._within(index):
            result = self._library.cuMemHostAlloc(ctypes.byref(made), ctypes.c_size_t(nbytes), _PORTABLE)
        if result not in (0, _OUT_OF_MEMORY):
            raise _unusable(f"cuMemHostAlloc returned {result}")
        if result:
            raise torch.OutOfMemoryError(
                f"{nbytes} B of host memory cannot be pinned: cuMemHostAlloc returned {result}"
            )
        memory = (ctypes.c_ubyte * nbytes).from_address(made.value or 0)
        weakref.finalize(memory, self._unpin, index, made).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _unpin(self, index: int, memory: ctypes.c_void_p) -> None:
        with contextlib.suppress(RuntimeError), self._within(index):  # in a fork's child the driver refuses
            self._call("cuMemFreeHost", memory)

    @contextlib.contextmanager
    def _within(self, index: int) -> Iterator[None]:
        """Within, the CUDA context of device `index` is this thread's current one."""
        left = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context(index)))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(left))

    def capture_apart(self) -> None:
        """Lets this thread call CUDA while another one captures a graph.

        Without it any such call, even a query of an event, makes a capture invalid if the capture is in the strictest
        mode, which is PyTorch's default.
        """
        mode = ctypes.c_int(_THREAD_LOCAL)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise _unusable(f"{name} returned {result}")


def load_library(name: str) -> ctypes.CDLL:
    """The shared library. Raises: OSError if it does not load."""
    return ctypes.CDLL(name)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _unusable(reason: str) -> RuntimeError:
    return RuntimeError(
        f"NVIDIA's driver cannot be used here: {reason}. The I/O threads of engine 'posix' copy with it what is on a "
        "GPU; engine='memory' does without, and keeps in host memory what leaves the GPU"
    )


@functools.cache
def cuda() -> CudaDriver:
    """The driver of this process.

    Raises: RuntimeError if there is none.
    """
    return CudaDriver()


_apart = threading.local()


def capture_apart() -> None:
    """`CudaDriver.capture_apart`, once in this thread, as soon as the process uses CUDA."""
    if torch.version.cuda and torch.cuda.is_initialized() and not getattr(_apart, "done", False):
        cuda().capture_apart()
        _apart.done = True
