"""Host memory before the drive, for tensors of a device with memory of its own: an engine over two engines.

    write -> host                     read <- host
               `- when it is full: the oldest moves on -> drive -> read

On the CPU host memory is where the tensor is already; there `runtime/writer.py` lets it rest without a copy.
"""

from collections.abc import Callable

from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory, outcome

Locate = Callable[[Extent], Memory]


class TieredExtent(Extent):
    """Where a tensor is: `host` while it has one, then `drive`; `moving` is the write from one to the other.

    `planned`: the plan wants it in host memory.
    """

    __slots__ = ("drive", "host", "moving", "planned", "written")

    def __init__(self, host: Extent | None, drive: Extent | None, nbytes: int, planned: bool = False) -> None:
        at = host or drive
        assert at, "it is somewhere"
        super().__init__(nbytes, at.directory, at.offset)
        self.host, self.drive, self.planned = host, drive, planned
        self.written: Completion | None = None  # the write that filled `host`
        self.moving: Completion | None = None


class TieredEngine:
    """Up to `room` bytes in `host`, the rest in `drive`; `locate` gives the memory behind an extent of `host`.

    Which those are is the plan's choice; where it says nothing, the latest.
    What moves on still takes its room until it is written, beside the `room` bytes that stay: host memory holds up to
    `room + in_flight` bytes. While more than `in_flight` would move, new tensors go to the drive at once.
    """

    def __init__(self, host: Engine, drive: Engine, locate: Locate, room: int, in_flight: int) -> None:
        self.name, self.devices = f"{host.name}+{drive.name}", host.devices & drive.devices
        self._host, self._drive, self._locate = host, drive, locate
        self._room, self._cap = room, in_flight
        self._resting: dict[TieredExtent, None] = {}  # both oldest first
        self._moving: dict[TieredExtent, None] = {}
        self.host_bytes = self.moving_bytes = 0

    @property
    def disk_bytes(self) -> int:
        return self._drive.disk_bytes

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        """Room in the tier that the plan wants: "ssd", "host" as long as there is some, or either.

        What the plan wants in host memory makes room only for its like: the forwards of several graphs may come before
        the first backward, and then there is more of it than fits.
        """
        self._reap()
        while tier != "ssd" and self.host_bytes - self.moving_bytes + nbytes > self._room:
            oldest = next((e for e in self._resting if not e.planned), None)
            if oldest is None and tier == "host":
                oldest = next(iter(self._resting), None)
            if oldest is None or (self._moving and self.moving_bytes + nbytes > self._cap) or not self._move(oldest):
                break
        if tier == "ssd" or self.host_bytes - self.moving_bytes + nbytes > self._room:
            return TieredExtent(None, self._drive.alloc(nbytes), nbytes)
        extent = TieredExtent(self._host.alloc(nbytes), None, nbytes, tier == "host")
        self._resting[extent] = None
        self.host_bytes += nbytes
        return extent

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, TieredExtent)
        self._stop(extent)
        self._leave_host(extent)
        drive, extent.drive = extent.drive, None
        if drive:
            self._drive.free(drive)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, TieredExtent)
        if not extent.host:
            assert extent.drive, "it is somewhere"
            return self._drive.write(extent.drive, memory)
        extent.written = self._host.write(extent.host, memory)
        return extent.written

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, TieredExtent)
        self._reap()
        if not extent.host:
            assert extent.drive, "it is somewhere"
            return self._drive.read(extent.drive, memory)
        self._resting.pop(extent, None)  # it is wanted now: it moves no more
        self._stop(extent)
        return self._host.read(extent.host, memory) if extent.host else self.read(extent, memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        assert isinstance(extent, TieredExtent)
        if extent.drive:
            self._drive.failed(extent.drive, error)

    def close(self) -> None:
        for extent in list(self._moving):
            self._stop(extent)
        self._drive.close()
        self._host.close()

    def _move(self, extent: TieredExtent) -> bool:
        """Starts to write the oldest from host memory to the drive; False if that cannot be, now or ever."""
        assert extent.host, "what rests is in host memory"
        if extent.written is None or not extent.written.done():
            return False
        del self._resting[extent]
        try:
            extent.drive = self._drive.alloc(extent.nbytes)
        except OSError:  # the drive warned; it stays in host memory
            return False
        self._moving[extent] = None
        self.moving_bytes += extent.nbytes
        try:
            extent.moving = self._drive.write(extent.drive, self._locate(extent.host))
            extent.moving.start()
        except OSError as error:
            self._moved(extent, error)
        return True

    def _reap(self) -> None:
        for extent in list(self._moving):
            if extent.moving and extent.moving.done():
                self._moved(extent, outcome(extent.moving))

    def _stop(self, extent: TieredExtent) -> None:
        """Ends a move; if all had been written after all, the tensor is on the drive."""
        if extent not in self._moving:
            return
        if extent.moving and not extent.moving.cancel():
            self._moved(extent, None)
            return
        drive = self._forget_move(extent)
        self._drive.free(drive)

    def _moved(self, extent: TieredExtent, error: OSError | None) -> None:
        drive = self._forget_move(extent)
        if error:
            self._drive.free(drive)
            self._drive.failed(drive, error)
            return
        extent.drive = drive
        extent.directory, extent.offset = drive.directory, drive.offset
        self._leave_host(extent)

    def _forget_move(self, extent: TieredExtent) -> Extent:
        del self._moving[extent]
        self.moving_bytes -= extent.nbytes
        drive, extent.drive, extent.moving = extent.drive, None, None
        assert drive, "a move has a place to go"
        return drive

    def _leave_host(self, extent: TieredExtent) -> None:
        host, extent.host = extent.host, None
        if host:
            self._resting.pop(extent, None)
            self.host_bytes -= extent.nbytes
            self._host.free(host)
