"""Wherever a Ctrl-C comes, each entry is in one of its states, and the sums of bytes are those of the entries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssd_fx.runtime import entries
from ssd_fx.runtime.states import Entry, Ledger, State
from ssd_fx.runtime.stores import get_store
from tests.runtime.engines import DelayedEngine, around
from tests.runtime.harness import config_json, everywhere, load, raw, release, settle, start_load, store, wait

pytestmark = pytest.mark.usefixtures("no_device")
N = 1000


def check(ledger: Ledger, living: list[Entry]) -> None:
    """Raises AssertionError if what an entry has does not fit its state, or a sum is wrong."""
    for entry in living:
        assert (entry.held is not None) == (entry.state.where == "memory"), entry.state
        assert (entry.extent is not None) == (entry.state in (State.WRITING, State.ON_DISK, State.LOST)), entry.state
        assert (entry in ledger.resident) == (entry.state is State.RESIDENT), entry.state
        assert (entry in ledger.writing) == (entry.state in (State.ENCODING, State.WRITING)), entry.state
        assert entry.write is None or entry.state is State.WRITING, entry.state
        assert entry.moved_bytes == (entry.encoded.nbytes if entry.encoded else entry.nbytes)
        assert all(each.stage == "asked" for each in entry.loads)
        assert entry.ahead is None or entry.ahead.stage == "ahead"
    loads = [each for entry in living for each in (*entry.loads, *filter(None, [entry.ahead]))]
    assert ledger.resident_bytes == sum(entry.moved_bytes for entry in ledger.resident)
    assert ledger.writing_bytes == sum(entry.moved_bytes for entry in ledger.writing)
    assert ledger.reading_bytes == sum(each.counted for each in loads)
    assert ledger.ahead_bytes == sum(each.counted for each in loads if each.stage == "ahead")


class Life:
    """A tensor from its store to the death of its handle, in steps; the last one that is made may be interrupted."""

    def __init__(self, config: str) -> None:
        self.config = config
        self.x = torch.rand(N) < 0.5
        self.like = torch.empty(N, dtype=torch.bool)
        self.handles: list[Tensor] = []
        self.loaded: list[Tensor] = []

    def store(self) -> None:
        self.handles.append(store(self.x, self.config))

    def release(self) -> None:
        release(self.handles[0], self.x)

    def aside(self) -> None:
        release(self.handles[0], self.x, hand_over=False)

    def settle(self) -> None:
        settle(self.handles[0])

    def ahead(self) -> None:
        entry = entries.lookup(self.handles[0])
        with entries.GUARD.lock:
            entry.store.reader.ahead(entry)

    def load(self) -> None:
        self.loaded.append(start_load(self.handles[0], self.like))

    def copy(self) -> None:
        self.loaded.append(start_load(self.handles[0], self.like, consume=False))

    def wait(self) -> None:
        wait(self.loaded[0], self.handles[0])

    def die(self) -> None:
        self.handles.clear()
        entries.GUARD.drain()


LIVES = [
    "store",
    "store release",
    "store settle release",
    "store aside",
    "store die",
    "store release load",
    "store release copy",
    "store settle release load",
    "store settle release load wait",
    "store release load die",
    "store settle release ahead",
    "store settle release ahead load",
    "store settle release ahead die",
]
KINDS: dict[str, dict[str, object]] = {
    "written": {},
    "resident": {"budget": 1 << 30},
    "encoded": {"compression": {"ssd": "bitpack"}},
    "encoded at rest": {"compression": {"host": "bitpack"}, "host_budget": 1 << 30},
}
CASES = [(life, kind) for life in LIVES for kind in KINDS if "ahead" not in life or kind in ("written", "encoded")]


@pytest.mark.parametrize(("life", "kind"), CASES)
def test_a_ctrl_c_anywhere(tmp_path: Path, life: str, kind: str) -> None:
    """In the last step of a life. What was not given away is still right."""
    config = config_json(tmp_path, "memory", **KINDS[kind])
    ledger = get_store(config).ledger
    *before, last = life.split()
    for at, strike in everywhere():
        one = Life(config)
        for step in before:
            getattr(one, step)()
        strike(getattr(one, last))
        with entries.GUARD.lock:
            check(ledger, list(entries._entries.values()))
        if one.handles and not one.loaded and entries.lookup(one.handles[0]).state is not State.DONATED:
            assert raw(load(one.handles[0], one.like, consume=False)) == raw(one.x), at
        one.die()
        assert (ledger.resident_bytes, ledger.writing_bytes, ledger.reading_bytes) == (0, 0, 0), at
    assert at > 3
    assert entries.living() == []


@pytest.mark.parametrize("action", ["load", "copy", "die"])
def test_a_ctrl_c_while_a_slow_drive_writes(tmp_path: Path, action: str) -> None:
    config = config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 3600, 3600)))
    ledger = get_store(config).ledger
    for at, strike in everywhere():
        life = Life(config)
        life.store()
        life.release()
        strike(getattr(life, action))
        with entries.GUARD.lock:
            check(ledger, list(entries._entries.values()))
        life.die()
        assert (ledger.writing_bytes, ledger.reading_bytes) == (0, 0), at
