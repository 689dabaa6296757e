"""A store ends when no graph uses it and no handle can be loaded any more."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ssd_fx.runtime import deaths, entries, graphs
from ssd_fx.runtime import store as store_module
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines import posix
from ssd_fx.runtime.engines.extents import BackingFile
from ssd_fx.runtime.native import loader
from ssd_fx.runtime.stores import close_stores, end_unused, forward_begins, get_store, stores
from tests.runtime.harness import config_json, everywhere, load, raw, settle, store, until


def graph(config: str) -> Callable[[], None]:
    """What the backend returns for a graph that uses the store."""

    def call() -> None:
        return

    graphs.uses(call, config)
    return call


def has_ended(config: str) -> bool:
    entries.living()  # the deaths of handles first, which may be followed by that of their store
    graphs._GUARD.drain()
    return parse(config) not in stores


def test_it_ends_with_its_last_graph(tmp_path):
    config = config_json(tmp_path)
    first, second = graph(config), graph(config)
    get_store(config)
    del first
    assert not has_ended(config)
    del second
    assert has_ended(config)


def test_a_handle_keeps_it(tmp_path):
    config = config_json(tmp_path)
    only, x = graph(config), torch.randn(50_000)
    handle = store(x, config)
    settle(handle)
    del only
    assert not has_ended(config)
    assert raw(load(handle, x)) == raw(x)
    del handle
    assert has_ended(config)


def test_it_ends_though_a_ctrl_c_comes_when_the_last_handle_dies(tmp_path):
    config = config_json(tmp_path)
    for at, strike in everywhere():
        only, handles = graph(config), [store(torch.randn(8), config)]
        settle(handles[0])
        del only
        assert not has_ended(config)

        def die(handles=handles):
            handles.clear()
            entries.GUARD.drain()

        strike(die)
        assert has_ended(config), at


def test_a_graph_that_came_meanwhile_keeps_it(tmp_path):
    config = config_json(tmp_path)
    first = graph(config)
    handle = store(torch.randn(50_000), config)
    del first
    assert not has_ended(config)
    second = graph(config)
    assert get_store(config).when_left is None
    del handle
    assert not has_ended(config)
    del second
    assert has_ended(config)


def test_a_node_of_the_backward_begins_while_the_store_ends(monkeypatch):
    """Whoever ends the store takes the run from the entry just before the node has the lock."""
    entry = SimpleNamespace(run=SimpleNamespace(going=[(5, 0, None)]))

    @contextmanager
    def ended():
        entry.run = None
        yield

    monkeypatch.setattr(store_module, "GUARD", SimpleNamespace(lock=ended()))
    store_module.Store._let_go(None, entry, seq=3)


@pytest.mark.parametrize("lock", [entries.GUARD, graphs._GUARD], ids=["entries", "graphs"])
def test_close_in_a_signal_handler_that_interrupted_us(lock, tmp_path):
    """It would wait for a lock that its own thread has, and a job that is to end would hang."""
    config = config_json(tmp_path)
    get_store(config)
    with lock.lock:
        graphs.close()
        assert parse(config) in stores
    until(lambda: parse(config) not in stores)


def test_a_store_that_cannot_end_leaves_no_other_open(tmp_path, monkeypatch):
    """At the exit its I/O threads would go on while the memory goes."""
    configs = [config_json(tmp_path, checksums=sums) for sums in (True, False)]

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for broken in range(2):
        engines = [get_store(config).engine for config in configs]
        with monkeypatch.context() as patch:
            patch.setattr(engines[broken], "close", fail)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                close_stores()
        engines[broken].close()
        assert [engine._pool._closed for engine in engines] == [True, True]


def test_a_ctrl_c_while_a_store_is_made_leaves_nothing_open(tmp_path, monkeypatch):
    """Its threads and its file would stay until the process ends. Here the store has a tier in host memory, too."""
    monkeypatch.setattr(streams, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    config, pools, files = config_json(tmp_path, host_budget=1 << 20), [], []

    def noted(make, made):
        def call(*arguments):
            found = make(*arguments)
            made.append(found)
            return found

        return call

    monkeypatch.setattr(loader, "make_pool", noted(loader.make_pool, pools))
    monkeypatch.setattr(posix, "BackingFile", noted(BackingFile, files))
    get_store(config)  # the library is loaded but once
    close_stores()
    for at, strike in everywhere():
        strike(lambda: get_store(config))
        close_stores()
        assert all(pool._closed for pool in pools), at
        assert all(file.fd < 0 for file in files), at


@pytest.mark.parametrize(
    "end", [lambda _: close_stores(), lambda config: end_unused(config, print)], ids=["all", "unused"]
)
def test_a_ctrl_c_leaves_no_store_that_nobody_closes(tmp_path, monkeypatch, end):
    """It closes, or it stays in the table, where the next call finds it."""
    config, closed = config_json(tmp_path), []
    monkeypatch.setattr(store_module.Store, "close", lambda store: closed.append(store))
    for at, strike in everywhere():
        engine = get_store(config).engine
        strike(lambda: end(parse(config)))
        close_stores()
        assert [store.engine for store in closed] == [engine], at
        closed.pop().engine.close()


def test_others_go_on_while_engines_close(tmp_path, monkeypatch):
    """The last transfers of a slow drive may take seconds."""
    engine, went_on = get_store(config_json(tmp_path)).engine, []
    close = engine.close

    def closes() -> None:
        other = threading.Thread(target=forward_begins)
        other.start()
        other.join(5)
        went_on.append(not other.is_alive())
        close()

    monkeypatch.setattr(engine, "close", closes)
    close_stores()
    assert went_on == [True]


def test_a_ctrl_c_while_the_janitor_starts_leaves_it_to_the_next(monkeypatch):
    """Without one nothing follows up a death where no op runs."""
    started = []

    class Thread:
        def __init__(self, **_):
            return

        def start(self):
            started.append(self)
            if len(started) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(deaths, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(deaths, "_started", False)
    with pytest.raises(KeyboardInterrupt):
        deaths.janitor()
    for _ in range(2):
        deaths.janitor()
    assert len(started) == 2


def test_an_operator_in_a_signal_handler_that_interrupted_us(tmp_path):
    """The state is half changed there."""
    config = config_json(tmp_path)
    handle = store(torch.randn(50_000), config)
    for use in (entries.living, lambda: store(torch.randn(8), config), lambda: entries.lookup(handle)):
        with entries.GUARD.lock, pytest.raises(RuntimeError, match="has interrupted ssd_fx itself"):
            use()
