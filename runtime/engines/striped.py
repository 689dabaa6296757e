"""Several drives as one engine. Every drive has its own engine below, so that a slow drive does not stop the others.

A small tensor goes whole to the drive with the fewest bytes under way. A large one is cut into contiguous stripes, one
for each drive, so that a single load has the bandwidth of all drives.
"""

import errno
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE, Completion, Engine, Extent, Memory, outcome
from ssd_fx.runtime.memory.buffers import ALIGN

STRIPE = 1 << 20  # the shortest stripe; a drive has its full bandwidth from 256 KiB on


class _Drive:
    """One engine, and its load."""

    __slots__ = ("_under_way", "engine", "live_bytes")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.live_bytes = 0
        self._under_way: list[tuple[Completion, int]] = []

    def began(self, transfer: Completion, nbytes: int) -> None:
        """Counts a transfer until it is done."""
        self._under_way.append((transfer, nbytes))

    def busy(self) -> tuple[int, int]:
        """(bytes under way, bytes stored), by which drives are compared."""
        self._under_way = [(transfer, nbytes) for transfer, nbytes in self._under_way if not transfer.done()]
        return sum(nbytes for _, nbytes in self._under_way), self.live_bytes


class _Part(NamedTuple):
    """A stripe: `extent` stores the tensor's bytes from `start` on."""

    drive: _Drive
    extent: Extent
    start: int

    def of(self, memory: Memory) -> Memory:
        """The stripe's part of the tensor's memory."""
        return Memory(memory.ptr + self.start, self.extent.nbytes, memory.device, memory.home)


class StripedExtent(Extent):
    """The stripes of one tensor. `errors`: the errors of failed writes, by the index of the stripe."""

    __slots__ = ("errors", "parts")

    def __init__(self, nbytes: int, parts: list[_Part]) -> None:
        super().__init__(nbytes, ", ".join(part.extent.directory for part in parts), parts[0].extent.offset)
        self.parts = parts
        self.errors: dict[int, OSError] = {}


class StripedTransfer:
    """The transfers of all stripes as one. It raises the earliest of their errors, and records all in `errors`."""

    __slots__ = ("_errors", "_parts", "_transfers")

    def __init__(self, parts: list[_Part], transfers: list[Completion], errors: dict[int, OSError]) -> None:
        self._parts = parts
        self._transfers = transfers
        self._errors = errors

    def start(self) -> None:
        for index, (part, transfer) in enumerate(zip(self._parts, self._transfers, strict=True)):
            try:
                transfer.start()
            except OSError as error:
                self._errors[index] = _copy(error)
                self.cancel()
                raise
            part.drive.began(transfer, part.extent.nbytes)

    def done(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)

    def wait(self) -> None:
        outcomes = [outcome(transfer) for transfer in self._transfers]
        failed = {index: error for index, error in enumerate(outcomes) if error}
        if not failed:
            return
        self._errors.update((index, _copy(error)) for index, error in failed.items())

        def rank(index: int) -> tuple[bool, bool, float]:
            code = failed[index].errno  # a cancelled part comes last: it does not say why the transfer failed
            return code in NOT_OF_THE_DRIVE, code == errno.ECANCELED, self._transfers[index].span()[1]

        raise failed[min(failed, key=rank)]

    def cancel(self) -> bool:
        cut_short = [transfer.cancel() for transfer in self._transfers]
        return any(cut_short)

    def span(self) -> tuple[float, float]:
        spans = [transfer.span() for transfer in self._transfers]
        return min(started for started, _ in spans), max(ended for _, ended in spans)


class StripedEngine:
    """`engines`, one for each drive. Stripes have at least `STRIPE` bytes, so a tensor under two of these is not cut.

    The engine of a drive that fails retires it, by refusing new room. What is stored there stays readable.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        assert engines, "there is a drive"
        self.name = engines[0].name
        self.devices = frozenset.intersection(*(engine.devices for engine in engines))
        self._drives = [_Drive(engine) for engine in engines]

    @property
    def disk_bytes(self) -> int:
        return sum(drive.engine.disk_bytes for drive in self._drives)

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        drives = sorted(self._drives, key=_Drive.busy)
        while True:
            used = drives[: max(1, nbytes // STRIPE)]
            parts: list[_Part] = []
            try:
                for drive, start, size in _stripes(used, nbytes):
                    parts.append(_Part(drive, drive.engine.alloc(size), start))
                    drive.live_bytes += size
                return StripedExtent(nbytes, parts)
            except OSError:
                _free(parts)
                drives.remove(used[len(parts)])  # full or retired; the others take its share
                if not drives:
                    raise
            except BaseException:  # a warning that is an error, Ctrl-C
                _free(parts)
                raise

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, StripedExtent)
        _free(extent.parts)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, StripedExtent)
        transfers: list[Completion] = []
        try:
            for part in extent.parts:
                transfers.append(part.drive.engine.write(part.extent, part.of(memory)))
        except OSError as error:
            extent.errors[len(transfers)] = _copy(error)
            for transfer in transfers:
                transfer.cancel()
            raise
        return StripedTransfer(extent.parts, transfers, extent.errors)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, StripedExtent)
        transfers = [part.drive.engine.read(part.extent, part.of(memory)) for part in extent.parts]
        return StripedTransfer(extent.parts, transfers, {})

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, StripedExtent)
        for index, failure in extent.errors.items():
            if failure.errno not in NOT_OF_THE_DRIVE:
                part = extent.parts[index]
                part.drive.engine.failed(part.extent, failure)

    def close(self) -> None:
        with ExitStack() as closing:  # if one fails, or a Ctrl-C comes, the others are closed too
            for drive in self._drives:
                closing.callback(drive.engine.close)


def one_for_each(directories: Sequence[str], make: Callable[[str], Engine]) -> Engine:
    """The engine that `make` makes for a directory, striped if there are several directories.

    Raises: what `make` raises, after the engines made before are closed.
    """
    made: list[Engine] = []
    with ExitStack() as closing:
        for directory in directories:
            made.append(make(directory))
            closing.callback(made[-1].close)
        closing.pop_all()
    return made[0] if len(made) == 1 else StripedEngine(made)


def _copy(error: OSError) -> OSError:
    """The error without its traceback, whose frames would keep the extent alive that keeps the error, and handles."""
    return OSError(error.errno, error.strerror, error.filename)


def _stripes(drives: list[_Drive], nbytes: int) -> list[tuple[_Drive, int, int]]:
    """(drive, start, bytes) of about equal stripes, which start at multiples of `ALIGN`."""
    starts = [nbytes * i // len(drives) // ALIGN * ALIGN for i in range(len(drives))]
    ends = [*starts[1:], nbytes]
    return [(drive, start, end - start) for drive, start, end in zip(drives, starts, ends, strict=True)]


def _free(parts: list[_Part]) -> None:
    for part in parts:
        part.drive.live_bytes -= part.extent.nbytes
        part.drive.engine.free(part.extent)
