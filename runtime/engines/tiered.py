"""Host memory before the drive, for tensors of a GPU: an engine over two engines.

    write -> host                     read <- host
               `- when it is full: the oldest moves on -> drive -> read

On the CPU a tensor is in host memory already; there `runtime/writer.py` leaves it where it is.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass

from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE, Completion, Engine, Extent, Memory, cut_short, outcome
from ssd_fx.runtime.engines.memory import MemoryEngine


@dataclass(eq=False, slots=True)
class TieredExtent(Extent):
    """Room for a tensor: `host` until it has moved on, then `drive`. `moving`: the write from `host` to `drive`.

    `planned`: the plan wants the tensor in host memory. `written`: the write that filled `host`.
    """

    host: Extent | None
    drive: Extent | None
    planned: bool = False
    written: Completion | None = None
    moving: Completion | None = None

    @property
    def on_drive(self) -> bool:  # type: ignore[override]
        return self.host is None


class TieredEngine:
    """Keeps up to `room` bytes in `host` and the rest in `drive`.

    The plan says which tensors stay in `host`; where it names no tier, the latest stay.
    A tensor that moves on takes host memory until it is written, so host memory holds up to `room + in_flight` bytes.
    One tensor may always move. If more than `in_flight` bytes would be moving, new tensors go to the drive at once. So
    do those for which no host memory can be pinned.
    `moved` is called with the bytes of each tensor that has moved on.
    """

    def __init__(
        self,
        host: MemoryEngine,
        drive: Engine,
        room: int,
        in_flight: int,
        moved: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.name = f"{host.name}+{drive.name}"
        self.devices = host.devices & drive.devices
        self._host = host
        self._drive = drive
        self._room = room
        self._cap = in_flight
        self._moved = moved
        self._in_host: dict[TieredExtent, None] = {}  # those that may move on, oldest first
        self._moving: dict[TieredExtent, None] = {}  # oldest first
        self.host_bytes = 0  # those moving included
        self.moving_bytes = 0

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        """Room on the drive for `tier` "ssd"; else in host memory, if the oldest there can move on for it.

        A planned tensor moves on only for another planned one. More may be planned for host memory than fits: a plan
        is for one graph, and several graphs may run their forwards before the first backward.
        """
        self._reap()
        if tier == "ssd" or not self._make_room(nbytes, tier):
            return TieredExtent(nbytes, None, self._drive.alloc(nbytes))
        extent = TieredExtent(nbytes, self._host.alloc(nbytes), None, tier == "host")
        self._in_host[extent] = None
        self.host_bytes += nbytes
        return extent

    def _make_room(self, nbytes: int, tier: str) -> bool:
        """Whether host memory has room for `nbytes`. Moves older tensors on until it does."""
        if nbytes > self._room:
            return False
        while self.host_bytes - self.moving_bytes + nbytes > self._room:
            extent = self._next_to_move(tier)
            if extent is None or (self._moving and self.moving_bytes + extent.nbytes > self._cap):
                return False
            if not self._move(extent):
                return False
        return True

    def _next_to_move(self, tier: str) -> TieredExtent | None:
        """The extent that gives way to one of `tier`: the oldest that is not planned, else the oldest of all."""
        filled = [extent for extent in self._in_host if extent.written]  # else a Ctrl-C came before the write
        found = [extent for extent in filled if not extent.planned] or (filled if tier == "host" else [])
        return found[0] if found else None

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, TieredExtent)
        self._stop(extent)
        self._free_host(extent)
        drive, extent.drive = extent.drive, None
        if drive:
            self._drive.free(drive)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, TieredExtent)
        if extent.host:
            try:
                extent.written = self._host.write(extent.host, memory)
                return extent.written
            except OSError as error:  # no host memory can be pinned
                if error.errno != errno.ENOMEM:
                    raise
                self._free_host(extent)
                extent.drive = self._drive.alloc(extent.nbytes)
        assert extent.drive, "an extent is in a tier"
        return self._drive.write(extent.drive, memory)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, TieredExtent)
        self._reap()
        if not extent.host:
            assert extent.drive, "an extent is in a tier"
            return self._drive.read(extent.drive, memory)
        self._in_host.pop(extent, None)  # the graph asks for it, so it no longer moves on
        self._stop(extent)
        return self._host.read(extent.host, memory) if extent.host else self.read(extent, memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, TieredExtent)
        if extent.drive:
            self._drive.failed(extent.drive, error)

    def close(self) -> None:
        try:  # no table changes here, without the lock: each extent is freed when its handle dies
            self._drive.close()  # first: it ends what moves, which reads host memory
        finally:
            self._host.close()

    def _move(self, extent: TieredExtent) -> bool:
        """Moves an extent from host memory to the drive. False if that cannot begin now."""
        assert extent.host, "what is in `_in_host` has host memory"
        if extent.written is None or not extent.written.done():
            return False
        try:
            extent.drive = self._drive.alloc(extent.nbytes)
        except OSError:  # the drive warned; the tensor stays in host memory
            return False
        del self._in_host[extent]
        self._moving[extent] = None
        self.moving_bytes += extent.nbytes
        try:
            extent.moving = self._drive.write(extent.drive, self._host.located(extent.host))
            extent.moving.start()
        except OSError as error:
            self._moved_or_not(extent, error)
            return False
        return True

    def _reap(self) -> None:
        for extent in list(self._moving):
            if extent.moving and extent.moving.done():
                self._moved_or_not(extent, outcome(extent.moving))

    def _moved_or_not(self, extent: TieredExtent, error: OSError | None) -> None:
        """Records the end of a move that nobody stopped. After an error it is tried again, behind the others."""
        self._finish_move(extent, error)
        if error:
            self._in_host[extent] = None

    def _stop(self, extent: TieredExtent) -> None:
        """Ends a move, if one is under way. If all bytes were written already, the tensor is on the drive."""
        if extent in self._moving:
            self._finish_move(extent, cut_short(extent.moving))

    def _finish_move(self, extent: TieredExtent, error: OSError | None) -> None:
        """Records the end of a move: the tensor is on the drive, or after an error it stays in host memory."""
        del self._moving[extent]
        self.moving_bytes -= extent.nbytes
        drive, extent.drive, extent.moving = extent.drive, None, None
        assert drive, "a move has room on the drive"
        if error:
            try:
                if error.errno not in NOT_OF_THE_DRIVE:
                    self._drive.failed(drive, error)
            finally:  # its warning may be an error
                self._drive.free(drive)
            return
        extent.drive = drive  # first, so that a Ctrl-C does not lose the room on the drive
        self._free_host(extent)
        self._moved(extent.nbytes)

    def _free_host(self, extent: TieredExtent) -> None:
        host, extent.host = extent.host, None
        if host:
            self._in_host.pop(extent, None)
            self.host_bytes -= extent.nbytes
            self._host.free(host)
