"""What the store learns from step to step, and what it does across graphs."""

import logging

import pytest
import torch

from ssd_fx.runtime import entries
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.memory.gauge import CpuGauge
from ssd_fx.runtime.stats import reset_stats, stats
from ssd_fx.runtime.stores import close_stores, get_store
from tests.runtime.engines import DelayedEngine, LateWrite, Wrapped, around
from tests.runtime.harness import (
    begin,
    between_locks,
    config_json,
    everywhere,
    load,
    op,
    put,
    raw,
    release,
    settle,
    start_load,
    store,
    wait,
    watch,
)

pytestmark = pytest.mark.usefixtures("no_device")
N = 50_000
B = 4 * N
FEW = 100  # elements, for a test that makes many steps


def where(handles):
    for h in handles:
        settle(h)
    store_of = lookup(handles[0]).store
    store_of.writer.reap()
    return "".join("m" if lookup(h).state.where == "memory" else "d" for h in handles)


# --- resident in memory --------------------------------------------------------------------------------------------


def test_the_oldest_move_on_when_the_room_is_full(tmp_path):
    config = config_json(tmp_path, host_budget=2 * B)
    xs = [torch.randn(N) for _ in range(5)]
    handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
    for h, x in zip(handles, xs, strict=True):
        release(h, x)
    assert where(handles) == "dddmm"
    for h, x in reversed(list(zip(handles, xs, strict=True))):
        assert raw(load(h, x)) == raw(x)
    assert stats().written_bytes == 3 * B
    assert stats().forwarded_bytes == 2 * B


@pytest.mark.parametrize("room", ["host_budget", "budget"])
def test_what_is_bound_to_leave_takes_no_room(tmp_path, room):
    """Not while the others have not filled it either, and in the second step they have all of it still."""
    config = config_json(tmp_path, **{room: 3 * B})
    for _ in range(2):
        xs = [torch.randn(N) for _ in range(5)]
        handles = [op.store(x, config, "g", i, i, "", i in (1, 3)) for i, x in enumerate(xs)]
        for h, x in zip(handles, xs, strict=True):
            release(h, x)
        assert where(handles) == "mdmdm"
        for h, x in reversed(list(zip(handles, xs, strict=True))):
            assert raw(load(h, x)) == raw(x)
        del h, handles
    assert stats().written_bytes == 4 * B


def test_what_is_written_later_takes_room_of_the_budget(tmp_path):
    """It is among the last of its forward, which the budget keeps. The others leave as if it had rested."""
    config = config_json(tmp_path, host_budget=3 * B)
    handles = []
    for i in range(6):
        x = torch.randn(N)
        handles.append(store(x, config, slot=i, later=i in (3, 4)))
        release(handles[-1], x)
    assert where(handles) == "dddmmm"
    begin(config, offloaded=B)
    assert where(handles) == "dddmmm"
    handles.append(store(torch.randn(N), config, slot=6))
    assert where(handles) == "ddddmmm"


@pytest.mark.parametrize("another", [{}, {"checksums": False}], ids=["same options", "other options"])
def test_the_next_forward_writes_what_the_budget_does_not_keep(tmp_path, another):
    config = config_json(tmp_path)
    begin(config, offloaded=B)
    xs = [torch.randn(N) for _ in range(3)]
    handles = [store(x, config, slot=i, later=True) for i, x in enumerate(xs)]
    assert where(handles) == "mmm"
    begin(config_json(tmp_path, **another), offloaded=B)
    assert where(handles) == "ddd"
    for h, x in zip(handles, xs, strict=True):
        assert raw(load(h, x)) == raw(x)


def test_a_forward_that_finds_no_room_in_flight_does_not_wait(tmp_path):
    """The next ones begin the other writes."""
    config = config_json(tmp_path, inflight=B)
    xs = [torch.randn(N) for _ in range(3)]
    handles = [store(x, config, slot=i, later=True) for i, x in enumerate(xs)]
    for on_disk in ("dmm", "ddm", "ddd"):
        begin(config, offloaded=B)
        assert where(handles) == on_disk
    for h, x in zip(handles, xs, strict=True):
        assert raw(load(h, x)) == raw(x)


def test_a_forward_that_stores_nothing_writes_what_others_left(tmp_path):
    """A graph may keep all its tensors, or have a budget of 1. Its forward needs the memory all the same."""
    config = config_json(tmp_path)
    begin(config, offloaded=B)
    handles = [store(torch.randn(N), config, slot=i, later=True) for i in range(3)]
    assert where(handles) == "mmm"
    begin(config, graph="keeps", saved=B, offloaded=0)
    assert where(handles) == "ddd"


def test_stores_with_other_options_go_on_with_what_found_no_room(tmp_path):
    """Only they follow until the backward. The step would keep what the budget has no room for."""
    config = config_json(tmp_path, inflight=B)
    handles = [store(torch.randn(N), config, slot=i, later=True) for i in range(4)]
    other = config_json(tmp_path, checksums=False)
    begin(other, offloaded=B)
    assert where(handles) == "dmmm"
    others = [settle_one(store(torch.randn(N), other, slot=i), handles) for i in range(4)]
    assert where(handles) == "dddd"
    assert where(others) == "dddd"


def settle_one(handle, before):
    """`handle`, when what is being written of those `before` has been."""
    for h in before:
        settle(h)
    return handle


def test_what_loses_something_is_written_at_once(tmp_path):
    """Else a lossy codec would lose something or nothing, as another thread's forward comes or does not."""
    config = config_json(tmp_path, compression={"ssd": "fp8"})
    x = torch.randn(N)
    h = store(x, config, later=True)
    assert where([h]) == "d"
    assert raw(load(h, x)) != raw(x)


@pytest.mark.parametrize("codec", ["bitpack", "fp8"])
def test_what_loses_nothing_is_encoded_later_too(tmp_path, codec):
    config = config_json(tmp_path, compression={"ssd": codec})
    x = torch.arange(N) % 100
    h = store(x, config, later=True)
    assert where([h]) == "m"
    begin(config, offloaded=B)
    assert where([h]) == "d"
    assert lookup(h).encoded
    assert raw(load(h, x)) == raw(x)


def test_a_forward_that_ctrl_c_ends_leaves_all_to_be_loaded(tmp_path):
    config = config_json(tmp_path)
    begin(config, offloaded=B)
    for at, strike in everywhere():
        xs = [torch.randn(N) for _ in range(2)]
        handles = [store(x, config, slot=i, later=True) for i, x in enumerate(xs)]
        strike(lambda: begin(config, offloaded=B))
        for h, x in zip(handles, xs, strict=True):
            assert raw(load(h, x)) == raw(x), at
        del h, handles
    assert at > 10
    assert get_store(config).ledger.resident_bytes == 0


def test_the_second_step_writes_at_once_what_will_not_fit(tmp_path):
    """It knows how much comes: the first tensors are written when they are stored, not when the room is full."""
    config = config_json(tmp_path, host_budget=2 * B)
    for step in range(2):
        handles = []
        for i in range(5):
            x = torch.randn(N)
            handles.append(store(x, config, slot=i))
            release(handles[-1], x)
            if step:
                assert where(handles) == "dddmm"[: i + 1]
        for h in reversed(handles):
            load(h, x)
        del h, handles


def test_the_peak_of_a_step_is_that_of_all_its_micro_batches(tmp_path):
    """Three tensors are outstanding, then two, then four. The four are forecast, once the step is over."""
    config = config_json(tmp_path, host_budget=10 * B)
    outstanding = get_store(config).peak
    x = torch.randn(N)
    handles = [store(x, config, slot=i) for i in range(3)]
    load(handles[2], x)
    handles += [store(x, config, slot=i) for i in (3, 4)]
    assert outstanding.peak_bytes == 0
    for h in handles:
        load(h, x)
    handles = [store(x, config)]
    assert outstanding.peak_bytes == 4 * B


@pytest.mark.parametrize("later", [False, True])
def test_a_resident_tensor_dies_without_a_trace(tmp_path, later):
    config = config_json(tmp_path, host_budget=0 if later else 2 * B)
    x = torch.randn(N)
    h = store(x, config, later=later)
    gone = watch(x)
    del x, h
    assert entries.living() == []
    assert gone.expired()
    assert get_store(config).ledger.resident_bytes == get_store(config).peak.nbytes == 0


def test_release_without_hand_over_of_a_resident_tensor(tmp_path):
    """The owner will overwrite its memory: the bytes are put aside."""
    config = config_json(tmp_path, host_budget=2 * B)
    x = torch.randn(N)
    expected = x.clone()
    h = store(x, config)
    release(h, x, hand_over=False)
    x.zero_()
    assert raw(load(h, expected)) == raw(expected)


def test_a_write_that_begins_within_a_release_reads_no_memory_of_the_caller(tmp_path, monkeypatch):
    """Another thread stores meanwhile, so what was resident is written, late: its owner has overwritten it by then."""
    config = config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 0.2, 0.2)), host_budget=B)
    x = torch.randn(N)
    expected = x.clone()
    h = store(x, config)
    others = []
    in_a_thread = between_locks(monkeypatch, lambda: others.append(store(torch.randn(N), config, slot=1)))
    release(h, x, hand_over=False)
    in_a_thread.join()
    x.zero_()
    assert lookup(h).write, "it was pushed out"
    assert where([h]) == "d", "a write that read the memory of the caller would count as failed"
    assert raw(load(h, expected)) == raw(expected)


# --- what frees nothing --------------------------------------------------------------------------------------------


def test_a_tensor_that_others_hold_is_written_twice_and_then_no_more(tmp_path, caplog):
    config = config_json(tmp_path, adapt=True)
    held = torch.randn(N)
    with caplog.at_level(logging.INFO, "ssd_fx"):
        for _ in range(5):
            h, g = store(held, config, slot=0), store(torch.randn(N), config, slot=1)
            assert where([g]) == "d"
            assert raw(load(h, held)) == raw(held)
            load(g, held)
            del h, g
    assert stats().wasted_bytes == 2 * B
    assert stats().held_bytes == 3 * B
    assert stats().freed_bytes == 5 * B
    [message] = [message for message in caplog.messages if "new file" not in message]
    assert message.startswith(f"slot 0 of graph 'g' ({B} B) is no longer written")


def test_one_waste_now_and_then_is_no_habit(tmp_path):
    """A tensor that is held in every other step is written in all of them."""
    config = config_json(tmp_path, adapt=True)
    held = torch.randn(N)
    for _ in range(3):
        for shared in (True, False):
            h = put(held if shared else torch.randn(N), config)
            where([h])
            load(h, held)
    assert stats().wasted_bytes == stats().freed_bytes == 3 * B
    assert stats().held_bytes == 0


def test_writing_starts_again_when_nobody_holds_it(tmp_path):
    config = config_json(tmp_path, adapt=True)
    held = torch.randn(N)
    for _ in range(3):
        h = store(held, config)
        where([h])
        load(h, held)
    del held
    reset_stats()
    for _ in range(3):
        h = put(torch.randn(N), config)
        where([h])
        load(h, torch.empty(N))
    assert stats().held_bytes == B  # one step to notice
    assert stats().freed_bytes == 2 * B


@pytest.mark.parametrize("size", [N, 2 * N], ids=["the parameter", "a view of it"])
def test_a_parameter_is_never_written(tmp_path, size):
    """Its owner holds it in any case. FSDP1 frees a flat one, of which views are stored, behind the forward, while a
    write would still read it."""
    x = torch.nn.Parameter(torch.randn(size))
    x = x[:N] if size > N else x
    h = store(x, config_json(tmp_path))
    assert lookup(h).write is None
    assert raw(load(h, x)) == raw(x)
    assert stats().held_bytes == B


def test_a_leaf_is_not_copied_at_its_release(tmp_path):
    """Its owner may change it through `.data`, and PyTorch's backward then computes with the new value."""
    config = config_json(tmp_path)
    x = torch.randn(N, requires_grad=True)
    h = store(x, config)
    release(h, x, hand_over=False)
    assert lookup(h).held.untyped_storage()._cdata == x.untyped_storage()._cdata
    x.data.mul_(2)
    assert raw(load(h, x)) == raw(x)


# --- changed in place -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [True, False])
def test_changed_in_place(tmp_path, done):
    """What eager would raise, whether the write was done or not: an error that depends on timing helps nobody."""
    config = config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 0.2, 0.2)))
    x = torch.randn(N).view(100, 500)
    h = store(x, config)
    if done:
        where([h])
    x.add_(1)
    message = r"modified by an inplace operation: \[torch.FloatTensor \[100, 500\]\].* version 1; expected version 0"
    with pytest.raises(RuntimeError, match=message):
        load(h, x)


# --- reads ahead ----------------------------------------------------------------------------------------------------


class Steps:
    """Blocks of three tensors each, compiled as a graph per block; the backward of each asks for all at once."""

    def __init__(self, config, blocks=3, size=N):
        self.config, self.blocks, self.size = config, blocks, size

    def forward(self):
        runs = []
        for block in range(self.blocks):
            begin(self.config, f"block{block}", 3 * 4 * self.size, 3 * 4 * self.size)
            handles = []
            for slot in range(3):
                x = torch.full((self.size,), float(10 * block + slot))
                handles.append(store(x, self.config, slot, slot, f"block{block}"))
                release(handles[-1], x)
            runs.append(handles)
        where([h for handles in runs for h in handles])
        return runs

    def backward(self, runs, order):
        """The slots that had been read ahead when their block's backward began."""
        ahead = []
        for block in order:
            handles = runs[block]
            ahead.append([slot for slot in range(3) if lookup(handles[slot]).ahead])
            like = torch.empty(self.size)
            ys = [start_load(h, like, seq=i) for i, h in enumerate(handles)]
            for slot, (y, h) in enumerate(zip(ys, handles, strict=True)):
                assert (wait(y, h) == 10 * block + slot).all()
        return ahead


def test_the_next_graph_is_read_ahead_in_reverse_order(tmp_path):
    steps = Steps(config_json(tmp_path, prefetch=1 << 30))
    assert steps.backward(steps.forward(), [2, 1, 0]) == [[], [0, 1, 2], [0, 1, 2]]
    assert stats().prefetched_bytes == 6 * B
    assert stats().read_bytes == 9 * B


def test_the_second_step_follows_the_order_of_the_first(tmp_path):
    """First in first out, as a pipeline does: guessed wrong once, then known."""
    steps = Steps(config_json(tmp_path, prefetch=1 << 30))
    first = steps.backward(steps.forward(), [0, 1, 2])
    assert first == [[], [], [0, 1, 2]]  # block 2 was guessed twice
    assert steps.backward(steps.forward(), [0, 1, 2]) == [[], [0, 1, 2], [0, 1, 2]]


def test_reads_ahead_stay_within_the_window(tmp_path):
    """At most `prefetch` bytes are read and not waited for; in the order of the last backward."""
    config = config_json(tmp_path, prefetch=2 * B)
    steps = Steps(config)
    ledger = get_store(config).ledger
    for _ in range(2):
        ahead = steps.backward(steps.forward(), [2, 1, 0])
        assert ledger.reading_bytes == 0
    assert ahead == [[], [0, 1], [0, 1]]


def test_reads_ahead_stay_within_a_budget_in_bytes(tmp_path):
    """They are saved tensors in memory, as those are that stay there until the last block asks for them."""
    for budget, ahead in ((3 * B, [0, 1, 2]), (2 * B, [1, 2])):  # the first step: in reverse order of the stores
        steps = Steps(config_json(tmp_path, prefetch=1 << 30, budget=budget), blocks=2)
        assert steps.backward(steps.forward(), [1, 0]) == [[], ahead]


def test_a_window_of_nothing_reads_nothing_ahead(tmp_path):
    steps = Steps(config_json(tmp_path, prefetch=0))
    assert steps.backward(steps.forward(), [2, 1, 0]) == [[], [], []]
    assert stats().prefetched_bytes == 0


def test_a_graph_that_dies_ends_its_reads(tmp_path):
    """Read ahead, and the backward never comes: extents, memory and the window are free again."""
    config = config_json(tmp_path, prefetch=1 << 30)
    steps = Steps(config, blocks=2)
    runs = steps.forward()
    steps.backward(runs, [1])
    assert lookup(runs[0][0]).ahead
    del runs
    assert entries.living() == []
    assert get_store(config).ledger.reading_bytes == 0
    assert steps.backward(steps.forward(), [1, 0]) == [[], [0, 1, 2]]


def test_a_slot_that_was_waited_for_is_read_earlier(tmp_path):
    config = config_json(tmp_path, prefetch=1 << 30, adapt=True)
    like = torch.empty(N)
    for step in range(4):
        begin(config, "g", 2 * B, 2 * B)
        handles = []
        for slot in range(2):
            x = torch.randn(N)
            handles.append(store(x, config, slot, slot))
            release(handles[-1], x)
            del x
        where(handles)
        first = start_load(handles[0], like)
        assert bool(lookup(handles[1]).ahead) == (step >= 1)
        wait(first, handles[0])
        wait(start_load(handles[1], like), handles[1])
        for _ in range(3):  # as if it had come half a second late in the last steps
            lookup(handles[1]).store.habits.waited("g", 1, 0.5)
        del handles


def test_a_late_slot_is_read_two_places_early(tmp_path):
    """It is the third that the backward asks for, and is read when the first one is."""
    config = config_json(tmp_path, prefetch=1 << 30, adapt=True)
    steps = Steps(config, blocks=1)
    like = torch.empty(N)
    [handles] = steps.forward()
    for h in handles:
        wait(start_load(h, like), h)
    for _ in range(3):  # as if it had come half a second late in the last steps
        get_store(config).habits.waited("block0", 2, 0.5)
    [handles] = steps.forward()
    first = start_load(handles[0], like)
    assert [bool(lookup(h).ahead) for h in handles] == [False, False, True]
    wait(first, handles[0])


def test_an_entry_larger_than_the_window_is_read_alone(tmp_path):
    steps = Steps(config_json(tmp_path, prefetch=B // 2), blocks=2)
    assert steps.backward(steps.forward(), [1, 0]) == [[], [2]]  # the first step: in reverse order of the stores


def test_a_graph_that_never_ends_does_not_stop_the_learning(tmp_path, monkeypatch):
    """A caller may keep one for ever, as stored predictions do."""
    monkeypatch.setattr("ssd_fx.runtime.adapt.runs.OLD", 64)
    config = config_json(tmp_path, prefetch=1 << 30, host_budget=4 * FEW)
    steps = Steps(config, blocks=3, size=FEW)
    kept = steps.forward()
    for _ in range(60):
        steps.backward(steps.forward(), [0, 1, 2])
    found = get_store(config).runs
    assert len(found._runs) <= 3
    assert len(found._order) <= 3 * 64
    assert get_store(config).ledger.reading_bytes == 0
    assert get_store(config).peak.peak_bytes > 0
    assert (load(kept[0][0], torch.empty(FEW), consume=False) == 0).all()


def test_steps_that_overlap_are_not_remembered_for_ever(tmp_path, monkeypatch):
    """Each forward begins before the backward before it ends, as where a batch is prepared ahead. So no step ends."""
    monkeypatch.setattr("ssd_fx.runtime.adapt.runs.OLD", 8)
    config = config_json(tmp_path)
    steps = Steps(config, blocks=1)
    last = steps.forward()
    for _ in range(20):
        last, before = steps.forward(), last
        steps.backward(before, [0])
    assert len(get_store(config).runs._order) == 8


@pytest.mark.parametrize("limits", [{"budget": 1 << 30}, {"memory": 1 << 40}], ids=["budget", "memory"])
@pytest.mark.parametrize("what", ["store", "release", "load", "death"])
def test_no_signal_stops_the_learning(tmp_path, monkeypatch, what, limits):
    """Wherever it comes: no run that never ends, and no bytes outstanding, or in use, for ever."""
    CPU_ALLOCATOR.install()  # it counts what `memory` limits
    monkeypatch.setattr(CpuGauge, "_look_for_tensors", lambda self: None)  # at all objects of the process, in each step
    config = config_json(tmp_path, **limits)
    x = torch.randn(8)
    handles = []

    def die():
        handles.clear()
        entries.GUARD.drain()

    actions = {
        "store": lambda: handles.append(store(x, config)),
        "release": lambda: torch.ops.ssd_fx.wait_store_(handles[0], x, 0, True),
        "load": lambda: start_load(handles[0], x),
        "death": die,
    }
    for at, strike in everywhere():
        begin(config, offloaded=32)
        if what != "store":
            actions["store"]()
        strike(actions[what])
        die()
        found, ledger = get_store(config), get_store(config).ledger
        assert found.peak.nbytes == ledger.resident_bytes == ledger.writing_bytes == 0, at
        assert ledger.in_use_bytes == ledger.unreleased_bytes == 0, at
        assert not found.runs._runs, at


def test_a_signal_in_a_load_leaves_no_bytes_that_were_not_written(tmp_path):
    """The load hands the tensor over and cancels its write. Interrupted, it must leave nothing for later loads."""

    def load_until_it_is_handed_over(h, at):
        for _ in range(3):
            y = load(h, good)
            assert torch.equal(y, good), at
            y.zero_()

    config = config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 3600, 3600)), checksums=False)
    good = torch.randn(N)
    for at, strike in everywhere():
        h = put(good.clone(), config)
        strike(lambda h=h: start_load(h, good))
        with pytest.raises(RuntimeError, match="retain_graph"):
            load_until_it_is_handed_over(h, at)


def test_a_signal_in_close_leaves_no_store_that_writes_nothing(tmp_path):
    config = config_json(tmp_path, around(lambda inner: DelayedEngine(inner, 3600, 3600)))
    good = torch.randn(N)
    for at, strike in everywhere():
        h = store(good, config)
        strike(close_stores)
        new = store(good, config)
        assert lookup(new).write, at
        close_stores()
        assert all(torch.equal(load(each, good), good) for each in (h, new)), at


class LateReads(Wrapped):
    """While `late`, reads begin so late that only `cancel` ends them."""

    def __init__(self, inner):
        super().__init__(inner)
        self.late = False

    def read(self, extent, memory):
        if not self.late:
            return super().read(extent, memory)
        return LateWrite(lambda: self.inner.read(extent, memory), 3600.0)


def last_load(runs):
    """Loads all of the last block but its last slot. What the call that it returns does reads the next block ahead."""
    *others, last = runs[-1]
    like = torch.empty(FEW)
    for h in others:
        wait(start_load(h, like), h)
    return lambda: start_load(last, like)


def test_no_signal_makes_a_backward_wait_for_a_read_ahead_that_never_started(tmp_path):
    config = config_json(tmp_path, prefetch=1 << 30)
    steps = Steps(config, blocks=2, size=FEW)
    for at, strike in everywhere():
        runs = steps.forward()
        strike(last_load(runs))
        for slot, h in enumerate(runs[0]):
            assert (load(h, torch.empty(FEW)) == slot).all(), at
        del runs, h
        entries.GUARD.drain()
        assert get_store(config).ledger.reading_bytes == 0, at


def test_no_signal_lets_a_read_ahead_outlive_the_memory_that_it_fills(tmp_path):
    config = config_json(tmp_path, around(LateReads), prefetch=1 << 30)
    engine = get_store(config).engine
    steps = Steps(config, blocks=2, size=FEW)
    for at, strike in everywhere():
        engine.late = False
        runs = steps.forward()
        call = last_load(runs)
        engine.late = True
        call()
        assert lookup(runs[0][0]).ahead
        ahead = [(lookup(h).ahead.read, watch(lookup(h).ahead.landing)) for h in runs[0]]
        del call

        def die(runs=runs):
            runs.clear()
            entries.GUARD.drain()

        strike(die)
        assert all(read.done() or not memory.expired() for read, memory in ahead), at
        entries.GUARD.drain()
        assert all(read.done() for read, _ in ahead), at
        assert get_store(config).ledger.reading_bytes == 0, at


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])  # RuntimeError: torch's, without memory
def test_a_read_ahead_that_cannot_be_is_not_the_fault_of_who_asked(tmp_path, monkeypatch, error):
    config = config_json(tmp_path, prefetch=1 << 30)
    steps = Steps(config, blocks=2)
    runs = steps.forward()
    reader = get_store(config).reader
    landing = reader._landing

    def refuse(entry):
        if entry.graph == "block0":
            raise error("planted")
        return landing(entry)

    monkeypatch.setattr(reader, "_landing", refuse)
    assert steps.backward(runs, [1]) == [[]]
    monkeypatch.setattr(reader, "_landing", landing)
    assert steps.backward(runs, [0]) == [[]]
    assert get_store(config).ledger.reading_bytes == 0


def test_what_is_raised_in_a_load_leaves_its_read_ahead_with_its_owner(tmp_path, monkeypatch):
    """Else the disk would write into memory that somebody else has by then."""
    config = config_json(tmp_path, prefetch=1 << 30, compression={"ssd": "fp8"})
    steps = Steps(config, blocks=2)
    runs = steps.forward()
    like = torch.empty(N)
    for h in runs[1]:
        wait(start_load(h, like), h)
    entry = lookup(runs[0][0])
    assert entry.ahead
    with monkeypatch.context() as patched:
        patched.setattr("ssd_fx.runtime.memory.tensors.empty", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            start_load(runs[0][0], like)
    assert entry.ahead
    assert (wait(start_load(runs[0][0], like), runs[0][0]) == 0).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupted_write_is_not_under_way(tmp_path, monkeypatch, error):
    """While its traceback lives, as in a notebook, later stores work, also those that meet the cap."""
    config = config_json(tmp_path, inflight=2 * B)
    engine = get_store(config).engine
    x = torch.randn(N)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "write", lambda *_: (_ for _ in ()).throw(error("planted")))
        with pytest.raises(error) as kept:
            store(x, config)
    handles = [store(x, config, slot=i) for i in range(5)]
    assert all(raw(load(h, x)) == raw(x) for h in handles)
    del handles  # a write of what was read from memory may still be under way
    assert len(entries.living()) == 1  # in the traceback; what is dropped has ended
    assert get_store(config).ledger.writing_bytes == 0
    del kept
