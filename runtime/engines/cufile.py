"""cuFile, NVIDIA's library for GPUDirect Storage: what this machine can do with it, and the packages that lead to it.

* kvikio queues transfers only if cuFile has a configuration file when it is loaded; else every call blocks. So unless
  the user names one (`CUFILE_ENV_PATH_JSON`), one is written first; it keeps the log out of the working directory too.
  Source: kvikio's compat_mode_manager.hpp.
* Where GPU and drive cannot exchange data directly, kvikio and cuFile copy through host memory, in order with the
  default stream: no overlap, no gain, and engine "posix" does it better. So both are told not to, and what they say
  about the machine is asked for; the last word has a round trip in every directory (`gds.make`).
"""

import atexit
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Memory

FIXED_OFFSETS_AND_SIZE = 1 | 2 | 4  # cuFileStreamRegister: nothing that is passed changes after the call
_CONFIG = "CUFILE_ENV_PATH_JSON"


class DriverFile(Protocol):
    """A file as the driver knows it. `write` and `read` queue a transfer between device memory and a file offset on a
    stream, and return what gives the number of bytes moved, once the stream has passed it.

    Raises: RuntimeError, in either call, if the transfer failed.
    """

    def write(self, memory: Memory, offset: int, stream: int) -> Callable[[], int]: ...

    def read(self, memory: Memory, offset: int, stream: int) -> Callable[[], int]: ...

    def close(self) -> None: ...


class Driver(Protocol):
    """An interface to cuFile. `name`: that of the engine; `missing`: how to get what it needs."""

    name: str
    missing: str

    def load(self) -> str:
        """Loads the library; its version. Raises: ImportError or OSError if it is not there."""

    def obstacle(self) -> str:
        """Why transfers would pass through the host or block, or "" if they would not; after `load`."""

    def open(self, path: str, forced: bool) -> DriverFile:
        """Opens a file by name for reading and writing; where its transfers would pass through the host only if
        `forced`. Raises: RuntimeError if that cannot be."""

    def register(self, stream: int) -> None:
        """Makes a stream known, on which offsets and sizes are final when a transfer is queued."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a driver can do on this machine. `real`: GPU memory and drive exchange data directly, in the background."""

    name: str
    version: str
    real: bool
    reason: str


class KvikioDriver:
    """Package kvikio. It keeps no reference to a buffer: the completion has it."""

    name = "kvikio"
    missing = "install the extra: pip install 'ssd_fx[gds]', for CUDA 12 'ssd_fx[gds-cu12]'"

    def load(self) -> str:
        self._kvikio: Any = importlib.import_module("kvikio")
        self._defaults: Any = importlib.import_module("kvikio.defaults")
        self._cufile: Any = importlib.import_module("kvikio.cufile_driver")
        return str(self._kvikio.__version__)

    def obstacle(self) -> str:
        if self._defaults.is_compat_mode_preferred():
            return "kvikio is in compatibility mode (no libcufile, no /run/udev, or KVIKIO_COMPAT_MODE=ON)"
        if self._cufile.get("is_gds_available") or not self._cufile.get("allow_compat_mode"):
            return ""  # nvidia-fs is loaded, or cuFile is to fail rather than to copy through the host
        return "nvidia-fs is not loaded, and the configuration of cuFile allows copies through the host"

    def open(self, path: str, forced: bool) -> DriverFile:
        if forced:
            return _KvikioFile(self._kvikio.CuFile(path, "r+"))
        # Not before `obstacle` has found a driver: without one this mode hangs.
        with self._defaults.set({"compat_mode": self._kvikio.CompatMode.OFF}):
            return _KvikioFile(self._kvikio.CuFile(path, "r+"))

    def register(self, stream: int) -> None:
        self._kvikio.stream_register(stream, FIXED_OFFSETS_AND_SIZE)


class _KvikioFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, memory: Memory, offset: int, stream: int) -> Callable[[], int]:
        return self._queue(self._file.raw_write_async, memory, offset, stream)

    def read(self, memory: Memory, offset: int, stream: int) -> Callable[[], int]:
        return self._queue(self._file.raw_read_async, memory, offset, stream)

    def close(self) -> None:
        self._file.close()

    def _queue(self, transfer: Callable[..., Any], memory: Memory, offset: int, stream: int) -> Callable[[], int]:
        exposed = streams.Exposed(memory.ptr, memory.nbytes)
        future = transfer(exposed, stream, memory.nbytes, offset, 0)

        def moved(keep: object = exposed) -> int:  # the future synchronises its stream when asked or dropped
            return int(future.check_bytes_done())

        return moved


DRIVERS: dict[str, Callable[[], Driver]] = {"kvikio": KvikioDriver}


def driver(name: str) -> Driver:
    """A driver of that name, not loaded yet."""
    return DRIVERS[name]()


def statuses() -> list[Status]:
    """What each driver can do on this machine; loads them."""
    return [status(driver(name)) for name in DRIVERS]


def configure(forced: bool = False) -> None:
    """Sees to a configuration of cuFile, to be called before it is loaded, which looks for it once per process.

    Ours lets PCI peers talk to each other, which needs no nvidia-fs (CUDA 12.8, kernel 6.2, the open driver), and has
    cuFile copy through host memory only if `forced`.
    """
    if os.environ.get(_CONFIG):
        return
    directory = tempfile.mkdtemp(prefix="ssd_fx-cufile-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = os.path.join(directory, "cufile.json")
    settings = {
        "logging": {"dir": directory, "level": "ERROR"},
        "properties": {"allow_compat_mode": forced, "use_pci_p2pdma": True},
    }
    Path(path).write_text(json.dumps(settings))
    os.environ[_CONFIG] = path


def current_device() -> torch.device | None:
    """The GPU on which this process computes, or would."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def status(driver: Driver, forced: bool = False) -> Status:
    """What `driver` can do on this machine; loads it. The last word has the round trip in each directory."""
    if current_device() is None:
        return Status(driver.name, "", False, "torch sees no CUDA device")
    configure(forced)
    try:
        version = driver.load()
    except (ImportError, OSError) as error:
        return Status(driver.name, "", False, f"{error}; {driver.missing}")
    try:
        obstacle = driver.obstacle()
    except RuntimeError as error:
        obstacle = f"cuFile does not answer: {error}"
    return Status(driver.name, version, not obstacle, obstacle)
