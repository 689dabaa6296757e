"""GPUDirect Storage: transfers between GPU memory and files that do not pass through the host.

* Transfers are queued on side streams; `streams` has the rules. Each transfer under way has a stream of its own,
  because kvikio waits for the whole stream when it is asked for a result.
* kvikio's calls without a stream (`pread`, `pwrite`) are no way out: each waits for the default stream first, on which
  PyTorch computes. Source: kvikio's file_handle.cpp, `sync_default_stream`.
* **Blocks are not verified**: the data never passes the host, where the checksums of engine "posix" are computed.
* Tensor memory is not registered with cuFile. A registration is by address, and in a caching allocator the address
  outlives the tensor. cuFile moves unregistered memory through a buffer on the GPU.
* Host memory goes through a second engine, "posix", with separate files, which is made when the first such write comes.
  This is memory of CPU tensors, and of GPU tensors that a host tier moves on. It is read through the same engine.
"""

import errno
import functools
import os
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ssd_fx.options import Options
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory, not_readable
from ssd_fx.runtime.engines.cufile import DriverFile
from ssd_fx.runtime.engines.extents import STEP, BackingFile
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.engines.striped import one_for_each

_NO_ERRNO = errno.EIO  # cuFile's errors carry no errno
_LANES = 16  # streams for each device and all directories


class GdsExtent(Extent):
    """Room in a file of `GdsEngine`. Bytes that come `from_cpu` have room in `host` instead, and none in the file."""

    __slots__ = ("from_cpu", "host", "size")

    def __init__(self, nbytes: int, backing: BackingFile, offset: int, size: int) -> None:
        super().__init__(nbytes, backing.directory, offset)
        self.size = size
        self.from_cpu = False
        self.host: Extent | None = None


class _GdsFile:
    """A backing file, and the same file opened by kvikio."""

    def __init__(self, directory: str, limit: int, forced: bool, beside: Callable[[], int]) -> None:
        opened: list[DriverFile] = []
        self.backing = BackingFile(directory, STEP, limit, lambda path: opened.append(_opened(path, forced)), beside)
        self.driver = opened[0]

    def close(self) -> None:
        try:
            self.driver.close()
        finally:
            self.backing.close()


def _opened(path: str, forced: bool) -> DriverFile:
    try:
        return cufile.open_file(path, forced)
    except RuntimeError as error:
        raise OSError(_NO_ERRNO, f"{cufile.NAME} cannot open a file here: {error}", os.path.dirname(path)) from error


class GdsEngine:
    """One backing file in `directory`, with the other options of `config`. `cufile.status` must have been asked.

    `lanes`: the most streams for each device.

    Raises: what `check_directory` raises; OSError if the file cannot be opened.
    """

    name = cufile.NAME
    devices = frozenset({"cpu", "cuda"})

    def __init__(self, directory: str, config: Options, *, forced: bool, lanes: int) -> None:
        check_directory(directory, config.allow_tmpfs)
        self._config = config
        self._most_lanes = lanes
        self._host: Engine | None = None
        # By transfer, its stream. A future that is dropped before its end blocks the host, so they are kept here.
        self._under_way: dict[streams.Queued, streams.Stream] = {}
        self._lanes: dict[torch.device, deque[streams.Stream]] = {}
        self._file = _GdsFile(
            str(Path(directory)), config.disk_limit, forced, lambda: self._host.disk_bytes if self._host else 0
        )

    @property
    def disk_bytes(self) -> int:
        return self._file.backing.nbytes + (self._host.disk_bytes if self._host else 0)

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        backing = self._file.backing
        return GdsExtent(nbytes, backing, *backing.room(nbytes))

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, GdsExtent)
        if extent.host:
            assert self._host, "it was written there"
            self._host.free(extent.host)
        else:
            self._file.backing.free(extent.offset, extent.size)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, GdsExtent)
        if streams.of(memory.device):
            return self._queued("write", extent, memory)
        extent.from_cpu = True
        self._host = self._host or self._make_host()
        extent.host = self._host.alloc(extent.nbytes)
        self._file.backing.free(extent.offset, extent.size)
        return self._host.write(extent.host, memory)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, GdsExtent)
        if extent.host:
            assert self._host, "it was written there"
            return self._host.read(extent.host, memory)
        if extent.from_cpu or not streams.of(memory.device):
            raise not_readable(torch.device("cpu" if extent.from_cpu else "cuda"), memory.device)
        return self._queued("read", extent, memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, GdsExtent)
        if extent.host and self._host:
            self._host.failed(extent.host, error)
        elif not extent.from_cpu:
            self._file.backing.failed(extent.nbytes, error)

    def close(self) -> None:
        with ExitStack() as closing:  # upwards; if one fails, as after an error of the GPU, the others do not
            if self._host:
                closing.callback(self._host.close)
            closing.callback(self._give_lanes_back)
            closing.callback(self._file.close)
            closing.callback(self._under_way.clear)
            for transfer in self._under_way:
                closing.callback(transfer.cancel)

    def _make_host(self) -> Engine:
        backing, config = self._file.backing, self._config
        return PosixEngine(
            backing.directory,
            allow_tmpfs=config.allow_tmpfs,
            limit=config.disk_limit,
            checksums=config.checksums,
            beside=lambda: backing.nbytes,
        )

    def _queued(self, what: str, extent: GdsExtent, memory: Memory) -> Completion:
        file = self._file.driver
        queue = file.write if what == "write" else file.read

        def enqueue(side: streams.Stream) -> streams.Check:
            moved = _checked(what, extent, lambda: queue(memory, extent.offset, side.cuda_stream))
            self._under_way[transfer] = side
            return functools.partial(self._end, transfer, what, extent, moved)

        transfer = streams.Queued(memory.device, self._lane(memory.device), enqueue)
        return transfer

    def _lane(self, device: torch.device) -> streams.Stream:
        """A stream with nothing under way; of streams that are all in use, the one used longest ago."""
        lanes, busy = self._lanes.setdefault(device, deque()), list(self._under_way.values())
        idle = next((lane for lane in lanes if lane not in busy), None)
        if idle is None and len(lanes) == self._most_lanes:
            idle = lanes[0]
        if idle is None:
            queued = streams.of(device)
            assert queued, "only asked for devices with streams"
            with queued.on(device):
                idle = queued.side(device)
                cufile.register(idle.cuda_stream)
        else:
            lanes.remove(idle)
        lanes.append(idle)
        return idle

    def _give_lanes_back(self) -> None:
        for device, lanes in self._lanes.items():
            queued = streams.of(device)
            while queued and lanes:
                queued.give_back(device, lanes.pop())

    def _end(self, transfer: streams.Queued, what: str, extent: GdsExtent, moved: Callable[[], int]) -> None:
        """Returns if all bytes were moved. Raises: OSError if not."""
        try:
            nbytes = _checked(what, extent, moved)
            if nbytes != extent.nbytes:
                raise _failure(what, extent, f"moved {nbytes} B only")
        finally:
            self._under_way.pop(transfer, None)


def _checked(what: str, extent: GdsExtent, call: Callable[[], Any]) -> Any:
    """What `call` returns. Raises: OSError instead of the RuntimeError of kvikio."""
    try:
        return call()
    except RuntimeError as error:
        error.__traceback__ = None  # its frames keep the future alive, which must die with the transfer
        raise _failure(what, extent, f"failed: {error}") from None


def _failure(what: str, extent: GdsExtent, how: str) -> OSError:
    place = f"{what} of {extent.nbytes} B at offset {extent.offset} of the unlinked file in {extent.directory}"
    return OSError(_NO_ERRNO, f"{place} {how}", extent.directory)


def check_machine(*, forced: bool) -> None:
    """Returns if this machine has GPUDirect Storage or, with `forced`, at least cuFile.

    Raises: RuntimeError, which names an engine that works here.
    """
    found = cufile.status(forced)
    if not found.version or not (found.real or forced):
        name = f"{cufile.NAME}-forced" if forced else cufile.NAME
        without = f"; engine='{cufile.NAME}-forced' would go through cuFile's all the same" if found.version else ""
        raise RuntimeError(
            f"engine {name!r} has no {'cuFile' if forced else 'GPUDirect Storage'} here: {found.reason}. "
            f"Use engine='posix', which goes through pinned host memory{without}."
        )


def make(config: Options, *, forced: bool) -> Engine:
    """An engine that has passed a round trip in every directory.

    Raises: ValueError without directories; what `check_machine` and `GdsEngine` raise; OSError if a round trip fails.
    """
    check_machine(forced=forced)
    if not config.dirs:
        raise ValueError(f"engine {cufile.NAME!r} needs at least one directory on a drive in dirs")

    def tried(directory: str) -> Engine:
        engine = GdsEngine(directory, config, forced=forced, lanes=max(2, _LANES // len(config.dirs)))
        try:
            _round_trip(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    return one_for_each(config.dirs, tried)


def usable(config: Options) -> Engine | None:
    """The engine, or None unless this process computes on a GPU and GPUDirect Storage works in all directories."""
    if not torch.cuda.is_initialized() or not cufile.status().real:
        return None
    try:
        return make(config, forced=False)
    except (RuntimeError, OSError) as error:
        message = f"GPUDirect Storage seems to be there and does not work, so ssd_fx takes engine 'posix': {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return None


def _round_trip(engine: GdsEngine, nbytes: int = 64 << 10) -> None:
    """Writes and reads some bytes. Raises: OSError if the two differ."""
    device = cufile.current_device()
    queued = streams.of(device) if device else None
    assert device and queued, "checked by status"  # noqa: PT018
    source, target = (queued.empty((nbytes,), (1,), torch.uint8, device) for _ in range(2))
    pattern = (torch.arange(nbytes) % 251).to(torch.uint8)
    queued.copy(queued.current(device), source, pattern)
    extent = engine.alloc(nbytes)
    for transfer in (engine.write(extent, Memory.of(source)), engine.read(extent, Memory.of(target))):
        transfer.start()
        transfer.wait()
    engine.free(extent)
    if not torch.equal(target.cpu(), pattern):
        raise OSError(_NO_ERRNO, f"engine {engine.name!r} read other bytes than it wrote", extent.directory)
