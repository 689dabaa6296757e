"""The four ops with the arguments that a test does not care about filled in. A test is a graph, by hand:

    def test_it_comes_back_from_the_drive(config):      # the engine posix, in a directory of its own
        x = torch.randn(1000)
        expected = x.clone()
        h = store(x, config)                            # forward: a write begins, and `h` takes the place of `x`
        release(h, x)                                   # the graph reads `x` no more,
        del x                                           # and drops it
        entry = settle(h)                               # the write has ended, and `lookup(h)` is what is known of it
        assert torch.equal(load(h, expected), expected) # backward: a read begins, and is waited for

`config_json` makes other configurations, with the engines of `engines.py` too. `start_load` and `wait` are the halves
of `load`, `put` is all of the forward; `begin` starts a forward that counts as a step. `watch` tells whether memory is
gone; `between_locks` and `everywhere` put another thread, or a Ctrl-C, between two lines of the runtime.
`tests/conftest.py` ends what a test has left: stores, engines, entries.
"""

import ctypes
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime.engines.base import Completion
from ssd_fx.runtime.entries import GUARD, lookup
from ssd_fx.runtime.states import Entry

op = torch.ops.ssd_fx
CPU = torch.device("cpu")


def config_json(directory: object, engine: str = "posix", **more: object) -> str:
    """Without adaptation: the tests hold what they store, which the runtime would learn. Nothing is prefetched."""
    own = {"dirs": [str(directory)], "engine": engine, "allow_tmpfs": True, "adapt": False, "prefetch": 0}
    return json.dumps(own | more)


def begin(config: str, graph: str = "g", saved: int = 0, offloaded: int = 0) -> None:
    op.begin_(torch.empty(0, dtype=torch.int64), config, graph, saved, offloaded)


def store(x: Tensor, config: str, slot: int = 0, seq: int = 0, graph: str = "g", later: bool = False) -> Tensor:
    handle: Tensor = op.store(x, config, graph, slot, seq, later=later)
    return handle


def release(handle: Tensor, x: Tensor, seq: int = 1, hand_over: bool = True) -> None:
    op.wait_store_(handle, x, seq, hand_over)


def put(x: Tensor, config: str, **more: Any) -> Tensor:
    """The handle of a tensor that a forward stores, releases and drops. The caller has no name for it."""
    handle = store(x, config, **more)
    release(handle, x)
    return handle


class _Call(torch.autograd.Function):
    """A node of an autograd graph whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def in_backward(call: Callable[[], Tensor], retain_graph: bool) -> Tensor:
    """What `call` returns in a backward: the load op asks the running backward whether it keeps its graph."""
    results: list[Tensor] = []
    root = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        end = _Call.apply(root, lambda: results.append(call()))
    end.backward(retain_graph=retain_graph)
    return results[0]


def start_load(
    handle: Tensor, like: Tensor, consume: bool = True, seq: int = 0, relies_on: str = "dtype", donate: bool = True
) -> Tensor:
    """`consume`: in a backward that does not keep its graph."""

    def call() -> Tensor:
        device = lookup(handle).device
        y: Tensor = op.load(handle, like.shape, like.stride(), like.dtype, device, seq, False, relies_on, donate)
        return y

    return in_backward(call, retain_graph=not consume)


def wait(y: Tensor, handle: Tensor, seq: int = 1) -> Tensor:
    op.wait_load_(y, handle, seq)
    return y


def load(handle: Tensor, like: Tensor, consume: bool = True, relies_on: str = "dtype") -> Tensor:
    return wait(start_load(handle, like, consume, relies_on=relies_on), handle)


def move(transfer: Completion) -> None:
    """Starts a transfer of an engine, and waits for its end."""
    transfer.start()
    transfer.wait()


def until(reached: Callable[[], object]) -> None:
    """Raises AssertionError if it is not so within half a minute."""
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def directories(parent: Path, count: int) -> list[str]:
    """So many new directories."""
    made = [parent / name for name in "abcd"[:count]]
    for path in made:
        path.mkdir()
    return list(map(str, made))


def in_a_child(finds: Callable[[], bool]) -> bool:
    """What `finds` returns in the child of a fork, which ends behind it."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if finds() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def settle(handle: Tensor) -> Entry:
    """Waits until the write of `handle` is done; the next op will see it."""
    entry = lookup(handle)
    if entry.write is not None:
        entry.write.wait()
    return entry


def raw(x: Tensor) -> bytes:
    """The storage's bytes that a dense `x` spans, in memory order."""
    return ctypes.string_at(x.data_ptr(), x.numel() * x.itemsize)


def watch(x: Tensor) -> StorageWeakRef:
    """`.expired()` tells whether the memory of `x` is gone."""
    return StorageWeakRef(x.untyped_storage())


def between_locks(monkeypatch: Any, action: Callable[[], object]) -> threading.Thread:
    """Runs `action` in another thread when the lock over all entries is given back for the first time from here on.

    Who gave it back goes on when `action` has ended. Returns that thread.
    """
    thread = threading.Thread(target=action)
    inner = GUARD.lock

    class Lock:
        def __enter__(self) -> None:
            inner.acquire()

        def _is_owned(self) -> bool:
            return inner._is_owned()

        def __exit__(self, *_: object) -> None:
            inner.release()
            if GUARD.lock is not inner:
                monkeypatch.setattr(GUARD, "lock", inner)
                thread.start()
                thread.join()

    monkeypatch.setattr(GUARD, "lock", Lock())
    return thread


class CtrlC(KeyboardInterrupt):
    """One that a test planted, unlike that of the person who runs the tests."""


def interrupted(action: Callable[[], object], at: int) -> bool:
    """Runs `action` with a Ctrl-C at the `at`-th place of the runtime where Python may notice one.

    Those are entries into Python functions and returns from C functions; the ends of loops are left out. Returns
    whether there was such a place, and it must have come out. The garbage collector rests, lest one be thrown at it.
    """
    places, came = 0, False

    def look(frame: Any, event: str, _: object) -> None:
        nonlocal places
        if event in ("call", "c_return") and "/ssd_fx/runtime/" in frame.f_code.co_filename:
            places += 1
            if places == at:
                raise CtrlC

    gc.disable()
    sys.setprofile(look)
    try:
        action()
    except CtrlC:
        came = True
    finally:
        sys.setprofile(None)
        gc.enable()
    assert came == (places >= at), f"the Ctrl-C at place {at} vanished"
    return came


def everywhere() -> Iterator[tuple[int, Callable[[Callable[[], object]], None]]]:
    """The number of each place where a Ctrl-C may come, and `strike`, until one comes nowhere.

    The body of the loop calls `strike` once, with what is to be interrupted there: see `interrupted`.
    """
    came: list[bool] = [True]
    for at in itertools.count(1):
        if not came.pop():
            return
        yield at, lambda action, at=at: came.append(interrupted(action, at))  # type: ignore[misc]
