"""Every place that a loaded tensor's bytes may come from, forced one at a time.

    with source.forced() as options:                      # of torch.compile(backend=ssd_fx.backend, options=options)
        train()
        source.check(ssd_fx.stats())                      # the values did come from there

The options are the same for all sources, so one compiled function runs under each of them. What differs is an engine
that is switched between forwards, and patches of the runtime's own choices.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

import ssd_fx
from ssd_fx.runtime import codec, ops, writer
from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.runtime.engines.tiered import TieredEngine, TieredExtent
from ssd_fx.runtime.entries import Entry, State
from ssd_fx.runtime.layout import TensorMeta, alias
from ssd_fx.runtime.reader import Reader
from ssd_fx.runtime.store import Store
from ssd_fx.runtime.writer import Writer
from tests.passes.lazy_engines import Lazy, LazyRead
from tests.runtime.engines import Failure

ENGINE = "test-sources"
GARBAGE = 0xA5


class _Finished(Lazy):
    """A write that has ended as soon as it was started."""

    def start(self) -> None:
        self.wait()


class _TooLate(Lazy):
    """A write that nobody saw ending, and that had ended after all when it is cancelled."""

    def cancel(self) -> bool:
        self.wait()
        return False


class _FailedRead(Failure):
    """Leaves garbage behind."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(errno.EIO)
        self._memory = memory

    def start(self) -> None:
        ctypes.memset(self._memory.ptr, GARBAGE, self._memory.nbytes)


class _FailedWrite(Failure):
    def __init__(self) -> None:
        super().__init__(errno.EIO)


Write = Callable[[Completion], Completion]


@dataclass
class _Switch:
    """How transfers go at the moment. `moves`: what is in the host tier goes on to the drive before it is read."""

    write: Write = _Finished
    read: Callable[[Completion, Memory], Completion] = LazyRead
    tiered: bool = False
    moves: bool = False
    reads_that_fail: int = 0
    refuses: bool = False
    failed: dict[Extent, int] = field(default_factory=dict)


_now = _Switch()


class SwitchedEngine:
    """An engine in memory, and a host tier before it; which one has an extent is settled when it is allocated."""

    name, devices, disk_bytes = ENGINE, frozenset({"cpu"}), 0

    def __init__(self) -> None:
        self._drive = MemoryEngine()
        self._tiered = TieredEngine(MemoryEngine(), self._drive, 1 << 40, 1 << 40)

    def _of(self, extent: Extent) -> Engine:
        return self._tiered if isinstance(extent, TieredExtent) else self._drive

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        if _now.refuses:
            raise OSError(errno.ENOSPC, "no room, says the test")
        return self._tiered.alloc(nbytes, "") if _now.tiered else self._drive.alloc(nbytes)

    def free(self, extent: Extent) -> None:
        self._of(extent).free(extent)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        return _now.write(self._of(extent).write(extent, memory))

    def read(self, extent: Extent, memory: Memory) -> Completion:
        if isinstance(extent, TieredExtent) and _now.moves and extent.host:
            assert self._tiered._move(extent), "a written tensor can move on"
            assert extent.moving
            extent.moving.wait()
            self._tiered._reap()
            assert extent.host is None, "it is on the drive now"
        if _now.failed.get(extent, 0) < _now.reads_that_fail:
            _now.failed[extent] = _now.failed.get(extent, 0) + 1
            return _FailedRead(memory)
        return _now.read(self._of(extent).read(extent, memory), memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        return

    def close(self) -> None:
        return


def _make(config: RuntimeConfig) -> Engine:
    return SwitchedEngine()


ENGINES[ENGINE] = _make


@dataclass(frozen=True)
class Source:
    """`check` raises AssertionError unless the counters say that values came from this source alone."""

    name: str
    switch: Callable[[], _Switch]
    patches: Callable[[], AbstractContextManager[object]] = nullcontext
    from_memory: bool = False
    counts: dict[str, int] = field(default_factory=dict, compare=False)

    @contextmanager
    def forced(self, **options: object) -> Iterator[dict[str, object]]:
        """What is stored and loaded meanwhile comes from here. Yields options for `torch.compile`."""
        global _now
        before, _now = _now, self.switch()
        ssd_fx.reset_stats()
        self.counts.clear()
        with self.patches(), _counted(self.counts), _never_blocking() if self.from_memory else nullcontext():
            try:
                yield OPTIONS | options
            finally:
                _now = before

    def check(self, stats: ssd_fx.Stats) -> None:
        assert stats.loads, f"{self.name}: nothing was offloaded"
        right, wrong = ("memory", "engine") if self.from_memory else ("engine", "memory")
        held = stats.held_bytes > 0 and not self.from_memory  # leaves that require grad stay, whatever the source
        assert self.counts.get(right) or held, f"{self.name}: nothing came from {right}: {self.counts}"
        assert not self.counts.get(wrong) or held, f"{self.name}: {self.counts}"


OPTIONS: dict[str, object] = {
    "engine": ENGINE,
    "inner": "aot_eager",
    "machine": "default",
    "min_bytes": 0,
    "recompute": False,
    "adapt": False,
    "budget": 0,
    "dirs": [tempfile.gettempdir()],
    "allow_tmpfs": True,
}


@contextmanager
def _counted(counts: dict[str, int]) -> Iterator[None]:
    """Counts loads by where their bytes were; those of no bytes count nowhere."""
    begin = Reader.begin

    def counting(self: Reader, entry: Entry, *args: object, **kwargs: object) -> object:
        where = {State.IN_MEMORY: "memory", State.ON_DISK: "engine"}.get(entry.state)
        found = [where] if where and entry.nbytes else []
        if where == "memory" and entry.nbytes:
            found += [] if entry.borrowed else ["aside"]
        load = begin(self, entry, *args, **kwargs)  # type: ignore[arg-type]
        if where == "memory" and entry.nbytes:
            found.append("given" if entry.held is None else "copied")
        for kind in found:
            counts[kind] = counts.get(kind, 0) + 1
        return load

    # Writes that never end must not hide those that have ended.
    with mock.patch.object(Reader, "begin", counting), mock.patch.object(writer, "OVERTAKERS", 1 << 20):
        yield


@contextmanager
def _never_blocking() -> Iterator[None]:
    """No release waits for its write because the plan counts on the memory."""
    wait = Store.wait_store_

    def going_on(self: Store, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, block: bool = False) -> None:
        wait(self, entry, keepalive, seq, hand_over, False)

    with mock.patch.object(Store, "wait_store_", going_on):
        yield


@contextmanager
def _all_resident() -> Iterator[None]:
    """There is room for all in memory: nothing is ever written."""
    with mock.patch.object(Writer, "_due", return_value=None):
        yield


@contextmanager
def _read_ahead() -> Iterator[None]:
    """Everything is read before the graph asks."""
    begin = Reader.begin

    def ahead(self: Reader, entry: Entry, *args: object, **kwargs: object) -> object:
        if entry.state is State.ON_DISK and entry.nbytes and not entry.ahead:
            self.ahead(entry)
        return begin(self, entry, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(Reader, "begin", ahead):
        yield


@contextmanager
def _encoded() -> Iterator[None]:
    """A codec for every dtype, which keeps every bit: the bytes backwards."""

    def encode(name: str, x: Tensor) -> tuple[Tensor, Encoded]:
        payload = _bytes(x).flip(0)
        return payload, Encoded(payload.numel(), False, lambda payload, out: _bytes(out).copy_(payload.flip(0)))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(codec, "encode", encode))
        hold = Writer._hold

        def with_codec(self: Writer, entry: Entry, x: Tensor) -> None:
            self._codec = "bitpack"
            hold(self, entry, x)

        stack.enter_context(mock.patch.object(Writer, "_hold", with_codec))
        yield


@contextmanager
def _without_codec() -> Iterator[None]:
    hold = Writer._hold

    def plain(self: Writer, entry: Entry, x: Tensor) -> None:
        self._codec = ""
        hold(self, entry, x)

    with mock.patch.object(Writer, "_hold", plain):
        yield


def _bytes(x: Tensor) -> Tensor:
    return alias(x, TensorMeta((x.numel() * x.itemsize,), (1,), torch.uint8))


@contextmanager
def _graph_kept() -> Iterator[None]:
    """As in a backward with `retain_graph=True`."""
    with _without_codec(), mock.patch.object(ops, "keeps_graph", return_value=True):
        yield


@contextmanager
def _not_handed_over() -> Iterator[None]:
    """As under Inductor's C++ wrapper: what failed to leave is copied aside at the release."""
    wait = Store.wait_store_

    def blocking(self: Store, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, block: bool = False) -> None:
        wait(self, entry, keepalive, seq, False, block)

    with _without_codec(), mock.patch.object(Store, "wait_store_", blocking):
        yield


@contextmanager
def _both(*managers: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager())
        yield


def _resident() -> AbstractContextManager[None]:
    return _both(_without_codec, _all_resident)


def _ahead() -> AbstractContextManager[None]:
    return _both(_without_codec, _read_ahead)


def _encoded_ahead() -> AbstractContextManager[None]:
    return _both(_encoded, _read_ahead)


ALL: tuple[Source, ...] = (
    Source("read", _Switch, _without_codec),
    Source("read_ahead", _Switch, _ahead),
    Source("read_at_the_third_attempt", lambda: _Switch(reads_that_fail=2), _without_codec),
    Source("given_away", lambda: _Switch(write=Lazy), _without_codec, from_memory=True),
    Source("given_away_just_written", lambda: _Switch(write=_TooLate), _without_codec, from_memory=True),
    Source("copied", lambda: _Switch(write=Lazy), _graph_kept, from_memory=True),
    Source("resident", lambda: _Switch(write=Lazy), _resident, from_memory=True),
    Source("write_failed", lambda: _Switch(write=lambda _: _FailedWrite()), _without_codec, from_memory=True),
    Source("no_room", lambda: _Switch(refuses=True), _without_codec, from_memory=True),
    Source("put_aside", lambda: _Switch(refuses=True), _not_handed_over, from_memory=True),
    Source("host_tier", lambda: _Switch(tiered=True), _without_codec),
    Source("host_tier_moved_on", lambda: _Switch(tiered=True, moves=True), _without_codec),
    Source("decoded", _Switch, _encoded),
    Source("decoded_from_memory", lambda: _Switch(write=Lazy), _encoded, from_memory=True),
    Source("decoded_ahead", _Switch, _encoded_ahead),
)
SOURCES = {source.name: source for source in ALL}
