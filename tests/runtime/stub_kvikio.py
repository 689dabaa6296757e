"""The part of kvikio 26.10 that the engine uses, on a fake GPU, checking the rules that kvikio only states.

What breaks one goes to `gpu.violations`, which ends the test: a call in a thread that is on another device, a buffer
or file that is gone when the transfer runs, a stream that was not registered, a transfer ahead of the kernels queued
before it, a result asked for before the transfer is over, a future dropped before. Files are real; transfers run when
the fake GPU gets to them.
"""

import ctypes
import enum
import os
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd_fx.runtime.engines import cufile, gds
from tests.runtime.fake_gpu import FakeGpu, FakeStream

VERSION = "26.10.00"


class CompatMode(enum.IntEnum):
    OFF = 0
    ON = 1
    AUTO = 2


class StreamFuture:
    """As kvikio's: asking it, or dropping it, blocks for the whole stream."""

    def __init__(self, stub: "Kvikio", stream: FakeStream) -> None:
        self._stub, self._stream = stub, stream
        self.over, self.moved = False, 0

    def check_bytes_done(self) -> int:
        self._stub.gpu.check_thread("the result of a transfer was asked for")
        if not self.over:
            self._stub.gpu.violations.append("the result was asked for before the transfer was over")
        while self._stream.tasks:
            self._stream.run_first()
        if self.moved < 0:
            raise RuntimeError(f"cuFile error at: {self.moved}")
        return self.moved

    def __del__(self) -> None:
        self._stub.gpu.check_thread("a future was dropped")
        if not self.over:
            self._stub.gpu.violations.append("a future was dropped before its transfer was over")


class Kvikio:
    """The packages kvikio, kvikio.defaults and kvikio.cufile_driver.

    `faults`: for the n-th transfer (counted from 0) of "write" or "read", "submit" (the call raises), "error" (the
    result raises), or how many bytes it moves. `driver`, `compat`, `nvidia_fs`, `cufile_compat`: the machine.
    Until its driver is open, cuFile 1.20 answers from constants: no nvidia-fs, and copies through the host allowed.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.driver = self.nvidia_fs = True
        self.compat = self.cufile_compat = False
        self.faults: dict[tuple[str, int], str | int] = {}
        self.counts = {"write": 0, "read": 0}
        self.mode = CompatMode.AUTO
        self.is_open = False
        self.registered: dict[int, int] = {}
        self.configured: str | None = None  # what cuFile saw when it was loaded
        self.opened: list[tuple[str, CompatMode]] = []
        stub = self

        class CuFile(_CuFile):
            def __init__(self, file: object, flags: str = "r") -> None:
                super().__init__(stub, str(file), flags)

        self.kvikio = types.SimpleNamespace(
            __version__=VERSION, CompatMode=CompatMode, CuFile=CuFile, stream_register=self._stream_register
        )
        self.defaults = types.SimpleNamespace(is_compat_mode_preferred=self._is_compat_mode_preferred, set=self._set)
        self.cufile_driver = types.SimpleNamespace(get=self._get, driver_open=self._driver_open)

    def import_module(self, name: str) -> Any:
        """importlib.import_module for these packages."""
        self.configured = self.configured or os.environ.get("CUFILE_ENV_PATH_JSON", "")
        modules = {"kvikio": self.kvikio}
        modules |= {"kvikio.defaults": self.defaults, "kvikio.cufile_driver": self.cufile_driver}
        return modules[name]

    def _is_compat_mode_preferred(self) -> bool:
        return self.compat

    def _set(self, config: dict[str, Any]) -> AbstractContextManager[None]:
        if config["compat_mode"] is CompatMode.OFF and not self.driver:
            self.gpu.violations.append("compat_mode=OFF without a driver, which hangs")

        @contextmanager
        def until_left() -> Any:
            before, self.mode = self.mode, config["compat_mode"]
            yield
            self.mode = before

        return until_left()

    def _driver_open(self) -> None:
        if not self.driver:
            raise RuntimeError("Unable to open GDS file driver: nvidia-fs driver is not loaded")
        self.is_open = True

    def _get(self, config_name: str) -> Any:
        if not self.is_open:
            return {"is_gds_available": False, "allow_compat_mode": True}[config_name]
        return {"is_gds_available": self.nvidia_fs, "allow_compat_mode": self.cufile_compat}[config_name]

    def _stream_register(self, raw_stream: int, flags: int) -> None:
        self.gpu.check_thread("a stream was registered")
        self.registered[raw_stream] = flags


class _CuFile:
    def __init__(self, stub: Kvikio, path: str, flags: str) -> None:
        assert flags == "r+", "kept, read and written"
        if not Path(path).is_file():
            raise RuntimeError(f"cannot open {path}: it has no name any more, or never had one")
        stub.opened.append((path, stub.mode))
        self._stub = stub
        self._fd = os.open(path, os.O_RDWR)
        self.closed = False

    def close(self) -> None:
        self.closed = True
        os.close(self._fd)

    def raw_write_async(
        self, buf: Any, raw_stream: int, size: int | None = None, file_offset: int = 0, dev_offset: int = 0
    ) -> StreamFuture:
        return self._queue("write", os.pwrite, buf, raw_stream, size, file_offset + dev_offset)

    def raw_read_async(
        self, buf: Any, raw_stream: int, size: int | None = None, file_offset: int = 0, dev_offset: int = 0
    ) -> StreamFuture:
        def read(fd: int, memory: Any, offset: int) -> int:
            return os.preadv(fd, [memory], offset)

        return self._queue("read", read, buf, raw_stream, size, file_offset + dev_offset)

    def _queue(
        self, what: str, move: Callable[[int, Any, int], int], buf: Any, raw_stream: int, size: int | None, at: int
    ) -> StreamFuture:
        stub, gpu = self._stub, self._stub.gpu
        gpu.check_thread(f"a {what} was queued")
        fault = stub.faults.get((what, stub.counts[what]))
        stub.counts[what] += 1
        if fault == "submit":
            raise RuntimeError("cuFile error at: submission")
        interface = buf.__cuda_array_interface__
        (address, read_only), (nbytes,) = interface["data"], interface["shape"]
        assert (interface["typestr"], read_only, size) == ("|u1", False, nbytes)
        if stub.registered.get(raw_stream) != 7:
            gpu.violations.append(f"stream {raw_stream} is not registered with fixed offsets and size")
        stream = next(s for s in gpu.sides if s.cuda_stream == raw_stream)
        kernels = gpu.compute.queued
        future, alive = StreamFuture(stub, stream), weakref.ref(buf)
        moving, wanted = weakref.ref(future), nbytes if not isinstance(fault, int) else fault

        def run() -> None:
            if gpu.compute.ran < kernels:
                gpu.violations.append(f"a {what} ran ahead of kernels that were queued before it")
            if alive() is None:
                gpu.violations.append(f"the buffer of a {what} was gone when it ran")
            gpu.check(address, nbytes, f"the buffer of a {what}")
            if self.closed:
                gpu.violations.append(f"the file of a {what} was closed when it ran")
                return
            memory = (ctypes.c_ubyte * wanted).from_address(address)
            moved = move(self._fd, memory, at) if wanted else 0
            if (mine := moving()) is not None:
                mine.over, mine.moved = True, -5001 if fault == "error" else moved

        gpu.queue(stream, run)
        return future


def install(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> Kvikio:
    """kvikio and a GPU, as far as `gds` can tell."""
    stub = Kvikio(gpu)
    monkeypatch.setattr(cufile, "importlib", types.SimpleNamespace(import_module=stub.import_module))
    monkeypatch.setattr(cufile, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cufile, "_registered", set())
    monkeypatch.setattr(gds, "STEP", 1 << 20)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/somewhere/cufile.json")
    return stub
