"""GPUDirect Storage: transfers between GPU memory and files that do not pass through the host.

* Transfers are queued on side streams; `streams` has the rules. Each piece under way has a stream of its own, because
  kvikio waits for the whole stream when it is asked for a result.
* kvikio's calls without a stream (`pread`, `pwrite`) are no way out: each waits for the default stream first, on which
  PyTorch computes. Source: kvikio's file_handle.cpp, `sync_default_stream`.
* **Blocks are not verified**: the data never passes the host, where the checksums of engine "posix" are computed.
* Tensor memory is not registered with cuFile. A registration is by address, and in a caching allocator the address
  outlives the tensor. cuFile moves unregistered memory through a buffer on the GPU.
* Host memory goes through the I/O threads, as with engine "posix", to the same files. This is memory of CPU tensors,
  and of GPU tensors that a host tier moves on. It is read through them too.
"""

import errno
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from ssd_fx.options import Options
from ssd_fx.runtime.device import cuda_driver, streams
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.base import Completion, Extent, Memory, not_readable
from ssd_fx.runtime.engines.drives import FileExtent, Piece
from ssd_fx.runtime.engines.extents import STEP
from ssd_fx.runtime.engines.posix import PosixEngine

_NO_ERRNO = errno.EIO  # cuFile's errors carry no errno
_LANES = 16  # streams for each device and all directories

_Moved = Callable[[], int] | str
"""Asks how many bytes of a piece were moved; or why it was not queued."""


class GdsEngine(PosixEngine):
    """`PosixEngine` in each directory of `config`, whose files are opened by kvikio too. `cufile.status` must have been
    asked.

    Raises: what `PosixEngine` raises; OSError if kvikio cannot open a file.
    """

    name = cufile.NAME

    def __init__(self, config: Options, *, forced: bool) -> None:
        self._most_lanes = max(_LANES, 2 * len(config.dirs))
        self._lanes: dict[torch.device, list[streams.Stream]] = {}  # the one used longest ago goes first
        # By transfer: its pieces, streams and futures. A future that is dropped before its end blocks the host.
        self._queued: dict[streams.Queued, tuple[list[Piece], list[streams.Stream], list[_Moved]]] = {}
        super().__init__(
            *config.dirs,
            allow_tmpfs=config.allow_tmpfs,
            step=STEP,
            limit=config.disk_limit,
            checksums=config.checksums,
            opened=partial(_opened, forced=forced),
            cuda=cuda_driver.cuda,
        )

    def on_device(self, device: torch.device) -> bool:
        return streams.of(device) is not None

    def under_way(self) -> list[int]:
        found = super().under_way()
        for transfer, (pieces, _, _) in list(self._queued.items()):
            for piece in pieces if not transfer.done() else ():
                found[piece.drive] += piece.nbytes
        return found

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, FileExtent)
        if extent.past_host and not self.on_device(memory.device):
            raise not_readable(torch.device("cuda"), memory.device)
        return super().read(extent, memory)

    def close(self) -> None:
        with ExitStack() as closing:  # last first; if one fails, as after an error of the GPU, the others go on
            closing.callback(super().close)
            closing.callback(self._give_lanes_back)
            closing.callback(self._queued.clear)
            for transfer in list(self._queued):  # another thread may see one end
                closing.callback(transfer.cancel)

    def device_transfer(self, write: bool, extent: FileExtent, memory: Memory) -> Completion:
        """A transfer whose pieces are queued on a stream each. The first stream waits for the others."""
        extent.past_host |= write
        if not extent.past_host:  # the pool wrote it, with checksums
            return super().device_transfer(write, extent, memory)
        pieces, device = extent.pieces, memory.device
        queued = streams.of(device)
        assert queued, "only asked for devices with streams"
        lanes = self._take_lanes(queued, device, len(pieces))

        def enqueue(side: streams.Stream) -> streams.Check:
            others, moved = lanes[1:], list[_Moved]()
            self._queued[transfer] = pieces, lanes, moved
            if others:
                ready = queued.record(side)
                for lane in others:
                    lane.wait_event(ready)
            with queued.on(device):
                for piece, lane in zip(pieces, lanes, strict=True):
                    moved.append(_queue(write, piece, memory, lane))
            for lane in others:
                side.wait_event(queued.record(lane))
            return partial(self._end, transfer, write, extent, moved)

        transfer = streams.Queued(queued, device, lanes[0], enqueue)
        return transfer

    def _take_lanes(self, queued: streams.Streams, device: torch.device, count: int) -> list[streams.Stream]:
        """Streams with nothing under way; where all are in use, those used longest ago."""
        lanes = self._lanes.setdefault(device, [])
        busy = [lane for _, used, _ in list(self._queued.values()) for lane in used]
        taken = [lane for lane in lanes if lane not in busy][:count]
        with queued.on(device):
            while len(taken) < count and len(lanes) < self._most_lanes:
                taken.append(queued.side(device))
                lanes.append(taken[-1])
                cufile.register(taken[-1].cuda_stream)
        rest = [lane for lane in lanes if lane not in taken]
        taken += rest[: count - len(taken)]
        lanes[:] = [lane for lane in lanes if lane not in taken] + taken
        return taken

    def _give_lanes_back(self) -> None:
        for device, lanes in self._lanes.items():
            queued = streams.of(device)
            while queued and lanes:
                queued.give_back(device, lanes.pop())

    def _end(self, transfer: streams.Queued, write: bool, extent: FileExtent, moved: list[_Moved]) -> None:
        """Returns if all bytes were moved. Raises: OSError if not; of a write all errors are noted in the extent."""
        try:
            pieces = extent.pieces
            how = {index: reason for index, reason in enumerate(map(_shortfall, pieces, moved)) if reason}
            if write:
                extent.errors = {index: _failure(write, pieces[index], how[index]) for index in how}
            if how:
                raise _failure(write, pieces[min(how)], how[min(how)])
        finally:
            self._queued.pop(transfer, None)


def _opened(path: str, forced: bool) -> cufile.DriverFile:
    try:
        return cufile.open_file(path, forced)
    except RuntimeError as error:
        raise OSError(_NO_ERRNO, f"{cufile.NAME} cannot open a file here: {error}", os.path.dirname(path)) from error


def _queue(write: bool, piece: Piece, memory: Memory, lane: streams.Stream) -> _Moved:
    file = piece.file.opened_by
    assert isinstance(file, cufile.DriverFile)
    try:
        return file.queue(write, memory.ptr + piece.start, piece.nbytes, piece.offset, lane.cuda_stream)
    except RuntimeError as error:
        return f"failed: {error}"


def _shortfall(piece: Piece, moved: _Moved) -> str:
    """What is wrong with a transfer that is over."""
    if isinstance(moved, str):
        return moved
    try:
        nbytes = moved()
    except RuntimeError as error:
        return f"failed: {error}"
    return "" if nbytes == piece.nbytes else f"moved {nbytes} B only"


def _failure(write: bool, piece: Piece, how: str) -> OSError:
    what, directory = "write" if write else "read", piece.file.directory
    place = f"{what} of {piece.nbytes} B at offset {piece.offset} of the unlinked file in {directory}"
    return OSError(_NO_ERRNO, f"{place} {how}", directory)


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


def make(config: Options, *, forced: bool) -> GdsEngine:
    """An engine that has passed a round trip in every directory.

    Raises: ValueError without directories; what `check_machine` and `GdsEngine` raise; OSError if a round trip fails.
    """
    check_machine(forced=forced)
    if not config.dirs:
        raise ValueError(f"engine {cufile.NAME!r} needs at least one directory on a drive in dirs")

    engine = GdsEngine(config, forced=forced)
    try:
        for drive in range(len(config.dirs)):
            _round_trip(engine, drive)
    except BaseException:
        engine.close()
        raise
    return engine


def usable(config: Options) -> GdsEngine | None:
    """The engine, or None unless this process computes on a GPU and GPUDirect Storage works in all directories."""
    if not torch.cuda.is_initialized() or not cufile.status().real:
        return None
    try:
        return make(config, forced=False)
    except (RuntimeError, OSError) as error:
        message = f"GPUDirect Storage seems to be there and does not work, so ssd_fx takes engine 'posix': {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return None


def _round_trip(engine: GdsEngine, drive: int, nbytes: int = 64 << 10) -> None:
    """Writes and reads some bytes in a directory. Raises: OSError if the two differ."""
    device = cufile.current_device()
    queued = streams.of(device) if device else None
    assert device and queued, "checked by status"  # noqa: PT018
    source, target = (queued.empty((nbytes,), (1,), torch.uint8, device) for _ in range(2))
    pattern = (torch.arange(nbytes, device="cpu") % 251).to(torch.uint8)
    queued.copy(queued.current(device), source, pattern)
    extent = FileExtent(nbytes, [engine.drives.take(drive, 0, nbytes)])
    for transfer in (engine.write(extent, Memory.of(source)), engine.read(extent, Memory.of(target))):
        transfer.start()
        transfer.wait()
    engine.free(extent)
    if not torch.equal(target.cpu(), pattern):
        raise OSError(_NO_ERRNO, f"engine {engine.name!r} read other bytes than it wrote", extent.directory)
