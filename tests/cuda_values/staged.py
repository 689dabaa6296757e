"""CUDA's driver for the native pool of I/O threads, on the device of `late_gpu`: the threads call back into Python."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ssd_fx.runtime.device.cuda_driver import FUNCTIONS
from ssd_fx.runtime.engines.base import Completion, Extent, Memory
from ssd_fx.runtime.engines.posix import PosixEngine
from tests.cuda_codegen import pretend
from tests.cuda_values.late_gpu import LateGpu
from tests.runtime.fake_gpu import FakeEvent, FakeStream

FAILED = 999  # CUDA_ERROR_UNKNOWN
_P, _U, _N, _A = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuCtxSetCurrent": (_P,),
    "cuStreamCreate": (ctypes.POINTER(_P), _U),
    "cuStreamDestroy_v2": (_P,),
    "cuEventSynchronize": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuMemcpyAsync": (_A, _A, _N, _P),
    "cuMemHostAlloc": (ctypes.POINTER(_P), _N, _U),
    "cuMemFreeHost": (_P,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
}


class _Recorded:
    """`cuda_driver.Event`."""

    def __init__(self, events: dict[int, FakeEvent], event: FakeEvent) -> None:
        self._events, self.cuda_event = events, id(event)
        events[self.cuda_event] = event

    def __del__(self) -> None:
        del self._events[self.cuda_event]


class LateDriver:
    """`cuda_driver.CudaDriver`. What goes wrong in a call is a violation of the device."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._events: dict[int, FakeEvent] = {}
        self._streams: dict[int, FakeStream] = {}
        self._pinned: dict[int, Any] = {}
        own = {name: getattr(self, "_" + name.removesuffix("_v2")) for name in FUNCTIONS}
        self._calls = [ctypes.CFUNCTYPE(ctypes.c_int, *_ARGUMENTS[name])(self._safe(own[name])) for name in FUNCTIONS]

    def functions(self) -> Sequence[int]:
        return [ctypes.cast(call, _P).value or 0 for call in self._calls]

    def context(self, index: int) -> int:
        return 1

    def record(self, index: int) -> _Recorded:
        return _Recorded(self._events, self._gpu.record(self._gpu.compute))

    def _safe(self, call: Callable[..., None]) -> Callable[..., int]:
        def safe(*args: Any) -> int:
            try:
                call(*args)
            except Exception as error:  # an exception cannot pass through C
                self._gpu.violations.append(f"{call.__name__}: {error!r}")
                return FAILED
            return 0

        return safe

    def _cuCtxSetCurrent(self, context: int) -> None: ...

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        assert mode[0] == 1, "thread-local"

    def _cuStreamCreate(self, made: Any, flags: int) -> None:
        with self._gpu.lock:
            stream = self._gpu.side(pretend.DEVICE)
        self._streams[stream.cuda_stream] = stream
        made[0] = stream.cuda_stream

    def _cuStreamDestroy(self, stream: int) -> None:
        self._cuStreamSynchronize(stream)
        del self._streams[stream]

    def _cuEventSynchronize(self, event: int) -> None:
        self._events[event].reach()

    def _cuStreamSynchronize(self, stream: int) -> None:
        while self._streams[stream].tasks:
            self._streams[stream].run_first()

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        def run() -> None:
            pinned = [at for at in self._pinned if at <= source < at + len(self._pinned[at])]
            self._gpu.check(target if pinned else source, nbytes, "a staged copy's memory")
            ctypes.memmove(target, source, nbytes)

        self._gpu.queue(self._streams[stream], run)

    def _cuMemHostAlloc(self, made: Any, nbytes: int, flags: int) -> None:
        memory = ctypes.create_string_buffer(nbytes)
        made[0] = ctypes.addressof(memory)
        self._pinned[ctypes.addressof(memory)] = memory

    def _cuMemFreeHost(self, at: int) -> None:
        del self._pinned[at]


class StagedEngine(PosixEngine):
    """The engine as it is for memory of a CUDA device, which here is that of CPU tensors."""

    def write(self, extent: Extent, memory: Memory) -> Completion:
        if memory.home:  # a copy in host memory that moves on
            return super().write(extent, memory._replace(home=pretend.DEVICE))
        return super().write(extent, memory._replace(device=pretend.DEVICE))

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return super().read(extent, memory._replace(device=pretend.DEVICE))


def make_engine(gpu: LateGpu) -> Callable[..., StagedEngine]:
    """What stands for `PosixEngine`."""
    late = LateDriver(gpu)
    return functools.partial(StagedEngine, step=1 << 20, cuda=lambda: late)
