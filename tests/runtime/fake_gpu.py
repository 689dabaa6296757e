"""A device without hardware: CPU memory behind streams that execute late, and in the worst order that is allowed.

Registered for the device type "cpu", so that the store, the engines and the ops run as they do on a GPU. Kernels and
copies work on addresses, as those of a GPU do: they keep nothing alive and see what is there when they run.

It is none of the devices that a thread has by itself: whoever asks an event, or calls what takes the thread's device,
has to be within `on`. On a GPU that is not the first, the call would make a context on the first.

Orders: "sides first": side streams run as soon as they may, the compute stream only when somebody waits for it.
"compute first": the other way round. "lazy": nothing runs before somebody waits for it. An int: random, with that seed.
"""

import contextlib
import ctypes
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from ssd_fx.runtime import reader
from ssd_fx.runtime.device import streams

GARBAGE = 0xCD
PAGE = 4096
ORDERS = ("sides first", "compute first", "lazy", 1, 2, 3)


class FakeEvent:
    """`copies`: of its stream, those that were queued before it. `timed`: it can be asked when it fired."""

    alive = 0

    def __init__(self, stream: "FakeStream", timed: bool = False) -> None:
        FakeEvent.alive += 1
        self.stream, self.fired, self.ms, self.timed = stream, False, 0.0, timed
        self.copies = list(stream.copies)

    def fire(self) -> None:
        self.fired, self.ms = True, self.stream.gpu.ms

    def query(self) -> bool:
        self.stream.gpu.check_thread("a query of an event")  # of torch's calls it sets no device, as CUDAEvent.h shows
        self.stream.gpu.progress()
        return self.fired

    def synchronize(self) -> None:
        self.stream.gpu.check_thread("a wait for an event")  # nor does this one
        self.reach()

    def reach(self) -> None:
        """The device comes here."""
        while not self.fired:
            self.stream.run_first()

    def __del__(self) -> None:
        type(self).alive -= 1  # the name has gone at the end of a process

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.timed, "elapsed_time of an event without a time"
        assert end.timed, "elapsed_time to an event without a time"
        assert self.fired, "elapsed_time before the first event fired"
        assert end.fired, "elapsed_time before the second event fired"
        assert end.ms >= self.ms, "elapsed_time of events in the other order"
        return end.ms - self.ms


class Copy:
    """A queued copy. `followed`: a stream that computes waits for it, so nothing behind uses its target too early, or
    its source for something else."""

    followed = False


class FakeStream:
    """`computes`: a user computes on it."""

    computes = False

    def __init__(self, gpu: "FakeGpu", cuda_stream: int) -> None:
        self.gpu, self.cuda_stream = gpu, cuda_stream
        self.copies: list[Copy] = []  # that have not run
        self.tasks: deque[FakeEvent | Callable[[], None]] = deque()
        self.queued = self.ran = 0  # kernels and copies

    def wait_event(self, event: FakeEvent) -> None:
        with self.gpu.lock:
            if self.computes:
                for copy in event.copies:
                    copy.followed = True
            self.tasks.append(event)
            self.gpu.progress()

    def run_first(self) -> None:
        """Runs one task, and before it what it waits for."""
        with self.gpu.lock:
            if not self.tasks:  # another thread has run it
                return
            first = self.tasks[0]
            if isinstance(first, FakeEvent):
                first.reach()
            self.tasks.popleft()
            if not isinstance(first, FakeEvent):
                first()

    def runnable(self) -> bool:
        return bool(self.tasks) and (not isinstance(self.tasks[0], FakeEvent) or self.tasks[0].fired)


class Block:
    """Memory of the device; `live` while a tensor has it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.live = nbytes, True
        self.memory = ctypes.create_string_buffer(bytes([GARBAGE]) * nbytes, nbytes)
        self.address = ctypes.addressof(self.memory)


class FakeGpu:
    """`Streams` for tests. `violations`: what accessed memory that it had no right to.

    Memory comes in multiples of `granule` bytes, as objects of the class `block`.
    """

    block, granule = Block, 1

    def __init__(self, order: str | int = "lazy") -> None:
        self.lock = threading.RLock()  # several threads may run what is queued
        self.order = order
        self.random = random.Random(order)
        self.compute = FakeStream(self, 1)
        self.compute.computes = True
        self.sides: list[FakeStream] = []
        self.spare: list[FakeStream] = []
        self.blocks: dict[int, Block] = {}
        self.violations: list[str] = []
        self.captures = False
        self.ms = 0.0  # the device's time: it does one thing at a time
        self.sleeping = 0  # events that were made for a host that sleeps
        self._free: dict[int, list[Block]] = {}
        self._running = False
        self._thread = threading.local()
        self.threads: set[str] = set()  # in which somebody asked it

    # ---- what the runtime uses

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self._thread.entered = self.entered, True
        try:
            yield
        finally:
            self._thread.entered = before

    def current(self, device: torch.device) -> FakeStream:
        return self.compute

    def side(self, device: torch.device) -> FakeStream:
        if self.spare:
            return self.spare.pop()
        self.sides.append(FakeStream(self, len(self.sides) + 2))
        return self.sides[-1]

    def give_back(self, device: torch.device, stream: FakeStream) -> None:
        assert not stream.copies, "a stream went back with copies on it"
        self.spare.append(stream)

    def record(self, stream: FakeStream, *, timed: bool = False, sleeps: bool = False) -> FakeEvent:
        event = FakeEvent(stream, timed)
        self.sleeping += sleeps
        with self.lock:
            stream.tasks.append(event.fire)
            self.progress()
        return event

    def capturing(self) -> bool:
        self.check_thread("whether a graph is captured was asked")
        return self.captures

    def idle(self, device: torch.device) -> FakeEvent:
        event = FakeEvent(self.compute, timed=True)
        event.fire()
        return event

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: object) -> Tensor:
        numel = 1 + sum((s - 1) * t for s, t in zip(size, stride, strict=True)) if 0 not in size else 0
        flat = self._tensor(numel * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)

    def pinned(self, nbytes: int) -> Tensor:
        found = self._tensor(nbytes + PAGE)
        start = -found.data_ptr() % PAGE  # a driver gives whole pages
        return found[start : start + nbytes]

    def view(self, address: int, nbytes: int, device: torch.device) -> Tensor:
        self.check(address, nbytes, "a view")
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    def memory_bytes(self, device: torch.device) -> int:
        return 0

    def copy(self, stream: FakeStream, target: Tensor, source: Tensor) -> None:
        to, size, stride, dtype = target.data_ptr(), target.size(), target.stride(), target.dtype
        at, other = source.data_ptr(), source.stride()
        nbytes = target.numel() * target.itemsize
        copy = Copy()
        stream.copies.append(copy)

        def run() -> None:
            stream.copies.remove(copy)
            if stream is not self.compute and not copy.followed:
                self.check(to, nbytes, "the target of a copy")
                self.check(at, nbytes, "the source of a copy")
            _as(to, nbytes, dtype, size, stride).copy_(_as(at, nbytes, dtype, size, other))

        self.queue(stream, run)

    # ---- what tests use

    @property
    def entered(self) -> bool:
        """Whether this is the device of the thread."""
        return getattr(self._thread, "entered", False)

    def check_thread(self, what: str) -> None:
        """Notes a violation if the thread's device is another."""
        self.threads.add(threading.current_thread().name)
        if not self.entered:
            self.violations.append(f"{what} in a thread ({threading.current_thread().name}) that is on another device")

    def queue(self, stream: FakeStream, task: Callable[[], None], ms: float = 1.5) -> None:
        """A kernel or copy that takes so long."""

        def run() -> None:
            task()
            stream.ran += 1
            self.ms += ms

        with self.lock:
            stream.queued += 1
            stream.tasks.append(run)
            self.progress()

    def tensor(self, values: Tensor) -> Tensor:
        """Memory that a kernel, which is queued only, will fill with `values`."""
        x = self.empty(tuple(values.size()), values.stride(), values.dtype, None)
        self.overwrite(x, values)
        return x

    @contextlib.contextmanager
    def on_another_stream(self) -> Iterator[None]:
        """Within this the test computes on a stream of its own."""
        before = self.compute
        self.compute = self.side(torch.device("cpu"))
        self.compute.computes = True
        try:
            yield
        finally:
            self.compute = before

    def overwrite(self, x: Tensor, values: Tensor) -> None:
        """Queues a kernel that writes `values` to where `x` is now."""
        data = ctypes.string_at(values.data_ptr(), values.numel() * values.itemsize)
        address = x.data_ptr()
        self.queue(self.compute, lambda: ctypes.memmove(address, data, len(data)) and None)

    def bytes_of(self, x: Tensor) -> bytes:
        """What a kernel sees that is queued now."""
        seen: list[bytes] = []
        address, nbytes = x.data_ptr(), x.numel() * x.itemsize
        self.queue(self.compute, lambda: seen.append(ctypes.string_at(address, nbytes)))
        self.record(self.compute).reach()
        return seen[0]

    def scrub(self) -> None:
        """Runs every kernel, then spoils the memory that nobody has: what is right afterwards is no leftover."""
        self.record(self.compute).reach()
        for block in self.blocks.values():
            if not block.live:
                ctypes.memset(block.address, GARBAGE, block.nbytes)

    def finish(self) -> None:
        """Runs all that is queued, for what nobody waited for has to run as well."""
        for stream in (self.compute, *self.sides):
            while stream.tasks:
                stream.run_first()

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Notes a violation if that is not memory that somebody has."""
        for block in self.blocks.values():
            if block.address <= address and address + nbytes <= block.address + block.nbytes:
                if not block.live:
                    self.violations.append(f"{what} is memory that was given back")
                return
        self.violations.append(f"{what} is not memory of the device")

    def progress(self) -> None:
        """Runs what the order wants to run now."""
        with self.lock:
            if self._running:
                return
            self._running = True
            self._run_some()
            self._running = False

    def _run_some(self) -> None:
        if isinstance(self.order, int):
            for _ in range(self.random.randrange(4)):
                ready = [s for s in (self.compute, *self.sides) if s.runnable()]
                if ready:
                    self.random.choice(ready).run_first()
        eager = {"sides first": self.sides, "compute first": [self.compute]}.get(str(self.order), [])
        while any(s.runnable() for s in eager):
            next(s for s in eager if s.runnable()).run_first()

    def _tensor(self, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with self.lock:
            size = -(-nbytes // self.granule) * self.granule
            free = self._free.setdefault(size, [])
            block = free.pop() if free else self.block(size)
            block.live = True
            self.blocks[block.address] = block
        cell = (ctypes.c_ubyte * nbytes).from_address(block.address)
        weakref.finalize(cell, self._give_back, block)
        return torch.frombuffer(cell, dtype=torch.uint8)

    def _give_back(self, block: Block) -> None:
        """At once, as a caching allocator does: kernels that are queued may still use it, in the stream's order."""
        block.live = False
        self._free[block.nbytes].append(block)


def _as(address: int, nbytes: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    flat = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)


@contextlib.contextmanager
def installed(order: str | int) -> Iterator[FakeGpu]:
    """CPU tensors are those of a fake GPU; at the end nothing may have accessed memory it had no right to."""
    gpu = FakeGpu(order)
    streams.BACKENDS["cpu"] = gpu
    try:
        with mock.patch.object(reader, "is_foreign", return_value=False):  # its memory counts as torch's
            yield gpu
            gpu.finish()
    finally:
        del streams.BACKENDS["cpu"]
    assert not gpu.violations, gpu.violations[:3]
