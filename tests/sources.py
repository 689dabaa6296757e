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
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ssd_fx
from ssd_fx.options import Options
from ssd_fx.runtime import codec, ops, writer
from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.runtime.engines.tiered import TieredEngine, TieredExtent
from ssd_fx.runtime.entries import living
from ssd_fx.runtime.layout import TensorMeta, alias
from ssd_fx.runtime.reader import Reader
from ssd_fx.runtime.states import Entry, Load, State
from ssd_fx.runtime.store import Store
from ssd_fx.runtime.writer import Writer
from tests.passes.lazy_engines import Lazy, LazyRead, Unending
from tests.runtime.engines import Failure

ENGINE = "test-sources"
GARBAGE = 0xA5


class _Finished(Lazy):
    """A write that has ended as soon as it was started."""

    def start(self) -> None:
        self.wait()


class _WrittenLate(Lazy):
    """A write that touches the memory when it is waited for, which `_written_late` does."""

    def start(self) -> None:
        _now.happened.add("late")


class _TooLate(Unending):
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
    def __init__(self, write: Completion) -> None:
        super().__init__(errno.EIO)
        _now.happened.add("failed")


Write = Callable[[Completion], Completion]


@dataclass
class _Switch:
    """How transfers go at the moment, and how they went. `moves`: what is in the host tier goes on before it is read.

    `happened`: "failed" if a write failed, "refused" if there was no room for one.
    """

    write: Write = _Finished
    read: Callable[[Completion, Memory], Completion] = LazyRead
    tiered: bool = False
    moves: bool = False
    reads_that_fail: int = 0
    refuses: bool = False
    failed: dict[Extent, int] = field(default_factory=dict)
    moved: set[Extent] = field(default_factory=set)
    happened: set[str] = field(default_factory=set)

    def of(self, extent: Extent | None) -> set[str]:
        """How the extent was read."""
        found = {"again"} if extent in self.failed else set()
        if extent in self.moved:
            return found | {"moved on"}
        return found | ({"host"} if isinstance(extent, TieredExtent) and extent.host else set())


_now = _Switch()


class SwitchedEngine:
    """An engine in memory, and a host tier before it; which one has an extent is settled when it is allocated."""

    name, devices = ENGINE, frozenset({"cpu"})

    def __init__(self) -> None:
        self._drive = MemoryEngine()
        self._tiered = TieredEngine(MemoryEngine(), self._drive, 1 << 40, 1 << 40)

    def _of(self, extent: Extent) -> Engine:
        return self._tiered if isinstance(extent, TieredExtent) else self._drive

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        if _now.refuses:
            _now.happened.add("refused")
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
            _now.moved.add(extent)
        if _now.failed.get(extent, 0) < _now.reads_that_fail:
            _now.failed[extent] = _now.failed.get(extent, 0) + 1
            return _FailedRead(memory)
        return _now.read(self._of(extent).read(extent, memory), memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        return

    def close(self) -> None:
        return


def _make(config: Options) -> Engine:
    return SwitchedEngine()


ENGINES[ENGINE] = _make


MORE = {"ahead", "written", "given", "copied", "aside"}  # what loads of a source may be besides


@dataclass(frozen=True)
class Source:
    """`means`: what `_seen` says of every load from here. `loads`: what it said of each."""

    name: str
    means: set[str]
    switch: Callable[[], _Switch]
    patches: Callable[[], AbstractContextManager[object]] = nullcontext
    loads: list[set[str]] = field(default_factory=list, compare=False)

    @contextmanager
    def forced(self, **options: object) -> Iterator[dict[str, object]]:
        """What is stored and loaded meanwhile comes from here. Yields options for `torch.compile`."""
        global _now
        before, _now = _now, self.switch()
        ssd_fx.reset_stats()
        self.loads.clear()
        with self.patches(), _seen(self.loads), nullcontext() if "read" in self.means else _never_blocking():
            try:
                yield OPTIONS | options
            finally:
                _now = before

    def check(self, stats: ssd_fx.Stats) -> None:
        """Raises AssertionError unless there were loads, and all of them from here."""
        assert stats.loads, f"{self.name}: nothing was offloaded"
        assert self.loads, f"{self.name}: nothing was loaded but leaves and empty tensors"
        wrong = [words for words in self.loads if not self.means <= words <= self.means | MORE]
        assert not wrong, f"{self.name} means {self.means}, and these loads were {wrong}"


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
def _seen(loads: list[set[str]]) -> Iterator[None]:
    """Says what each load is, but for those of no bytes, and of leaves that require grad, which stay.

    "read", and then "host" or "moved on" of the host tier, "ahead" if it had begun before, "again" if it had failed,
    "late" if writes end when something is loaded.
    From memory: "resident", "writing", or "failed" or "refused" as the write was. Then "given" or "copied", or
    "written" if the write had ended after all; "aside" if it was copied at the release. From either: "decoded".
    """
    begin, read = Reader.begin, Reader._read
    taken: list[str] = []

    def reading(self: Reader, entry: Entry, *args: Any) -> Load:
        ahead = entry.ahead
        load = read(self, entry, *args)
        taken[:] = ["ahead"] if ahead and load.read is ahead.read else []
        return load

    def seeing(self: Reader, entry: Entry, *args: Any, **kwargs: Any) -> Load:
        held = entry.held is not None
        leaf = held and entry.storage is None
        words = _before(entry, self._writer)
        load = begin(self, entry, *args, **kwargs)
        if held:
            words.add("copied" if entry.held is not None else "written" if entry.extent else "given")
        else:
            words.update(taken, _now.of(entry.extent))
        if entry.nbytes and not leaf:
            loads.append(words)
        return load

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Reader, "begin", seeing))
        stack.enter_context(mock.patch.object(Reader, "_read", reading))
        # Writes that never end must not hide those that have ended.
        stack.enter_context(mock.patch.object(writer, "OVERTAKERS", 1 << 20))
        yield


def _before(entry: Entry, held_by: Writer) -> set[str]:
    """What is known of a load before it begins."""
    words = {"decoded"} if entry.encoded else set()
    if entry.held is None:
        return words | {"read"} | (_now.happened & {"late"})
    if not entry.borrowed and not entry.encoded:
        words.add("aside")
    if entry in held_by._ledger.resident:
        return words | {"resident"}
    return words | ({"writing"} if entry in held_by._ledger.writing else _now.happened)


@contextmanager
def _never_blocking() -> Iterator[None]:
    """No release waits for its write because the plan counts on the memory."""
    wait = Store.wait_store_

    def going_on(self: Store, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, *_: bool | int) -> None:
        wait(self, entry, keepalive, seq, hand_over)

    with mock.patch.object(Store, "wait_store_", going_on):
        yield


@contextmanager
def _all_resident() -> Iterator[None]:
    """There is room for all in memory: nothing is ever written."""
    with mock.patch.object(Writer, "due", return_value=None):
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
def _written_late() -> Iterator[None]:
    """No write touches its memory before the backward loads: a tensor that was given up or written over shows."""
    load = Store.load

    def ended(self: Store, *args: Any, **kwargs: Any) -> Any:
        for entry in living():
            if entry.write is not None:
                entry.write.wait()
        return load(self, *args, **kwargs)

    with _without_codec(), mock.patch.object(Store, "load", ended):
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

        def with_codec(self: Writer, entry: Entry, x: Tensor) -> str:
            self._encoder.codecs["ssd"] = "bitpack"
            return hold(self, entry, x)

        stack.enter_context(mock.patch.object(Writer, "_hold", with_codec))
        yield


@contextmanager
def _without_codec() -> Iterator[None]:
    hold = Writer._hold

    def plain(self: Writer, entry: Entry, x: Tensor) -> str:
        self._encoder.codecs.pop("ssd", None)
        return hold(self, entry, x)

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

    def blocking(self: Store, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, *more: Any) -> None:
        wait(self, entry, keepalive, seq, False, *more)

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
    Source("read", {"read"}, _Switch, _without_codec),
    Source("read_ahead", {"read", "ahead"}, _Switch, _ahead),
    Source("written_late", {"read", "late"}, lambda: _Switch(write=_WrittenLate), _written_late),
    Source("read_at_the_third_attempt", {"read", "again"}, lambda: _Switch(reads_that_fail=2), _without_codec),
    Source("given_away", {"writing"}, lambda: _Switch(write=Unending), _without_codec),
    Source("given_away_just_written", {"writing"}, lambda: _Switch(write=_TooLate), _without_codec),
    Source("copied", {"writing", "copied"}, lambda: _Switch(write=Unending), _graph_kept),
    Source("resident", {"resident"}, lambda: _Switch(write=Unending), _resident),
    Source("write_failed", {"failed"}, lambda: _Switch(write=_FailedWrite), _without_codec),
    Source("no_room", {"refused"}, lambda: _Switch(refuses=True), _without_codec),
    Source("put_aside", {"refused", "aside"}, lambda: _Switch(refuses=True), _not_handed_over),
    Source("host_tier", {"read", "host"}, lambda: _Switch(tiered=True), _without_codec),
    Source("host_tier_moved_on", {"read", "moved on"}, lambda: _Switch(tiered=True, moves=True), _without_codec),
    Source("decoded", {"read", "decoded"}, _Switch, _encoded),
    Source("decoded_from_memory", {"writing", "decoded"}, lambda: _Switch(write=Unending), _encoded),
    Source("decoded_ahead", {"read", "decoded", "ahead"}, _Switch, _encoded_ahead),
)
SOURCES = {source.name: source for source in ALL}
