"""Tensors go to the drives and come back, through the functions that generated code calls.

`ssd-fx doctor` prints how fast that is (`measure`). The planner reckons with the host time of our nodes (`node_s`).
"""

from __future__ import annotations

import errno
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ssd_fx.config import Config
from ssd_fx.options import Options
from ssd_fx.ranks import Ranks
from ssd_fx.runtime import calls, graphs, stats, trace
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.device import device_trace, streams
from ssd_fx.runtime.stores import end_unused
from ssd_fx.sizes import format_bytes

_TENSORS, _TENSOR_BYTES = 16, 16 << 20
_ALL_TO_THE_DRIVE = {"budget": 0, "host_budget": 0, "compression": "", "adapt": False}  # overrides the environment
_SMALL, _SMALL_BYTES = 8, 64 << 10
_SWEPT_BYTES = 4 << 20  # of each of three tensors: more than the caches of a core have
_PASSES = 3  # of which the first makes the file and loads our code
_GRAPH = "measured"  # the name under which these nodes run


@dataclass(frozen=True)
class Trip:
    """Seconds until all tensors were written, seconds until all were read, and CPU seconds of this thread by node."""

    write_s: float
    read_s: float
    host_s: dict[str, list[float]]


def round_trip(tensors: Sequence[Tensor], config: str, before: Callable[[], object] | None = None) -> Trip:
    """Store all `tensors`, release them when they are written, and load them. `before` is called before every node.

    Raises:
        OSError: a tensor could not be read back, or is not what was stored.
    """
    host_s = defaultdict[str, list[float]](list)

    def node(name: str, *arguments: object) -> Any:
        call = getattr(calls, name)  # as generated code calls it
        if before:
            before()
        started = time.thread_time()
        result = call(*arguments)
        host_s[name].append(time.thread_time() - started)
        return result

    start = time.perf_counter()
    handles = [node("store", x, config, _GRAPH, i, i) for i, x in enumerate(tensors)]
    for i, (handle, x) in enumerate(zip(handles, tensors, strict=True)):
        node("wait_store_", handle, x, len(tensors) + i)
    written = time.perf_counter()
    loaded = [
        node("load", handle, x.shape, x.stride(), x.dtype, x.device, 0, True)
        for handle, x in zip(handles, tensors, strict=True)
    ]
    for handle, x in zip(handles, loaded, strict=True):
        node("wait_load_", x, handle, 0)
    end = time.perf_counter()
    if not all(torch.equal(a, b) for a, b in zip(tensors, loaded, strict=True)):
        raise OSError(errno.EIO, "what was read is not what was written")
    return Trip(written - start, end - written, host_s)


def node_s(config: Options, device: torch.device) -> float:
    """What the host needs for one of our nodes: CPU seconds of the thread that runs the graph, without its waits.

    It is the mean of store, release, load and wait of a small tensor. Before each node the host computes something, as
    in a graph, where the caches have other things: a CPU's kernels, or the code around launches. A node then takes
    several times what it takes in a loop of nodes.

    Raises:
        OSError: the directories do not take the tensors, or do not give them back.
    """
    alone = replace(  # all goes to the drives, through a store that no graph has
        config,
        inflight=_SMALL * _SMALL_BYTES,
        prefetch=0,
        host_budget=0,
        compression=(),
        budget=0,
        memory="",
        ranks=Ranks(),
        adapt=False,
    )
    words = alone.runtime_json()
    tensors = [torch.full((_SMALL_BYTES,), i, dtype=torch.uint8, device=device) for i in range(_SMALL)]
    sampled = streams.of(device) is not None  # the first runs of a node on a device are all timed, which takes longer
    passes, before = _PASSES + device_trace.RUNS * sampled, sweep()
    with stats.apart():
        try:
            trips = [round_trip(tensors, words, before) for _ in range(passes)]
        finally:
            end_unused(parse(words), lambda: None)
            trace.forget(_GRAPH)
            device_trace.forget(_GRAPH)
    kept = trips[1 - _PASSES :]
    return statistics.mean(statistics.median(s for trip in kept for s in trip.host_s[name]) for name in kept[0].host_s)


def sweep() -> Callable[[], object]:
    """A kernel of the CPU that leaves nothing else in the caches."""
    a, b, out = (torch.ones(_SWEPT_BYTES // 4) for _ in range(3))
    return lambda: torch.add(a, b, out=out)


def measure(directory: str, passes: int = 2) -> list[tuple[float, float]]:
    """Bytes a second that are written and read, of 256 MiB; in the first pass the file grows, later it is reused.

    Raises:
        OSError: not all went to the drive and came back, so the rates would not be those of the drive.
        ValueError: a bad option in the environment.
    """
    nbytes = _TENSORS * _TENSOR_BYTES
    config = Config.make({"dirs": [directory], "engine": "posix", "inflight": nbytes} | _ALL_TO_THE_DRIVE)
    tensors, rates = _incompressible(), []
    try:
        for _ in range(passes):
            stats.reset_stats()
            trip = round_trip(tensors, config.runtime_json())
            moved = min(stats.stats().written_bytes, stats.stats().read_bytes)
            if moved < nbytes:
                raise OSError(f"of {format_bytes(nbytes)} only {format_bytes(moved)} went to the drive and came back")
            rates.append((nbytes / trip.write_s, nbytes / trip.read_s))
    finally:
        graphs.close()
    return rates


def _incompressible() -> list[Tensor]:
    """Random bytes, none the same in two tensors: file systems that compress or deduplicate write all of them."""
    bytes_ = torch.randint(256, (_TENSOR_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return [bytes_.roll(i) for i in range(_TENSORS)]
