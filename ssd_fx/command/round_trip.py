"""How fast the runtime writes activations to a directory and reads them back."""

from __future__ import annotations

import errno
import os
import time
import warnings
from dataclasses import dataclass

import torch

import ssd_fx
from ssd_fx.config import Config
from ssd_fx.sizes import format_bytes

_TENSORS, _TENSOR_BYTES = 16, 16 << 20
_ALL_TO_THE_DRIVE = {"budget": 0, "host_budget": 0, "compression": "", "adapt": False}  # overrides the environment


@dataclass(frozen=True)
class Rates:
    """Bytes a second, and what the runtime warned of meanwhile."""

    write: float
    read: float
    warned: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"write {self.write / 1e6:7.0f} MB/s   read {self.read / 1e6:7.0f} MB/s"


class Unfit(OSError):
    """The directory did not take or return all that was written to it.

    `warned`: what the runtime said meanwhile. `damaged`: the drive failed, or returned other bytes.
    """

    def __init__(self, reason: str, warned: tuple[str, ...], damaged: bool = False) -> None:
        super().__init__(reason)
        self.warned, self.damaged = warned, damaged


def measure(directory: str, passes: int = 2) -> list[Rates]:
    """The rates of 256 MiB, written and read `passes` times: in the first pass the file grows, later it is reused.

    Raises:
        Unfit: not all went to the drive and came back, so the rates are not those of the drive.
        ValueError: a bad option in the environment.
    """
    options = {"dirs": [directory], "engine": "posix", "inflight": _TENSORS * _TENSOR_BYTES}
    config = Config.make(options | _ALL_TO_THE_DRIVE).runtime_json()
    tensors = _incompressible()
    free = os.statvfs(directory)
    try:
        return [_pass(tensors, config, free.f_bavail * free.f_frsize) for _ in range(passes)]
    finally:
        ssd_fx.close()


def _incompressible() -> list[torch.Tensor]:
    """Random bytes, none the same in two tensors: file systems that compress or deduplicate write all of them."""
    bytes_ = torch.randint(256, (_TENSOR_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return [bytes_.roll(i) for i in range(_TENSORS)]


def _pass(tensors: list[torch.Tensor], config: str, free: int) -> Rates:
    ssd_fx.reset_stats()
    damaged = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            write_s, read_s, failed = *_round_trip(tensors, config), ""
        except OSError as error:
            write_s, read_s, failed, damaged = 0.0, 0.0, str(error), error.errno == errno.EIO
    warned = tuple(str(warning.message) for warning in caught)
    nbytes, moved = _TENSORS * _TENSOR_BYTES, min(ssd_fx.stats().written_bytes, ssd_fx.stats().read_bytes)
    if not failed and moved < nbytes:
        failed = f"of {format_bytes(nbytes)} only {format_bytes(moved)} went to the drive and came back"
    if failed:
        space = f"{format_bytes(free)} were free there, of which 1 GiB or 5% of the file system stay free"
        raise Unfit(f"{failed}; {space}", warned, damaged)
    return Rates(nbytes / write_s, nbytes / read_s, warned)


def _round_trip(tensors: list[torch.Tensor], config: str) -> tuple[float, float]:
    """Seconds to store all `tensors`, and seconds to load them.

    Raises:
        OSError: a tensor could not be read back, or is not what was stored.
    """
    ops = torch.ops.ssd_fx
    start = time.perf_counter()
    handles = [ops.store(t, config, "doctor", i, i) for i, t in enumerate(tensors)]
    for i, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        ops.wait_store_(handle, tensor, len(tensors) + i)
    written = time.perf_counter()
    loaded = [ops.load(h, [_TENSOR_BYTES], [1], torch.uint8, torch.device("cpu"), 0, True) for h in handles]
    for handle, tensor in zip(handles, loaded, strict=True):
        ops.wait_load_(tensor, handle, 0)
    end = time.perf_counter()
    if not all(torch.equal(a, b) for a, b in zip(tensors, loaded, strict=True)):
        raise OSError(errno.EIO, "what was read is not what was written")
    return written - start, end - written
