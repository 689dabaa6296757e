"""The functions of the CUDA driver that the native pool's threads call, without the GIL, to copy a device's memory.

We use the driver API and not the runtime API: a process has one libcuda, and may have several copies of the runtime.
Streams, events and primary contexts that torch made with its runtime are objects of the driver.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence

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

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
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

    def functions(self) -> Sequence[int]:
        """The addresses of FUNCTIONS."""
        return self._functions

    def context(self, index: int) -> int:
        """The context that has the memory of device `index`."""
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # it is never released
        return context.value or 0

    def record(self, index: int) -> torch.cuda.Event:
        """An event after all work that was queued on the current stream of device `index`."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(torch.cuda.current_stream(index))
        return event

    def capture_apart(self) -> None:
        """From here on no call of this thread ends the capture of a CUDA graph in another one, nor is refused there.

        Such a capture, in CUDA's strictest mode as PyTorch begins it, else becomes invalid when any thread asks an
        event.
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
        f"the I/O threads of engine 'posix' copy what is on a GPU with NVIDIA's driver, which cannot be used here: "
        f"{reason}. engine='memory' does without, and keeps in host memory what leaves the GPU"
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
