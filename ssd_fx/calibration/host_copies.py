"""Rates of copies between a device with separate memory and pinned host memory: the lanes of the host tier."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ssd_fx.runtime.device import streams

_NBYTES, _SMALL_BYTES = 64 * 2**20, 64 * 1024
_REPEATS = 5


def host_copies(device: torch.device, nbytes: int = _NBYTES) -> dict[str, float]:
    """`to_host_bw`, `from_host_bw` (bytes per second) and `host_latency_s`; empty for a device in host memory.

    Each direction is measured in turn, on a side stream, without compute beside it, because copy engines work so. It is
    the best of a few repeats, timed until the host sees the end, as the runtime does.
    """
    queued = streams.of(device)
    if queued is None:
        return {}
    with queued.on(device):
        side = queued.side(device)
        large, small = _Copies(queued, device, side, nbytes), _Copies(queued, device, side, _SMALL_BYTES)
        there_s, back_s = large.seconds(write=True), large.seconds(write=False)
        small_s = (small.seconds(write=True) + small.seconds(write=False)) / 2
        queued.give_back(device, side)
    latency_s = max(small_s - _SMALL_BYTES * (there_s + back_s) / 2 / nbytes, 0.0)
    return {"to_host_bw": nbytes / there_s, "from_host_bw": nbytes / back_s, "host_latency_s": latency_s}


class _Copies:
    def __init__(self, queued: streams.Streams, device: torch.device, side: streams.Stream, nbytes: int) -> None:
        self.queued, self.side = queued, side
        self.ours = queued.empty((nbytes,), (1,), torch.uint8, device)
        self.pinned = queued.pinned(nbytes)
        queued.record(queued.current(device)).synchronize()  # allocations are ordered by the current stream

    def seconds(self, *, write: bool) -> float:
        target, source = (self.pinned, self.ours) if write else (self.ours, self.pinned)
        return min(self._once(target, source) for _ in range(_REPEATS))

    def _once(self, target: Tensor, source: Tensor) -> float:
        started = time.perf_counter()
        self.queued.copy(self.side, target, source)
        self.queued.record(self.side).synchronize()
        return time.perf_counter() - started
