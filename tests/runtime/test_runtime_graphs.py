"""A store ends when no graph uses it and no handle can be loaded any more."""

from collections.abc import Callable

import torch

from ssd_fx.runtime import entries, graphs
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.store import _stores, get_store
from tests.runtime.harness import config_json, load, raw, settle, store


def graph(config: str) -> Callable[[], None]:
    """What the backend returns for a graph that uses the store."""

    def call() -> None:
        return

    graphs.uses(call, config)
    return call


def has_ended(config: str) -> bool:
    entries.living()  # the deaths of handles first, which may be followed by that of their store
    graphs._GUARD.drain()
    return parse(config) not in _stores


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


def test_a_graph_that_came_meanwhile_keeps_it(tmp_path):
    config = config_json(tmp_path)
    first = graph(config)
    handle = store(torch.randn(50_000), config)
    del first
    assert not has_ended(config)
    second = graph(config)
    del handle
    assert not has_ended(config)
    del second
    assert has_ended(config)
