"""What a tensor costs on the host: microseconds and device calls of store, release, load, wait and the handle's death.

python benchmarks/host_time.py              # engine "memory": all that is stored is copied, and read back
python benchmarks/host_time.py --kept       # all stays in memory
python benchmarks/host_time.py --cpu        # CPU time of the thread, where others use the cores too
python benchmarks/host_time.py --cold       # before each node something else fills the caches, as a step's kernels do
python benchmarks/host_time.py --dispatched # PyTorch's dispatcher calls the operators, as where a profiler runs
python benchmarks/host_time.py --parts      # and what single pieces of it take

Its device does nothing, and counts: what is timed is our Python. `benchmarks/gpu_costs.py` times a GPU's calls. A step
stores `--depth` tensors and reads them back; half of `--steps` warm up. The host runs ahead of the device: no copy has
ended before the backward begins, unless `--idle`. Each figure is the best quintile, because others use the machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import json
import os
import tempfile
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ssd_fx.runtime import calls, entries, layout, reader, states, stats, stores
from ssd_fx.runtime.device import device_trace, streams
from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.ops import KERNELS

N = 1 << 18  # elements of a tensor: 1 MiB
COLD_BYTES = 64 << 20  # more than the caches of a core have, and a good part of the one that cores share
CPU = torch.device("cpu")
NODES = ("store", "release", "load", "wait")
UNTIMED = "timed" in inspect.signature(streams.Streams.record).parameters  # else every event has a time

DISPATCHED = SimpleNamespace(**{name: getattr(torch.ops.ssd_fx, name).default for name in KERNELS})


class Event:
    """It has fired once the device's clock has come to `fires_at`."""

    def __init__(self, gpu: Device) -> None:
        self._gpu, self._fires_at = gpu, gpu.clock + gpu.late

    def query(self) -> bool:
        self._gpu.calls["query"] += 1
        return self._gpu.clock >= self._fires_at

    def synchronize(self) -> None:
        self._gpu.calls["synchronize"] += 1

    def elapsed_time(self, other: Event) -> float:
        self._gpu.calls["elapsed time"] += 1
        return 0.0


class Device(streams.Streams):
    """`Streams` whose calls do nothing and are counted. Its memory is the CPU's. `late`: no event fires by itself."""

    def __init__(self, late: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.clock, self.late = 0, int(late)
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._current = self.side(CPU)

    def side(self, device: torch.device) -> Any:
        return SimpleNamespace(cuda_stream=7, wait_event=self._wait)

    def _wait(self, event: Event) -> None:
        self.calls["wait"] += 1

    def current(self, device: torch.device) -> Any:
        self.calls["current stream"] += 1
        return self._current

    def record(self, stream: Any, *, timed: bool = not UNTIMED, sleeps: bool = False) -> Any:
        self.calls["timed event" if timed else "event"] += 1
        return Event(self)

    def idle(self, device: torch.device) -> Any:
        return self.record(None, timed=True)

    def capturing(self) -> bool:
        self.calls["capturing"] += 1
        return False

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: object) -> torch.Tensor:
        self.calls["allocation"] += 1
        return torch.empty_strided(size, stride, dtype=dtype)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def view(self, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        self.calls["view"] += 1
        if (address, nbytes) not in self._views:
            self._views[address, nbytes] = torch.empty(nbytes, dtype=torch.uint8)
        return self._views[address, nbytes]

    def memory_bytes(self, device: torch.device) -> int:
        return 1 << 40

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls["copy"] += 1


def _nothing(x: torch.Tensor) -> None: ...


@contextlib.contextmanager
def installed(late: bool) -> Iterator[Device]:
    """CPU tensors are those of such a device, which is the current one."""
    gpu = Device(late)

    class Guard:
        def __init__(self, index: object) -> None:
            gpu.calls["guard"] += 1

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def current() -> int | None:
        return CPU.index

    with (
        mock.patch.dict(streams.BACKENDS, cpu=gpu),
        mock.patch.object(reader, "is_foreign", _nothing),  # its memory counts as torch's
        mock.patch.object(streams, "finish_copies_into", _nothing),  # which asks about memory of the CPU
        mock.patch.object(torch.accelerator, "device_index", Guard),
        mock.patch.object(torch.accelerator, "current_device_index", current),
    ):
        try:
            yield gpu
        finally:
            gpu.late = 0
            gpu.clock += 1
            stores.close_stores()


def backward(call: Callable[[], None]) -> None:
    """Runs `call` in a backward: a load asks the running one whether it keeps its graph."""
    end = torch.zeros((), requires_grad=True).clone()
    end.register_hook(lambda _: call())
    end.backward()


class Steps:
    """Times and counts of the nodes of training steps."""

    def __init__(self, gpu: Device, config: str, flags: argparse.Namespace) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.calls: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._gpu, self._config, self._depth = gpu, config, flags.depth
        self._clock: Callable[[], float] = thread_time if flags.cpu else perf_counter
        self._ops: Any = DISPATCHED if flags.dispatched else calls
        self._others = torch.zeros(COLD_BYTES, dtype=torch.uint8) if flags.cold else None
        self._token = torch.empty(0, dtype=torch.int64)

    def step(self) -> None:
        self._ops.begin_(self._token, self._config, "g", 4 * N * self._depth, 4 * N * self._depth)
        handles = [self._store(slot) for slot in range(self._depth)]
        self._gpu.clock += 1  # the device has come to the end of the forward
        backward(lambda: self._backward(handles))

    def _store(self, slot: int) -> torch.Tensor:
        x = torch.empty(N)
        handle: torch.Tensor = self._timed("store", self._ops.store, x, self._config, "g", slot, 2 * slot)
        self._timed("release", self._ops.wait_store_, handle, x, 2 * slot + 1, True)
        return handle

    def _backward(self, handles: list[torch.Tensor]) -> None:
        for slot in reversed(range(self._depth)):
            handle = handles.pop()
            y = self._timed("load", self._ops.load, handle, (N,), (1,), torch.float32, CPU, 2 * slot)
            self._timed("wait", self._ops.wait_load_, y, handle, 2 * slot + 1)
            held = [handle]
            del handle
            self._timed("death", held.clear)

    def _timed(self, name: str, call: Callable[..., Any], *arguments: object) -> Any:
        if self._others is not None:
            self._others.add_(1)
        before, started = self._gpu.calls.copy(), self._clock()
        result = call(*arguments)
        self.seconds[name].append(self._clock() - started)
        self.calls[name].update(self._gpu.calls - before)
        return result


def best_us(seconds: Sequence[float]) -> float:
    """The best quintile, in microseconds."""
    return sorted(seconds)[len(seconds) // 5] * 1e6


def nodes(flags: argparse.Namespace) -> None:
    """Print a row for each kind of node."""
    config = {"engine": "memory", "adapt": False} | ({"budget": 1 << 40} if flags.kept else {})
    with installed(late=not flags.idle) as gpu:
        warm_up, steps = (Steps(gpu, json.dumps(config), flags) for _ in range(2))
        for number in range(flags.steps):
            (steps if number >= flags.steps // 2 else warm_up).step()
    for name in (*NODES, "death"):
        times = len(steps.seconds[name])
        calls = ", ".join(f"{count / times:.2f} {call}" for call, count in sorted(steps.calls[name].items()))
        print(f"{name:8}{best_us(steps.seconds[name]):7.1f} us  {calls}")
    print(f"{'nodes':8}{sum(best_us(steps.seconds[name]) for name in NODES):7.1f} us")


def parts() -> None:
    """Print what single pieces of the nodes take."""
    with installed(late=False) as gpu:
        config = json.dumps({"engine": "memory", "adapt": False})
        x = torch.empty(N)
        seen = layout.TensorMeta(tuple(x.shape), x.stride(), x.dtype)
        made = stores.get_store(config)

        def entry() -> states.Entry:
            return states.Entry(made, "g", 0, 0, x.nbytes, x.data_ptr(), seen, seen, CPU, "", False, False)

        def registered() -> torch.Tensor:
            handle = entries.stand_in(x.shape, x.dtype, CPU)
            entries.register(entry(), handle)
            return handle

        def versioned() -> None:
            layout.drop_storage(layout.versioned_alias(x))

        def started() -> streams.Queued:
            transfer = streams.Queued(gpu, CPU, gpu.side(CPU), lambda side: None, may_fail=False)
            transfer.start()
            return transfer

        handle, transfer = registered(), started()
        works = {
            "an operator that does nothing": lambda: torch.ops.ssd_fx.refuse_stand_ins.default([]),
            "check_not_captured": lambda: streams.check_not_captured(CPU),
            "device_trace.node": lambda: device_trace.node("store", "g", 0, 0, CPU),
            "get_store": lambda: stores.get_store(config),
            "stand_in": lambda: entries.stand_in(x.shape, x.dtype, CPU),
            "Entry": entry,
            "stand-in, entry and death": registered,
            "versioned alias and its end": versioned,
            "alias": lambda: layout.alias(x, seen),
            "is_parameter": lambda: layout.is_parameter(x),
            "lookup": lambda: entries.lookup(handle),
            "Queued, started": started,
            "Queued.done": transfer.done,
            "counters": lambda: stats.counters("g"),
            "an event of the trace": lambda: made._record("store", entry(), 0, 0.0, "disk"),
        }
        for name, work in works.items():
            print(f"{name:32}{min(timeit.repeat(work, number=1000, repeat=7)) * 1e3:7.2f} us")
            entries.GUARD.drain()
    for directories in (1, 8):
        files(directories)


def files(count: int) -> None:
    """Print what engine "posix" takes for a tensor on so many directories, without its transfer."""
    with tempfile.TemporaryDirectory() as scratch:
        directories = [os.path.join(scratch, str(number)) for number in range(count)]
        for directory in directories:
            os.mkdir(directory)
        engine = PosixEngine(*directories, allow_tmpfs=True)
        memory = Memory.of(torch.empty(count << 20, dtype=torch.uint8))
        extent = engine.alloc(memory.nbytes)
        works = {
            "room": lambda: engine.free(engine.alloc(memory.nbytes)),
            "a write": lambda: engine.write(extent, memory).cancel(),
            "a read": lambda: engine.read(extent, memory).cancel(),
        }
        for name, work in works.items():
            us = min(timeit.repeat(work, number=1000, repeat=7)) * 1e3
            print(f"{f'{name} of {count} MiB on {count} drives':32}{us:7.2f} us")
        engine.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", action="store_true", help="nothing is copied")
    parser.add_argument("--idle", action="store_true", help="each copy ends at once")
    parser.add_argument("--cpu", action="store_true", help="CPU time of the thread")
    parser.add_argument("--cold", action="store_true", help="with cold caches")
    parser.add_argument("--dispatched", action="store_true", help="through PyTorch's dispatcher")
    parser.add_argument("--parts", action="store_true", help="print the pieces too")
    parser.add_argument("--depth", type=int, default=20, help="tensors of a step, default %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
    flags = parser.parse_args(arguments)
    gc.disable()
    nodes(flags)
    if flags.parts:
        parts()


if __name__ == "__main__":
    main()
