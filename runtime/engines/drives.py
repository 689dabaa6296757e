"""Where tensors go on several drives. Each drive has a file. Engines move the bytes so that no drive waits for another.

A small tensor goes whole to the drive with the fewest bytes under way. A large one is cut into contiguous stripes, one
for each drive, so that a single load has the bandwidth of all drives. A drive that is full or has failed is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE, Extent
from ssd_fx.runtime.engines.extents import BackingFile
from ssd_fx.runtime.memory.buffers import ALIGN
from ssd_fx.runtime.native.pool import Words

STRIPE = 1 << 20  # the shortest stripe; a drive has its full bandwidth from 256 KiB on


class Piece(NamedTuple):
    """A range of a drive's file: `size` bytes at `offset`. It has the tensor's `nbytes` bytes from `start` on."""

    drive: int
    file: BackingFile
    offset: int
    size: int
    start: int
    nbytes: int


@dataclass(eq=False, slots=True)
class FileExtent(Extent):
    """Room for one tensor in files.

    `tail`: the last bytes of the tensor if they are not on disk. `sums`: the checksums of the others, piece by piece;
    None without checksums. `errors`: the errors of the pieces whose write failed, by their index.
    `past_host`: the bytes came from a device without passing the host's memory. They go back the same way.
    """

    pieces: list[Piece]
    sums: Words | None = None
    tail: bytes = b""
    errors: dict[int, OSError] = field(default_factory=dict)
    past_host: bool = False

    @property
    def directory(self) -> str:
        """The directories of its files, for people."""
        return ", ".join(piece.file.directory for piece in self.pieces)

    @property
    def offset(self) -> int:
        """Where its first piece begins."""
        return self.pieces[0].offset

    @property
    def body_bytes(self) -> int:
        """The bytes of the tensor that are on disk."""
        return self.nbytes - len(self.tail)


class Drives:
    """The `files` of an engine. Stripes have at least `STRIPE` bytes, so a tensor under two of these is not cut.

    `under_way`: returns the bytes that each drive was given and has not moved yet.
    A file that has failed refuses new room. What is stored there stays readable.
    """

    def __init__(self, files: Sequence[BackingFile], under_way: Callable[[], list[int]]) -> None:
        assert files, "there is a drive"
        self.files = files
        self.align = max(file.align for file in files)  # the alignment that memory needs for direct I/O
        self.live_bytes = [0] * len(files)
        self._under_way = under_way

    def alloc(self, nbytes: int) -> list[Piece]:
        """Room for a tensor of `nbytes`. Raises: OSError if there is none."""
        drives = [0]
        if len(self.files) > 1:
            drives = [drive for _, _, drive in sorted(zip(self._under_way(), self.live_bytes, count(), strict=False))]
        while True:
            used = drives[: max(1, nbytes // STRIPE)]
            pieces: list[Piece] = []
            try:
                for stripe in stripes(used, nbytes):
                    pieces.append(self.take(*stripe))
                return pieces
            except OSError:
                self.free(pieces)
                drives.remove(used[len(pieces)])  # full or retired; the others take its share
                if not drives:
                    raise
            except BaseException:  # a warning that is an error, Ctrl-C
                self.free(pieces)
                raise

    def take(self, drive: int, start: int, nbytes: int) -> Piece:
        """Room on one drive for a tensor's bytes from `start` on. Raises: OSError if there is none."""
        file = self.files[drive]
        piece = Piece(drive, file, *file.room(nbytes), start, nbytes)
        self.live_bytes[drive] += nbytes
        return piece

    def free(self, pieces: Sequence[Piece]) -> None:
        """Takes back room whose I/O has ended."""
        for piece in pieces:
            self.live_bytes[piece.drive] -= piece.nbytes
            piece.file.free(piece.offset, piece.size)

    def failed(self, extent: FileExtent, error: OSError) -> None:
        """Records that a write to `extent` failed, so that the drives whose fault it is take nothing new."""
        errors = extent.errors if len(extent.pieces) > 1 else {0: error}
        for index, failure in errors.items():
            if failure.errno not in NOT_OF_THE_DRIVE:
                piece = extent.pieces[index]
                piece.file.failed(piece.nbytes, failure)

    def close(self) -> None:
        with ExitStack() as closing:  # if one fails, or a Ctrl-C comes, the others are closed too
            for file in self.files:
                closing.callback(file.close)


def stripes(drives: Sequence[int], nbytes: int) -> list[tuple[int, int, int]]:
    """(drive, start, bytes) of about equal stripes, which start at multiples of `ALIGN`."""
    if len(drives) == 1:
        return [(drives[0], 0, nbytes)]
    starts = [nbytes * i // len(drives) // ALIGN * ALIGN for i in range(len(drives))]
    ends = [*starts[1:], nbytes]
    return [(drive, start, end - start) for drive, start, end in zip(drives, starts, ends, strict=True)]
