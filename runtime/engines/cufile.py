"""cuFile, NVIDIA's library for GPUDirect Storage: the package that calls it, and what it can do on this machine.

* kvikio queues transfers only if cuFile finds a configuration file when it is loaded; else every call blocks. So we
  write one, unless the user names one (`CUFILE_ENV_PATH_JSON`) or the administrator has one (/etc/cufile.json). It also
  keeps the log out of the working directory. Source: kvikio's compat_mode_manager.hpp.
* Where GPU and drive cannot exchange data directly, kvikio and cuFile copy through host memory, in order with the
  default stream. That overlaps with nothing, and engine "posix" is faster, so we turn it off in both. We ask both what
  the machine can do, and then test each directory with a round trip (`gds.make`).
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
from typing import Any

import torch

NAME = "kvikio"  # of the package and of the engine
MISSING = "install the extra: pip install 'ssd_fx[gds]', for CUDA 12 'ssd_fx[gds-cu12]'"
FIXED_OFFSETS_AND_SIZE = 1 | 2 | 4  # flags of cuFileStreamRegister: no argument of a transfer changes after its call
_OLDEST = "26.2"
_NEEDED = (  # what the oldest version has, and the one before it lacks in part
    ("kvikio", "stream_register"),
    ("kvikio.defaults", "is_compat_mode_preferred"),
    ("kvikio.cufile_driver", "get"),
    ("kvikio.cufile_driver", "driver_open"),
)
_CONFIG = "CUFILE_ENV_PATH_JSON"
SYSTEM = Path("/etc/cufile.json")  # the administrator's


@dataclass(frozen=True, slots=True)
class Status:
    """What kvikio can do on this machine. `real`: GPU and drive exchange data directly, in the background."""

    version: str
    real: bool
    reason: str


class Exposed:
    """Memory of a device as bytes, through `__cuda_array_interface__` (version 3). It keeps nothing alive."""

    __slots__ = ("__cuda_array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",  # bytes, because bfloat16 and float8 have no name here
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DriverFile:
    """A file that kvikio has opened. It keeps no reference to the memory of a transfer, so the completion does."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()

    def queue(self, write: bool, address: int, nbytes: int, offset: int, stream: int) -> Callable[[], int]:
        """Queues a transfer between device memory and a file offset on a stream.

        Returns a function that returns the number of bytes moved, to be called once the stream has passed the transfer.

        Raises: RuntimeError, in either call, if the transfer failed.
        """
        exposed = Exposed(address, nbytes)
        transfer = self._file.raw_write_async if write else self._file.raw_read_async
        future = transfer(exposed, stream, nbytes, offset, 0)

        # The future synchronizes its stream when it is asked or dropped. `keep` keeps the memory's description alive.
        def moved(keep: object = exposed) -> int:
            return int(future.check_bytes_done())

        return moved


def _module(name: str) -> Any:
    """A module of kvikio, loaded. Raises: ImportError or OSError if it is missing."""
    return importlib.import_module(name)


def _obstacle() -> str:
    """Why transfers would pass through the host or block, "" if they would not.

    Raises: RuntimeError if cuFile does not open its driver: it has no nvidia-fs, and may not copy through the host.
    """
    if _module("kvikio.defaults").is_compat_mode_preferred():
        return "kvikio is in compatibility mode (no libcufile, no /run/udev, or KVIKIO_COMPAT_MODE=ON)"
    cufile = _module("kvikio.cufile_driver")
    cufile.driver_open()  # before, cuFile 1.20 has not read its configuration, and answers from constants
    if cufile.get("is_gds_available") or not cufile.get("allow_compat_mode"):
        return ""  # nvidia-fs is loaded, or cuFile fails rather than copy through the host
    return "nvidia-fs is not loaded, and the configuration of cuFile allows copies through the host"


def open_file(path: str, forced: bool) -> DriverFile:
    """The file, opened by name for reading and writing. `forced`: even if its transfers pass through the host.

    `status` must have been asked before.

    Raises: RuntimeError if it cannot be opened so.
    """
    kvikio = _module("kvikio")
    if forced:
        return DriverFile(kvikio.CuFile(path, "r+"))
    # Without a GPU driver this mode hangs, and `status` says that there is none.
    with _module("kvikio.defaults").set({"compat_mode": kvikio.CompatMode.OFF}):
        return DriverFile(kvikio.CuFile(path, "r+"))


def register(stream: int) -> None:
    """Registers a stream, once, on which offsets and sizes are final when a transfer is queued."""
    if stream not in _registered:
        _module("kvikio").stream_register(stream, FIXED_OFFSETS_AND_SIZE)
        _registered.add(stream)


_registered: set[int] = set()
"""Streams by their handles. They outlive the engines that use them in turn."""


def configure(forced: bool = False) -> None:
    """Writes a configuration file for cuFile, unless the user names one or the system has one (`SYSTEM`).

    cuFile reads it once, when it is loaded.

    The file allows PCI peers to exchange data, which needs no nvidia-fs (CUDA 12.8, kernel 6.2, the open driver). It
    allows copies through host memory only if `forced`.

    Raises: RuntimeError if they are forced, and an earlier call has written a file that does not allow them.
    """
    named = os.environ.get(_CONFIG)
    if forced and named and _allows_copies.get(named) is False:
        raise RuntimeError(
            f"engine '{NAME}-forced' comes too late in this process: cuFile was loaded with a configuration that "
            "allows no copies through host memory; right would be a process of its own"
        )
    if named or SYSTEM.exists():
        return
    directory = tempfile.mkdtemp(prefix="ssd_fx-cufile-")
    atexit.register(_remove, directory, os.getpid())
    path = os.path.join(directory, "cufile.json")
    settings = {
        "logging": {"dir": directory, "level": "ERROR"},
        "properties": {"allow_compat_mode": forced, "use_pci_p2pdma": True},
    }
    Path(path).write_text(json.dumps(settings))
    _allows_copies[path] = forced
    os.environ[_CONFIG] = path


_allows_copies: dict[str, bool] = {}
"""Our configuration file, and what it says."""


def _remove(directory: str, maker: int) -> None:
    """Removes the directory of the configuration at the exit of the process that made it, and of no fork."""
    if os.getpid() == maker:
        shutil.rmtree(directory, ignore_errors=True)


def current_device() -> torch.device | None:
    """The GPU on which this process computes or would compute, None without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def status(forced: bool = False) -> Status:
    """What kvikio says that it can do on this machine. Only a round trip shows whether it is true. Loads kvikio."""
    if current_device() is None:
        return Status("", False, "torch sees no CUDA device")
    configure(forced)
    try:
        version = str(_module("kvikio").__version__)
        old = [f"{part}.{name}" for part, name in _NEEDED if not hasattr(_module(part), name)]
    except Exception as error:  # kvikio 26.10 without libcufile: a RuntimeError; of a broken installation anything
        return Status("", False, f"{error}; {MISSING}")
    if old:
        return Status(version, False, f"kvikio {version} has no {old[0]}; right would be {_OLDEST} or later; {MISSING}")
    try:
        obstacle = _obstacle()
    except RuntimeError as error:
        obstacle = f"cuFile does not open its driver: {error}"
    return Status(version, not obstacle, obstacle)
