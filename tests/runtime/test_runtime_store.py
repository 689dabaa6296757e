"""Who holds the bytes when: forwarding, giving away, cancelling, and what the death of a handle frees."""

import threading
import time

import numpy as np
import pytest
import torch

from ssd_fx.runtime import entries, trace
from ssd_fx.runtime.engines import extents
from ssd_fx.runtime.engines.base import Copy
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.states import State
from ssd_fx.runtime.stats import reset_stats, slots, stats
from ssd_fx.runtime.stores import get_store
from tests import planned_order
from tests.runtime.engines import DelayedEngine, WritesOnDemand, around
from tests.runtime.harness import (
    CPU,
    begin,
    config_json,
    load,
    op,
    put,
    raw,
    release,
    settle,
    start_load,
    store,
    until,
    wait,
    watch,
)

N = 300_001


@pytest.fixture
def slow(tmp_path):
    """Writes start 0.3 to 0.5 s late: long enough for what tests do meanwhile, on a busy machine too."""
    return config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 0.3, 0.5)))


@pytest.fixture
def stuck(tmp_path):
    """Writes start after an hour."""
    return config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 3600, 3600)))


# ---- forwarding: store -> release -> load before the write is done


def test_consumed_load_is_the_stored_memory(stuck):
    x = torch.randn(N)
    expected, address = x.clone(), x.data_ptr()
    h = store(x, stuck)
    release(h, x)
    del x
    y = load(h, expected, consume=True)
    assert y.data_ptr() == address
    assert torch.equal(y, expected)
    assert lookup(h).state is State.DONATED
    s = stats()
    assert (s.forwarded_bytes, s.cancelled_bytes, s.written_bytes) == (4 * N, 4 * N, 0)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_load_has_the_strides_that_were_stored(config, stuck, on_disk):
    """Graph and tensor may disagree on the stride of a dimension of size 1, and cuDNN and MKL choose kernels by it."""
    x = torch.randn(1000, 8).as_strided((1000, 1, 8), (8, 1, 1))
    expected = x.clone()
    h = store(x, config if on_disk else stuck)
    release(h, x)
    del x
    if on_disk:
        settle(h)
    y = load(h, expected.as_strided((1000, 1, 8), (8, 8, 1)), consume=True)
    assert y.stride() == (8, 1, 1)
    assert torch.equal(y, expected)


def test_consumed_load_copies_while_somebody_else_holds_the_storage(stuck):
    """The caller keeps a hidden state: the backward may overwrite its load, and must not overwrite theirs."""
    x = torch.randn(N)
    expected = x.clone()
    view = x[5:]
    h = store(x, stuck)
    release(h, x)
    del x
    load(h, expected, consume=True).zero_()
    assert torch.equal(view, expected[5:])
    del view
    y = load(h, expected, consume=True)
    assert torch.equal(y, expected)
    assert lookup(h).state is State.DONATED


def an_array(_path):
    array = np.arange(N, dtype=np.float32)
    return torch.from_numpy(array), lambda: torch.from_numpy(array)


def a_mapped_file(path):
    np.arange(N, dtype=np.float32).tofile(path)

    def mapped():
        return torch.from_file(str(path), shared=True, size=N)

    return mapped(), mapped


def shared_memory(_path):
    x = torch.arange(N, dtype=torch.float32).share_memory_()
    name, *rest = x.untyped_storage()._share_filename_cpu_()

    def again():
        return torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(name, *rest), 0, (N,), (1,))

    return x, again


@pytest.mark.parametrize("foreign", [an_array, a_mapped_file, shared_memory])
def test_memory_that_is_not_torch_s_is_not_given_away(stuck, foreign, tmp_path):
    """The backward would write its gradients into the caller's array, or into the data on disk."""
    x, look = foreign(tmp_path / "data")
    expected = x.clone()
    h = store(x, stuck)
    release(h, x)
    del x
    y = load(h, expected, consume=True)
    assert torch.equal(y, expected)
    y.zero_()
    assert torch.equal(look(), expected)


@pytest.mark.parametrize("moved", ["before it reads", "while it waits for its end", "and loaded at once"])
def test_a_storage_that_is_given_other_memory_while_it_is_written(moved, tmp_path):
    """`share_memory_` frees the memory that the write will read, and the next tensor gets it. No version moves."""
    CPU_ALLOCATOR.install()
    made: list[WritesOnDemand] = []

    def wrap(inner):
        made.append(WritesOnDemand(inner))
        return made[-1]

    engine = around(wrap)
    x = torch.arange(N, dtype=torch.float32)
    expected = x.clone()
    h = store(x, config_json(tmp_path, engine))
    release(h, x)
    if moved == "while it waits for its end":
        made[0].go()
    before = x.data_ptr()
    x.share_memory_()
    others = [torch.full((N,), 7.0) for _ in range(8)]
    assert before in [other.data_ptr() for other in others]
    if moved != "and loaded at once":
        made[0].go()
        settle(h)
    assert torch.equal(load(h, expected), expected)
    assert torch.equal(x, expected)
    assert made[0].refused == [], "the drive is not to blame"


def test_a_copy_that_two_interrupts_ended_is_not_made(tmp_path, monkeypatch):
    """The first comes before the bytes are copied, the second where the copy would be cancelled."""

    def interrupted(_):
        raise KeyboardInterrupt

    config = config_json(tmp_path, "memory", budget=4 * N)
    x = torch.arange(N, dtype=torch.float32)
    expected = x.clone()
    h = store(x, config)
    release(h, x)
    with monkeypatch.context() as patched:
        patched.setattr(Copy, "start", interrupted)
        patched.setattr(Copy, "cancel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store(torch.ones(N), config, slot=1)  # so the first is to be written
    del x
    assert torch.equal(load(h, expected), expected)


def test_consumed_load_before_the_release_copies(stuck):
    x = torch.randn(N)
    h = store(x, stuck)
    y = load(h, x, consume=True)
    assert y.data_ptr() != x.data_ptr()
    assert torch.equal(y, x)
    release(h, x)


def test_second_load_of_a_given_tensor(stuck):
    h, like = put(torch.randn(N), stuck, slot=9), torch.empty(N)
    load(h, like, consume=True)
    with pytest.raises(RuntimeError, match=r"slot 9 of graph 'g'.*did not keep the graph.*retain_graph=True"):
        start_load(h, like)


def test_unconsumed_loads_copy_and_the_write_goes_on(slow):
    expected = torch.randn(N)
    h = put(expected.clone(), slow)
    for _ in range(3):
        y = load(h, expected, consume=False)
        assert torch.equal(y, expected)
        y.zero_()
    assert lookup(h).state.where == "memory"
    settle(h)
    assert torch.equal(load(h, expected, consume=False), expected)
    assert lookup(h).state is State.ON_DISK
    assert stats().written_bytes == 4 * N


def written(config, monkeypatch):
    """The handle of a tensor whose write is done, its entry, and what was written; nothing else holds the tensor.

    For the writer the write goes on: it does not look before the test's end. So it is when a write ends just behind
    its look.
    """
    monkeypatch.setattr(get_store(config).writer, "reap", lambda: None)
    x = torch.randn(N)
    expected = x.clone()
    h = store(x, config)
    release(h, x)
    entry = lookup(h)
    entry.write.wait()
    return h, entry, expected


def test_given_after_the_write_was_done_stays_on_disk(config, monkeypatch):
    """The race: the write ends between the look and the cancel. Then a second load reads it."""
    h, entry, expected = written(config, monkeypatch)
    with entries.GUARD.lock:  # the write is done and not reaped
        entry.store.writer.cancel(entry)
    assert entry.state is State.ON_DISK
    assert torch.equal(load(h, expected), expected)


def test_given_although_its_write_was_done(config, monkeypatch):
    """The same race in a load: the tensor is given away, can be read again, and its write was no waste."""
    h, entry, expected = written(config, monkeypatch)
    given = load(h, expected)
    assert entry.state is State.ON_DISK
    assert torch.equal(given, expected)
    given.zero_()
    assert torch.equal(load(h, expected), expected)
    del h, entry
    assert entries.living() == []
    assert stats().wasted_bytes == 0


@pytest.mark.parametrize("relies_on", ["strides", "dtype", "address"])
def test_forwarded_view_of_a_larger_storage(stuck, relies_on):
    """Views are rebuilt by their places in the storage, so it must begin there. Inductor's code takes any offset."""
    base = torch.randn(2 * N)
    x = base[100 : 100 + N]
    expected = x.clone()
    h = store(x, stuck)
    release(h, x)
    address = x.data_ptr()
    del x, base
    y = load(h, expected, consume=True, relies_on=relies_on)
    assert torch.equal(y, expected)
    assert y.data_ptr() == address if relies_on == "address" else y.storage_offset() == 0


# ---- the release


def test_release_without_hand_over_waits(slow):
    x = torch.randn(N)
    expected = x.clone()
    h = store(x, slow)
    release(h, x, hand_over=False)
    x.fill_(7)
    assert lookup(h).state is State.ON_DISK
    assert stats().stall_s > 0.03
    assert torch.equal(load(h, expected), expected)
    waits = slots()["g"][0]
    assert waits.write_stall_s > 0.03
    assert waits.write_stall_s + waits.read_stall_s == pytest.approx(stats().stall_s)


def test_release_with_hand_over_returns_at_once(tmp_path):
    x = torch.randn(N)
    late = around(lambda inner: DelayedEngine(inner, 20, 20))  # who waits fails, and does not hang
    h = store(x, config_json(tmp_path, late))
    release(h, x, hand_over=True)
    assert lookup(h).state.where == "memory"
    assert lookup(h).write is not None


def test_release_of_another_buffer(config):
    x = torch.randn(N)
    h = store(x, config, slot=2)
    with pytest.raises(RuntimeError, match=r"slot 2 of graph 'g'.*another buffer"):
        release(h, x.clone())


# ---- loads


def test_several_loads_before_their_waits(config):
    x = torch.randn(N)
    h = store(x, config)
    settle(h)
    ys = [start_load(h, x, consume=False) for _ in range(4)]
    for y in (ys[2], ys[0], ys[3], ys[1]):
        assert torch.equal(wait(y, h), x)
    assert len({y.data_ptr() for y in ys}) == 4


def test_wait_for_a_tensor_that_was_not_loaded(config):
    x = torch.randn(N)
    h = store(x, config, slot=5)
    settle(h)
    y = start_load(h, x)
    with pytest.raises(RuntimeError, match=r"slot 5 of graph 'g'.*no load of it returned"):
        wait(torch.empty(N), h)
    wait(y, h)
    with pytest.raises(RuntimeError, match="waited for already"):
        wait(y, h)


def test_load_that_nobody_waits_for(config):
    """An exception between load and wait: the read ends before its memory goes."""
    x = torch.randn(10 * N)
    h = store(x, config)
    settle(h)
    start_load(h, x)
    del h
    assert entries.living() == []


# ---- handles


def test_death_of_a_handle_frees_extent_and_memory(config):
    offsets = []
    for _ in range(3):
        x = torch.randn(N)
        h = store(x, config)
        offsets.append(settle(h).extent.offset)
        release(h, x)
        view = h[:1]
        del h
        assert len(entries.living()) == 1  # a view keeps the storage
        del view
        assert entries.living() == []
    assert len(set(offsets)) == 1


def test_death_of_a_handle_while_its_write_waits(stuck):
    """Forward without backward: the write is cancelled and the memory is free at once."""
    x = torch.randn(N)
    alive = watch(x)
    h = store(x, stuck)
    release(h, x)
    del x
    assert not alive.expired()
    del h
    until(alive.expired)  # without any op: the janitor does it
    assert stats().cancelled_bytes == 4 * N


def test_forward_without_backward_many_times(config):
    for _ in range(20):
        handles = [store(torch.randn(N), config, slot=i) for i in range(4)]
        del handles
    assert entries.living() == []
    assert stats().disk_bytes == extents.STEP


def test_the_dead_are_watched_no_longer(config):
    """Two weakrefs watch each handle, and go with it: a training stores millions of tensors."""
    watchers = entries.GUARD._watchers
    entries.GUARD.drain()
    before = len(watchers)
    handles = [store(torch.randn(N), config) for _ in range(3)]
    assert len(watchers) == before + 3
    handles.clear()
    assert entries.living() == []
    assert len(watchers) == before


def test_dead_handle(config):
    h = store(torch.randn(N), config)
    copy = h.clone()
    del h
    with pytest.raises(RuntimeError, match=r"saved_tensors_hooks.*storage died"):
        op.load(copy, [N], [1], torch.float32, CPU, 0)


def test_handle_dies_inside_a_critical_section(config):
    """What the garbage collector may do at any allocation: the release waits until the lock is free."""
    h = store(torch.randn(N), config)
    settle(h)
    with entries.GUARD.lock:
        del h
        assert len(entries._entries) == 1
    assert entries.living() == []


def test_handle_dies_in_another_thread_that_holds_the_lock(config):
    x = torch.randn(N)
    handles = [store(x, config)]
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with entries.GUARD.lock:
            held.set()
            let_go.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    handles.clear()  # must not block
    assert len(entries._entries) == 1
    let_go.set()
    thread.join()
    del x
    store(torch.randn(3), config)
    assert entries.living() == []


# ---- the cap on bytes in flight


def test_cap_blocks_until_there_is_room(tmp_path):
    config = config_json(tmp_path, around(DelayedEngine), inflight=2 * 4 * N)
    handles = [store(torch.full((N,), float(i)), config, slot=i) for i in range(6)]
    most = get_store(config).ledger.writing_bytes
    assert most <= 2 * 4 * N
    assert stats().stall_s > 0.05
    for i, h in enumerate(handles):
        assert torch.equal(load(h, torch.empty(N)), torch.full((N,), float(i)))


def test_one_tensor_larger_than_the_cap_goes_through(tmp_path):
    config = config_json(tmp_path, around(DelayedEngine), inflight=100)
    started = time.perf_counter()
    x = torch.randn(N)
    h = store(x, config)
    h2 = store(x, config)
    assert time.perf_counter() - started > 0.04
    assert torch.equal(load(h, x), x)
    assert torch.equal(load(h2, x), x)


# ---- whole steps


def test_random_completion_order_over_many_steps(tmp_path):
    """Buffers are overwritten as soon as the release returned; what comes back is what was stored."""
    config = config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 0.0, 0.02)), inflight=8 * 4 * N)
    buffers = [torch.empty(N + i) for i in range(4)]
    for step in range(6):
        begin(config)
        kept = []
        for i in range(12):
            x = buffers[i % 4]
            x.fill_(100.0 * step + i)
            h = store(x, config, slot=i, seq=2 * i)
            release(h, x, seq=2 * i + 1, hand_over=False)
            kept.append((h, x.shape[0], 100.0 * step + i))
        for seq, (h, n, value) in enumerate(reversed(kept)):
            y = start_load(h, torch.empty(n), seq=2 * seq)
            assert (wait(y, h, seq=2 * seq + 1) == value).all()
        del kept, h
    s = stats()
    assert (s.steps, s.stores, s.loads) == (6, 72, 72)
    planned_order.assert_in_planned_order()
    assert entries.living() == []


def test_two_threads_hammer_one_store(config):
    errors = []

    def train(seed):
        try:
            for step in range(25):
                xs = [torch.full((70_000 + 1000 * i,), float(seed * 1000 + step * 10 + i)) for i in range(5)]
                expected = [x[0].item() for x in xs]
                handles = [store(x, config, slot=i, graph=f"g{seed}") for i, x in enumerate(xs)]
                like = [torch.empty_like(x) for x in xs]
                for h, x in zip(handles, xs, strict=True):
                    release(h, x)
                del xs, x
                loads = [start_load(h, y) for h, y in zip(handles, like, strict=True)]
                for h, y, value in zip(handles, loads, expected, strict=True):
                    assert (wait(y, h) == value).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert stats().loads == 3 * 25 * 5
    assert entries.living() == []
    assert get_store(config).ledger.writing_bytes == 0


# ---- what is reported


def test_freed_bytes_are_those_that_nobody_else_keeps(config):
    kept, dropped = torch.randn(N), torch.randn(2 * N)
    h1, h2 = store(kept, config), store(dropped, config)
    settle(h1), settle(h2)
    like = torch.empty(2 * N)
    del dropped
    load(h1, kept, consume=False), load(h2, like, consume=False)
    load(h2, like, consume=False)  # counted once
    assert stats().freed_bytes == 8 * N
    h3 = store(torch.randn(5 * N), config)
    settle(h3)
    del h3
    assert len(entries.living()) == 2
    assert stats().freed_bytes == 8 * N + 20 * N


def test_counts_per_graph(config):
    begin(config, "a", saved=100, offloaded=60)
    begin(config, "a", saved=100, offloaded=60)
    begin(config, "b", saved=7, offloaded=0)
    x = torch.randn(N)
    h = store(x, config, graph="b")
    settle(h)
    load(h, x)
    s = stats()
    assert (s.saved_bytes, s.offloaded_bytes, s.steps) == (207, 120, 1)
    assert (s.graphs["a"].steps, s.graphs["b"].steps) == (2, 1)
    assert (s.graphs["b"].read_bytes, s.graphs["b"].written_bytes) == (4 * N, 4 * N)
    assert s.graphs["a"].stores == 0
    assert s.disk_bytes == extents.STEP
    reset_stats()
    assert stats().stores == 0
    assert stats().graphs == {}


@pytest.mark.parametrize(
    ("forward", "backward", "share"),
    [((0, 1, 2, 3), (0, 1, 2, 3), 1.0), ((0, 2, 1, 3), (4, 5, 6, 7), 7 / 8), ((3, 2, 1, 0), (0, 3, 2, 1), 3 / 8)],
)
def test_planned_order(forward, backward, share):
    """Every run is judged by itself: begin starts a forward, the lowest seq a backward."""
    run = [("begin", -1), *(("store", seq) for seq in forward), *(("load", seq) for seq in backward)]
    assert planned_order.share(("g", kind, seq) for kind, seq in 3 * run) == share


def test_trace(config):
    begin(config, offloaded=5)
    x = torch.randn(N)
    h = store(x, config, slot=3, seq=4)
    settle(h)
    release(h, x, seq=5)
    y = start_load(h, x, seq=6)
    wait(y, h, seq=7)
    events = trace.events()
    assert [(e.kind, e.slot, e.seq, e.nbytes, e.where) for e in events] == [
        ("begin", -1, -1, 5, "none"),
        ("store", 3, 4, 4 * N, "disk"),
        ("write", 3, 4, 4 * N, "ok"),
        ("release", 3, 5, 4 * N, "disk"),
        ("load", 3, 6, 4 * N, "disk"),
        ("read", 3, 6, 4 * N, "ok"),
        ("wait", 3, 7, 4 * N, "disk"),
    ]
    assert all(e.graph == "g" and e.started <= e.ended for e in events)
    assert {e.engine for e in events[1:]} == {"posix"}
    times = {e.kind: e for e in events}
    assert times["store"].started <= times["write"].started <= times["release"].ended  # one clock
    assert raw(y) == raw(x)
