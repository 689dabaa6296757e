"""How fast an engine moves a device's tensors, alone and beside compute, and how fast copies to host memory are."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from ssd_fx.calibration.timing import Clock
from ssd_fx.options import Options
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.runtime.memory.buffers import PAGE

MIB = 2**20
_TRANSFERS, _TRANSFER_BYTES, _SMALL_BYTES = 16, 8 * MIB, 128 * 1024
_COPY_BYTES, _SMALL_COPY_BYTES, _COPIES = 64 * MIB, 64 * 1024, 5


class Transfers:
    """Measures how the engine of a configuration moves the device's tensors, alone and beside compute."""

    def __init__(self, config: Options, device: torch.device, clock: Clock | None = None) -> None:
        self.device, self.clock = device, clock or Clock(device)
        self.engine: Engine = ENGINES[config.engine](config)  # one that statistics and trace of the process do not see
        self._extents: list[Extent] = []
        room = config.disk_limit // (2 * _TRANSFER_BYTES) if config.disk_limit else _TRANSFERS
        self._count = max(min(room, _TRANSFERS), 1)

    def rates(self) -> dict[str, float]:
        """The rates of the drive, as `Machine.with_rates` takes them. Closes the engine.

        Bytes per second are measured beside compute. The drag of a byte is the time by which it slows compute down.

        Raises:
            OSError: a transfer failed, or the directory is full.
        """
        try:
            with self.clock.on_idle_cores():
                tensors = self._tensors(self._count, _TRANSFER_BYTES)
                small = self._tensors(8, _SMALL_BYTES)
                self._all(tensors, write=True)  # the file grows
                tries = 2 if self.clock.idle is None else 6  # others take the cores from our I/O threads
                beside = [self._beside(tensors, write) for write in (True, False) * tries]
                small_s = [self._one_by_one(small, write) for write in (True, False)]
        finally:
            for extent in self._extents:
                self.engine.free(extent)
            self.engine.close()
        total = len(tensors) * _TRANSFER_BYTES
        write_s, read_s = (min(transfer_s for transfer_s, _ in beside[i::2]) for i in (0, 1))
        lost = statistics.median(lost_s for _, lost_s in beside)
        latency = statistics.mean(small_s) - _SMALL_BYTES * (write_s + read_s) / 2 / total
        found = {"write_bw": total / write_s, "read_bw": total / read_s, "latency_s": max(latency, 1e-6)}
        return found | {"drag_s_per_byte": max(lost, 0.0) / total}

    def _tensors(self, count: int, nbytes: int) -> list[tuple[Extent, Tensor]]:
        """Tensors at page boundaries, where our CPU allocator puts a model's; `ssd-fx calibrate` installs none."""
        made = []
        for i in range(count):
            self._extents.append(self.engine.alloc(nbytes))
            whole = torch.full((nbytes + PAGE,), i, dtype=torch.uint8, device=self.device)
            start = -whole.data_ptr() % PAGE
            made.append((self._extents[-1], whole[start : start + nbytes]))
        return made

    def _start(self, pairs: list[tuple[Extent, Tensor]], write: bool) -> list[Completion]:
        move = self.engine.write if write else self.engine.read
        made = [move(extent, Memory.of(tensor)) for extent, tensor in pairs]
        for completion in made:
            completion.start()
        return made

    def _all(self, pairs: list[tuple[Extent, Tensor]], write: bool) -> float:
        """Seconds until all pairs are moved, started together."""
        started = time.perf_counter()
        for completion in self._start(pairs, write):
            completion.wait()
        return time.perf_counter() - started

    def _one_by_one(self, pairs: list[tuple[Extent, Tensor]], write: bool) -> float:
        seconds = [self._all([pair], write) for pair in pairs]
        return statistics.median(seconds) if self.clock.idle is None else min(seconds)

    def _beside(self, pairs: list[tuple[Extent, Tensor]], write: bool) -> tuple[float, float]:
        """Move all pairs while products run, and compare the products with as many that run alone.

        Returns seconds until all transfers were done, and seconds that they slowed the products by.
        """
        size = 4096 if self.device.type != "cpu" else 512
        x = torch.ones((size, size), dtype=torch.float32, device=self.device)
        out = torch.empty_like(x)
        compute_s = held_s = 0.0
        count = 0
        completions: list[Completion] = []
        if streams.of(self.device):
            with streams.timed(self.device):
                completions = self._start(pairs, write)
        else:  # an engine that copies at once blocks its caller, who computes nothing meanwhile
            held_s = self.clock.once(lambda: completions.extend(self._start(pairs, write)))
        while not all(c.done() for c in completions):
            compute_s += self.clock.once(lambda: torch.mm(x, x, out=out))
            count += 1
        for completion in completions:
            completion.wait()
        spans = [c.span() for c in completions]  # spans of a device are known only after the wait
        alone_s = sum(self.clock.once(lambda: torch.mm(x, x, out=out)) for _ in range(count))
        transfer_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
        return transfer_s, held_s + compute_s - alone_s


def host_copies(device: torch.device, nbytes: int = _COPY_BYTES) -> dict[str, float]:
    """`to_host_bw`, `from_host_bw` (bytes per second) and `host_latency_s`; empty for a device in host memory.

    Each direction is measured in turn, on a side stream, without compute beside it, because copy engines work so. It is
    the best of a few repeats, timed until the host sees the end, as the runtime does.
    """
    queued = streams.of(device)
    if queued is None:
        return {}
    with queued.on(device):
        side = queued.side(device)
        try:
            there_s, back_s = _copies_s(queued, device, side, nbytes)
            small_s = sum(_copies_s(queued, device, side, _SMALL_COPY_BYTES)) / 2
        finally:
            queued.give_back(device, side)
    latency_s = max(small_s - _SMALL_COPY_BYTES * (there_s + back_s) / 2 / nbytes, 0.0)
    return {"to_host_bw": nbytes / there_s, "from_host_bw": nbytes / back_s, "host_latency_s": latency_s}


def _copies_s(queued: streams.Streams, device: torch.device, side: streams.Stream, nbytes: int) -> tuple[float, float]:
    """Seconds of a copy of so many bytes from the device to pinned host memory, and of one back."""
    ours, pinned = queued.empty((nbytes,), (1,), torch.uint8, device), queued.pinned(nbytes)
    queued.record(queued.current(device)).synchronize()  # allocations are ordered by the current stream

    def once(target: Tensor, source: Tensor) -> float:
        started = time.perf_counter()
        queued.copy(side, target, source)
        queued.record(side).synchronize()
        return time.perf_counter() - started

    there = [once(pinned, ours) for _ in range(_COPIES)]
    return min(there), min(once(ours, pinned) for _ in range(_COPIES))
