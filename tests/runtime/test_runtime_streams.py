"""Device tensors in the store, on a device that executes late and in the worst order; one test for every hazard.

x is "in the making" where its kernel is queued and has not run. Every engine that works on streams passes all of it.
So does every accelerator of this machine, in the one order that it has.
"""

import contextlib
import ctypes
import json
import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime import encoder, entries, inflight, stats, trace, writer
from ssd_fx.runtime.deaths import when_idle
from ssd_fx.runtime.device import device_trace, streams
from ssd_fx.runtime.engines import cufile, staged
from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.states import State
from ssd_fx.runtime.stores import close_stores, get_store
from tests.runtime import stub_kvikio
from tests.runtime.fake_gpu import ORDERS, FakeEvent, FakeGpu, installed
from tests.runtime.harness import (
    begin,
    config_json,
    load,
    move,
    put,
    raw,
    release,
    settle,
    start_load,
    store,
    until,
    wait,
)
from tests.runtime.real_device import RealDevice, kinds

op = torch.ops.ssd_fx
N = 50_000
MEMORY = json.dumps({"engine": "memory"})
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


LATE = pytest.mark.parametrize("gpu", ORDERS, indirect=True)  # for what only the fake one can show


@pytest.fixture(params=[*ORDERS, *kinds()])
def gpu(request):
    if request.param in kinds():
        yield RealDevice(request.param)
        close_stores()
        return
    with installed(request.param) as fake:
        yield fake
        close_stores()


@pytest.fixture
def fake():
    """The device that executes as late as it can."""
    with installed("lazy") as made:
        yield made
        close_stores()


@pytest.fixture(params=["memory", "staged", "kvikio"])
def config(request, gpu, tmp_path, monkeypatch):
    if request.param == "memory":
        return MEMORY
    if request.param == "staged":
        if not isinstance(gpu, RealDevice):
            monkeypatch.setattr(staged, "needed", lambda: "cpu")
        return config_json(tmp_path, "posix")
    if isinstance(gpu, RealDevice):
        pytest.skip("kvikio is a stub on the fake device")
    stub_kvikio.install(monkeypatch, gpu)
    return config_json(tmp_path, request.param)


def numbers(n=N, start=0):
    return torch.arange(start, start + n, dtype=torch.float32)


def on_disk(gpu, config, values, **more):
    """The handle of `values` whose write has ended and whose memory is gone."""
    handle = put(gpu.tensor(values), config, **more)
    settle(handle)
    store(gpu.tensor(numbers(1)), config, slot=99)  # any op sees that the write is done
    assert lookup(handle).state is State.ON_DISK
    gpu.scrub()
    return handle


def test_round_trip_of_every_dtype(gpu, config):
    for dtype in DTYPES:
        values = torch.randint(0, 2, (999,)).to(dtype) if dtype is torch.bool else torch.randn(999).to(dtype)
        handle = on_disk(gpu, config, values)
        assert gpu.bytes_of(load(handle, values)) == raw(values), dtype


def test_stored_while_in_the_making(gpu, config):
    """A transfer that does not wait for the compute stream takes what was there before.

    One that does not keep its memory takes what came later: the graph drops x, and the next kernel overwrites whatever
    memory it gets.
    """
    values = numbers()
    handle = put(gpu.tensor(values), config)
    for _ in range(4):
        gpu.tensor(torch.full((N,), -1.0))
    settle(handle)
    gpu.scrub()
    assert gpu.bytes_of(load(handle, values)) == raw(values)


def test_loaded_into_memory_whose_last_user_is_queued(gpu, config):
    """The allocator gives memory in the order of the compute stream; a read that runs ahead of it is overwritten."""
    values = numbers()
    handle = on_disk(gpu, config, values)
    last_user = gpu.tensor(torch.full((N,), -1.0))
    address = last_user.data_ptr()
    del last_user
    y = load(handle, values)
    assert y.data_ptr() == address
    assert gpu.bytes_of(y) == raw(values)


@LATE
def test_load_from_a_drive_is_valid_for_the_host_after_its_wait(gpu, config):
    """Without a kernel that looks: a read may fail, so the wait is over when its end was seen."""
    if config == MEMORY:
        pytest.skip("a copy cannot fail, and the device waits for it")
    values = numbers()
    handle = on_disk(gpu, config, values)
    y = wait(start_load(handle, values), handle)
    assert raw(y) == raw(values)


def test_the_host_does_not_wait_for_a_copy(fake):
    """From host memory. The device waits, and the memory that the copy reads stays until it is done."""
    values = numbers()
    handle = on_disk(fake, MEMORY, values)
    entry, before = lookup(handle), fake.ms
    y = load(handle, values)
    del handle, entry
    assert entries.living() == []  # so its host memory is free, as far as the store knows
    engine = get_store(MEMORY).engine
    assert (fake.ms, len(engine._moving[False])) == (before, 1)
    assert fake.bytes_of(y) == raw(values)
    assert stats.stats().stall_s == 0
    store(fake.tensor(numbers()), MEMORY, slot=99)
    assert len(engine._moving[False]) == 0, "the next tensor of that size takes its place"


def test_given_away_and_overwritten_while_being_written(gpu, config):
    """The backward gets x itself and overwrites it; what was queued may neither read it later nor land anywhere."""
    values, others = numbers(), numbers(N, 7)
    x = gpu.tensor(values)
    handle = store(x, config)
    address = x.data_ptr()
    release(handle, x)
    del x
    y = load(handle, values, consume=True)
    if lookup(handle).state is State.DONATED:
        assert y.data_ptr() == address
    assert gpu.bytes_of(y) == raw(values)
    gpu.overwrite(y, torch.full((N,), -1.0))
    second = on_disk(gpu, config, others, slot=1)  # its extent may be the first one's
    assert gpu.bytes_of(load(second, others)) == raw(others)


def test_copies_in_vain_are_let_go_while_their_store_waits_for_them():
    """It waits without the lock, and another thread sees each end. None may be left out."""
    in_vain, waited = inflight.CopiesInVain(), []

    class Ending:
        over = False

        def done(self):
            return self.over

        def follow(self, stream):
            return False

        def cancel(self):
            self.over = True
            waited.append(self)
            in_vain.let_go()

    copies = [Ending() for _ in range(3)]
    for copy in copies:
        in_vain.add(copy, torch.empty(1).untyped_storage(), 4, None)
    in_vain.wait()
    assert waited == copies


@LATE
def test_memory_of_a_copy_in_vain_goes_back_behind_it(gpu):
    """When the backward has dropped it, at our next node: the host is ahead, and will see the copy's end much later."""
    values, others, mine = numbers(), numbers(N, 7), torch.full((N,), -1.0)
    x = gpu.tensor(values)
    kept, handle = store(gpu.tensor(others), MEMORY, slot=1), store(x, MEMORY)
    memory = StorageWeakRef(x.untyped_storage())
    release(handle, x)
    del x
    y = load(handle, values)
    writer, late = get_store(MEMORY).writer, gpu.order == "lazy"  # else the copy may have ended
    assert gpu.bytes_of(load(kept, others)) == raw(others)
    assert writer.in_vain or not late
    assert gpu.bytes_of(y) == raw(values)  # the backward reads it still
    waits = gpu.ms
    gpu.overwrite(y, mine)
    del y
    last = store(gpu.tensor(numbers(1)), MEMORY, slot=2)
    assert not writer.in_vain
    assert memory.expired()
    assert gpu.ms == waits or not late  # the host has waited for nothing
    assert gpu.bytes_of(gpu.tensor(mine)) == raw(mine)
    assert gpu.bytes_of(load(last, numbers(1))) == raw(numbers(1))


@LATE
def test_what_is_given_away_does_not_wait_for_its_copy(gpu):
    """Nor for those before it. The copy then reads what the backward has made of the memory, and nobody gets that."""
    values, others, mine = numbers(), numbers(N, 7), torch.full((N,), -1.0)
    first, x = gpu.tensor(others), gpu.tensor(values)
    before, handle = store(first, MEMORY), store(x, MEMORY, slot=1)
    address = x.data_ptr()
    release(handle, x)
    waits = gpu.ms
    del x
    y = load(handle, values)
    late = gpu.order == "lazy"  # else the copy may have ended
    if late:
        assert lookup(handle).state is State.DONATED
        assert (y.data_ptr(), gpu.ms) == (address, waits)  # the host has waited for nothing
    assert gpu.bytes_of(y) == raw(values)
    gpu.overwrite(y, mine)
    del y
    taken = gpu.tensor(torch.full((N,), 5.0))
    if late:
        assert taken.data_ptr() != address  # nobody gets it while the copy reads it
    again = on_disk(gpu, MEMORY, values, slot=2)  # in the host memory of the copy, perhaps
    assert gpu.bytes_of(load(again, values)) == raw(values)
    assert gpu.bytes_of(load(before, others)) == raw(others)
    gpu.finish()
    store(gpu.tensor(numbers(1)), MEMORY, slot=99)
    assert not get_store(MEMORY).writer.in_vain


def later(gpu, config, values, slot=0):
    """The handle of `values`, whose write begins when the next forward does; and where they lie."""
    x = gpu.tensor(values)
    handle = store(x, config, slot=slot, later=True)
    release(handle, x)
    return handle, x.data_ptr()


def test_what_is_written_later_is_given_to_a_backward_that_comes_first(gpu, config):
    """Nothing is copied, and nothing holds the memory when the backward has dropped it."""
    values = numbers()
    handle, address = later(gpu, config, values)
    gpu.finish()
    y = load(handle, values)
    assert y.data_ptr() == address
    assert gpu.bytes_of(y) == raw(values)
    del y
    assert gpu.tensor(values).data_ptr() == address
    assert stats.stats().written_bytes == 0


def test_the_next_forward_begins_what_is_written_later(gpu, config):
    """The tensors may still be in the making then. Their memory goes to others, and their bytes come back."""
    begin(config, offloaded=1)
    values = [numbers(start=i) for i in range(3)]
    handles = [later(gpu, config, value, slot)[0] for slot, value in enumerate(values)]
    begin(config, offloaded=1)
    for handle in handles:
        settle(handle)
    begin(config, offloaded=1)
    assert [lookup(handle).state for handle in handles] == [State.ON_DISK] * 3
    gpu.scrub()
    for handle, value in zip(handles, values, strict=True):
        assert gpu.bytes_of(load(handle, value)) == raw(value)


def test_handle_dies_while_its_write_is_queued(gpu, config):
    values = numbers()
    for i in range(3):
        x = gpu.tensor(torch.full((N,), float(i)))
        handle = store(x, config)
        release(handle, x)
        del x, handle
        assert entries.living() == []
    handle = on_disk(gpu, config, values)
    assert gpu.bytes_of(load(handle, values)) == raw(values)


def test_load_that_nobody_waits_for(gpu, config):
    """Its memory goes back to the allocator only when nothing will be written there any more."""
    values = numbers()
    handle = on_disk(gpu, config, values)
    start_load(handle, values)
    del handle
    assert entries.living() == []
    y = gpu.tensor(torch.full((N,), 5.0))
    assert gpu.bytes_of(y) == raw(torch.full((N,), 5.0))


def test_copy_of_what_is_in_the_making(gpu, config):
    """A load while somebody keeps x: the copy is in the order of the compute stream, behind x's kernel and before the
    one that overwrites x."""
    values = numbers()
    x = gpu.tensor(values)
    handle = store(x, config)
    y = load(handle, values, consume=False)
    gpu.overwrite(x, torch.full((N,), -1.0))
    assert gpu.bytes_of(y) == raw(values)


def test_other_strides(gpu, config):
    """The elements arrive, from memory and from disk."""
    values = numbers(600).view(20, 30)
    asked = values.t().contiguous().t()
    x = gpu.tensor(values)
    handle = store(x, config)
    forwarded = load(handle, asked, consume=False)
    assert gpu.bytes_of(forwarded) == raw(asked)
    del x, forwarded
    settle(handle)
    read = load(on_disk(gpu, config, values, slot=1), asked)
    assert gpu.bytes_of(read) == raw(asked)


def test_release_that_keeps_the_buffer_waits(gpu, config):
    """hand_over=False: the caller overwrites its buffer right behind the release."""
    values = numbers()
    x = gpu.tensor(values)
    handle = store(x, config)
    release(handle, x, hand_over=False)
    gpu.overwrite(x, torch.full((N,), -1.0))
    assert gpu.bytes_of(load(handle, values)) == raw(values)


def test_many_steps_in_one_set_of_buffers(gpu, config):
    """Stores, loads and kernels of three steps, all buffers recycled between them."""
    for step in range(3):
        kept = []
        for i in range(6):
            values = numbers(N + i % 2, 100 * step + i)
            x = gpu.tensor(values)
            handle = store(x, config, slot=i)
            release(handle, x)
            kept.append((handle, values))
            del x, handle
        while kept:
            handle, values = kept.pop()
            y = load(handle, values)
            gpu.overwrite(y, values + 1)
            assert gpu.bytes_of(y) == raw(values + 1)
            del y, handle
    assert entries.living() == []
    assert stats.stats().loads == 18


@LATE
def test_nothing_of_a_dead_tensor_is_kept(gpu, config):
    """All memory of the device is free once handles and tensors are gone."""
    values = numbers()
    handle = on_disk(gpu, config, values)
    y = load(handle, values)
    del y, handle
    entries.living()
    close_stores()
    assert [block.nbytes for block in gpu.blocks.values() if block.live] == []


def test_what_dies_unseen_is_ended_on_its_device(fake):
    """By the thread that follows deaths up, which is on device 0 by itself; the fake notes calls from there."""
    x = fake.tensor(numbers())
    handle = store(x, MEMORY)
    release(handle, x)
    fake.threads.clear()
    del x, handle
    until(lambda: "ssd_fx-janitor" in fake.threads)
    entries.living()
    assert fake.threads == {"ssd_fx-janitor"}


def test_the_device_of_a_thread_is_torch_s(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    within = streams.CudaStreams().on(torch.device("cuda", 3))
    assert (type(within), within.idx) == (torch.accelerator.device_index, 3)
    with streams.CudaStreams().on(torch.device("cuda", 1)) as nothing:  # a guard would take a microsecond
        assert nothing is None


# ---- the transfer itself


def queued(fake, check, size=10):
    x = fake._tensor(size)

    def enqueue(side):
        fake.queue(side, lambda: None)
        return check

    return x, streams.Queued(fake, x.device, fake.side(x.device), enqueue)


def test_a_check_runs_once_and_only_behind_the_event(fake):
    calls = []
    _x, transfer = queued(fake, lambda: calls.append(fake.sides[0].tasks.copy()))
    transfer.start()
    assert not transfer.done()
    assert calls == []
    transfer.wait()
    transfer.wait()
    assert not transfer.cancel()
    assert [list(tasks) for tasks in calls] == [[]]  # nothing is left on the stream


def test_an_error_of_the_check_is_raised_by_every_wait(fake):
    def check():
        raise OSError(5, "short", "/there")

    _x, transfer = queued(fake, check)
    transfer.start()
    for _ in range(2):
        with pytest.raises(OSError, match="short"):
            transfer.wait()
    assert transfer.cancel()


def test_a_signal_handler_may_end_the_transfer_that_is_being_looked_at(fake):
    """`ssd_fx.close()` in a handler cancels every transfer, in the thread that the signal has interrupted."""
    calls = []

    def check():
        calls.append(transfer.cancel())
        raise OSError(5, "short", "/there")

    _x, transfer = queued(fake, check)
    transfer.start()
    waiting = threading.Thread(target=transfer.cancel, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(calls) == 1
    with pytest.raises(OSError, match="short"):
        transfer.wait()


def test_an_interrupted_check_runs_again(fake):
    errors = [KeyboardInterrupt(), OSError(5, "short", "/there")]

    def check():
        raise errors.pop(0)

    _x, transfer = queued(fake, check)
    transfer.start()
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    with pytest.raises(OSError, match="short"):
        transfer.wait()


def test_a_transfer_that_was_never_started_is_no_success(fake):
    _x, transfer = queued(fake, lambda: None)
    assert not transfer.done()
    with pytest.raises(OSError, match="never queued"):
        transfer.wait()
    assert transfer.cancel()


def test_an_interrupt_before_the_transfer_was_queued_is_no_success(fake):
    def enqueue(side):
        raise KeyboardInterrupt

    x = fake._tensor(10)
    transfer = streams.Queued(fake, x.device, fake.side(x.device), enqueue)
    with pytest.raises(KeyboardInterrupt):
        transfer.start()
    assert transfer.cancel()
    with pytest.raises(OSError, match="never queued"):
        transfer.wait()


@LATE
@pytest.mark.parametrize("case", ["a release that blocks", "no room in flight"])
def test_the_host_does_not_wait_for_memory_to_go_back(gpu, case):
    """The tensor's stream does, so that its memory goes back in that order; and the reads wait for the writes."""
    options = {"inflight": 50} if case == "no room in flight" else {}
    config = json.dumps({"engine": "memory", "adapt": False, "prefetch": 0, **options})
    handles = []
    for slot in range(6):
        x, before = gpu.tensor(numbers(slot)), gpu.ms
        handle = op.store(x, config, "follow", slot, 2 * slot)
        op.wait_store_(handle, x, 2 * slot + 1, True, case == "a release that blocks")
        handles.append(handle)
        if gpu.order == "lazy":
            assert gpu.ms == before, "the host had the device run"
        del x
    for slot, handle in reversed(list(enumerate(handles))):
        assert gpu.bytes_of(load(handle, numbers(slot))) == raw(numbers(slot))
    assert gpu.violations == []


NO_BACKWARD, KEPT, GIVEN = "a forward without a backward", "a load of what others may hold", "a load"


@LATE
@pytest.mark.parametrize("case", [NO_BACKWARD, KEPT, GIVEN])
def test_the_host_does_not_wait_for_the_copy_of_what_dies(gpu, case):
    """Every thread would: the death is dealt with under the lock."""
    handle = put(gpu.tensor(numbers()), MEMORY)
    if case != NO_BACKWARD:
        start_load(handle, numbers(), donate=case == GIVEN)
    before = gpu.ms
    del handle
    assert entries.living() == []
    if gpu.order == "lazy":
        assert gpu.ms == before, "the host had the device run"
    again = on_disk(gpu, MEMORY, numbers(start=1), slot=1)  # in the pinned memory of that copy, perhaps
    assert gpu.bytes_of(load(again, numbers())) == raw(numbers(start=1))


@pytest.mark.parametrize("ahead", [False, True])
@LATE
def test_the_host_does_not_wait_for_a_read_whose_graph_dies(gpu, ahead):
    """What it fills goes back in the order of the stream that asked for it."""
    handle = on_disk(gpu, MEMORY, numbers())
    before = gpu.ms
    if ahead:
        lookup(handle).store.reader.ahead(lookup(handle))
    else:
        start_load(handle, numbers())
    del handle
    assert entries.living() == []
    if gpu.order == "lazy":
        assert gpu.ms == before, "the host had the device run"
    after = gpu.tensor(numbers(start=1))  # in what the read fills
    assert gpu.bytes_of(after) == raw(numbers(start=1))


def test_two_forwards_of_a_graph_that_overlap_have_the_same_node_to_go_at(fake):
    """As of two threads. The runs of both are those of the second."""
    config = json.dumps({"engine": "memory", "adapt": False, "prefetch": 0})
    for _ in range(2):
        begin(config, "gone", offloaded=1)
    values = [numbers(start=i) for i in range(2)]
    stored = [fake.tensor(each) for each in values]
    handles = [op.store(x, config, "gone", 0, 0) for x in stored]
    for handle, x in zip(handles, stored, strict=True):
        op.wait_store_(handle, x, 1, True, False, 0)
    del x, stored
    for handle, each in zip(handles, values, strict=True):
        assert fake.bytes_of(load(handle, each)) == raw(each)
    assert fake.violations == []


def test_a_copy_for_nothing_is_learnt_though_it_never_ends(fake):
    """A host far ahead of its device sees no copy end, and others hold the tensor in every step."""
    config = json.dumps({"engine": "memory"})
    held = fake.tensor(numbers())
    for _ in range(3):
        handle = store(held, config)
        release(handle, held, hand_over=True)
        start_load(handle, held, donate=False)
        del handle
        entries.living()
    found = stats.stats()
    assert (found.wasted_bytes, found.held_bytes) == (2 * 4 * N, 4 * N)


@pytest.mark.parametrize("late", [True, False])
def test_what_the_device_waits_for_is_seen(fake, late):
    """The host waits for nothing, and cannot know. A copy takes 1.5 ms; a late one runs when the device needs it."""
    config = json.dumps({"engine": "memory", "prefetch": 0})
    steps = 3 * device_trace.RUNS
    for _ in range(steps):
        handle = on_disk(fake, config, numbers(), graph="waits")
        y = start_load(handle, numbers())
        if not late:
            fake.finish()
        wait(y, handle)
        fake.finish()
        del y, handle
    begin(config, "waits", offloaded=1)
    assert stats.stats().graphs["waits"].stall_s == pytest.approx(steps * late * 1.5e-3)
    assert stats.slots()["waits"][0].read_stall_s == pytest.approx(steps * late * 1.5e-3)
    assert (("waits", 0) in get_store(config).habits.late) is late


def test_an_engine_that_ends_leaves_its_streams_to_the_next(fake):
    for _ in range(3):
        handle = on_disk(fake, MEMORY, numbers())
        load(handle, numbers())
        del handle
        close_stores()
    assert len(fake.sides) == 2


def test_the_streams_of_a_gpu_are_not_from_pytorch_s_pool(monkeypatch):
    """Which hands them out in turns: to users, and to NCCL."""
    made = []

    class Driver:
        def stream(self, index):
            made.append(index)
            return 100 + len(made)

    monkeypatch.setattr(streams, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    cuda, device = streams.CudaStreams(), torch.device("cuda", 1)
    first, second = cuda.side(device), cuda.side(device)
    assert (first, second, made) == ((101, device), (102, device), [1, 1])
    cuda.give_back(device, first)
    assert cuda.side(device) is first


def test_memory_goes_back_in_the_order_of_the_stream_that_made_it(fake):
    """And not of the stream of a thread that happens to release it, or to need room in flight."""
    config = json.dumps({"engine": "memory", "adapt": False, "prefetch": 0})
    x, own = fake.tensor(numbers()), fake.compute
    handle = op.store(x, config, "follow", 0, 0)
    with fake.on_another_stream():
        before = len(own.tasks)
        op.wait_store_(handle, x, 1, True, True)
        assert len(own.tasks) == before + 1, "it waits for the end of the copy"
    del x
    assert fake.bytes_of(load(handle, numbers())) == raw(numbers())


def test_a_write_that_the_device_waits_for_is_traced_when_it_has_ended(fake):
    config = json.dumps({"engine": "memory", "adapt": False})
    x = fake.tensor(numbers())
    handle = op.store(x, config, "follow", 0, 0)
    op.wait_store_(handle, x, 1, True, True)
    assert [event.kind for event in trace.events() if event.kind == "write"] == []
    assert lookup(handle).state is State.ON_DISK
    assert fake.bytes_of(load(handle, numbers())) == raw(numbers())
    store(fake.tensor(numbers(1)), config, slot=99)
    (write,) = [event for event in trace.events() if event.kind == "write"]
    assert write.ended > write.started > 0


def test_an_interrupted_read_of_host_memory_does_not_end_the_engine_badly(fake, monkeypatch):
    engine, x = MemoryEngine(), fake.tensor(torch.ones(10))
    extent = engine.alloc(40)
    move(engine.write(extent, Memory.of(x)))
    read = engine.read(extent, Memory.of(x))

    class Interrupting(deque):
        def append(self, item):
            super().append(item)
            raise KeyboardInterrupt

    engine._moving[False] = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        read.start()
    engine.close()
    assert ([*engine._moving[True], *engine._moving[False]], engine._pinned) == ([], {})


def test_an_interrupt_while_the_end_is_noted_does_not_lose_a_transfer(fake, monkeypatch):
    """Its memory would be free for others while the device still copies."""
    _x, transfer = queued(fake, lambda: None)
    recorded = []

    def record(stream, **how):
        recorded.append(FakeGpu.record(fake, stream, **how))
        if len(recorded) == 2:  # behind the compute stream, behind the copy
            raise KeyboardInterrupt
        return recorded[-1]

    monkeypatch.setattr(fake, "record", record)
    with pytest.raises(KeyboardInterrupt):
        transfer.start()
    assert not transfer.done()
    assert not transfer.cancel()
    assert fake.sides[0].ran == 1


def test_a_copy_to_host_memory_makes_no_event_for_a_host_that_sleeps(fake, monkeypatch):
    """Only streams wait for it. CUDA is slower with such events, even if nobody sleeps."""
    monkeypatch.setattr(device_trace, "node", lambda *_: contextlib.nullcontext())
    x = fake.tensor(numbers())
    handle = store(x, MEMORY)
    op.wait_store_(handle, x, 1, True, True)
    assert fake.bytes_of(load(handle, numbers())) == raw(numbers())
    assert fake.sleeping == 0
    x, transfer = queued(fake, lambda: None)  # the host has to see how it ends
    transfer.start()
    assert fake.sleeping == 1
    transfer.wait()


def test_the_host_asks_no_more_for_a_copy_that_the_stream_waits_for(fake, monkeypatch):
    """Only one that is timed is asked for, for the trace."""
    monkeypatch.setattr(device_trace, "node", lambda *_: contextlib.nullcontext())
    asked = []
    x = fake.tensor(numbers())
    handle = store(x, MEMORY)
    op.wait_store_(handle, x, 1, True, True)
    monkeypatch.setattr(FakeEvent, "query", lambda event: asked.append(event) or False)
    get_store(MEMORY).writer.reap()
    assert asked == []
    assert fake.bytes_of(load(handle, numbers())) == raw(numbers())


def test_events_of_cuda_spin_unless_the_host_will_wait(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: made.append(how))
    stream = SimpleNamespace(record_event=lambda event: event)
    for how in ({}, {"timed": True}, {"sleeps": True}):
        streams.CudaStreams().record(stream, **how)
    assert [(how["enable_timing"], how["blocking"]) for how in made] == [(False, False), (True, False), (False, True)]


def test_span_is_as_long_as_the_device_says(fake):
    with streams.timed(torch.device("cpu")):
        _x, transfer = queued(fake, lambda: None)
    move(transfer)
    started, ended = transfer.span()
    assert ended - started == pytest.approx(1.5e-3)


@LATE
def test_the_capture_of_a_graph_is_refused(gpu, config):
    """A replay would read what the capture left in memory, and nothing would say so."""
    x = gpu.tensor(numbers())
    h = store(x, config)
    gpu.captures = True
    for op in (
        lambda: begin(config, offloaded=1),
        lambda: store(x, config, slot=1, seq=1),
        lambda: start_load(h, x),
    ):
        with pytest.raises(RuntimeError, match="ssd_fx cannot be captured in a CUDA graph"):
            op()
    gpu.captures = False
    assert gpu.bytes_of(load(h, x)) == raw(numbers())


@LATE
def test_a_forward_that_stores_nothing_may_be_captured(gpu, config):
    """It begins no write of what other forwards left: a replay would do so again."""
    handle, _ = later(gpu, config, numbers())
    gpu.captures = True
    begin(config, offloaded=0)
    gpu.captures = False
    assert lookup(handle).write is None
    begin(config, offloaded=0)
    assert lookup(handle).write is not None
    settle(handle)
    gpu.scrub()
    assert gpu.bytes_of(load(handle, numbers())) == raw(numbers())


@pytest.mark.parametrize(("way", "whole"), [("as it is", False), ("aside", True), ("block", True)])
def test_why_there_are_no_cuda_graphs(way, whole):
    """A replay writes to the addresses of its capture, whoever has a tensor there: here while its store is queued.

    The capture's own memory would have to be left behind at every store, in the order of the compute stream: by a copy
    aside, or by a release that blocks.
    """
    with installed("compute first") as fake:
        values = numbers()
        x = fake.tensor(values)
        address = x.data_ptr()
        stored = fake.empty((N,), (1,), torch.float32, None) if way == "aside" else x
        if way == "aside":
            fake.copy(fake.compute, stored, x)
        handle = store(stored, MEMORY)
        op.wait_store_(handle, stored, 1, True, way == "block")
        replayed = (ctypes.c_ubyte * (4 * N)).from_address(address)
        fake.queue(fake.compute, lambda: ctypes.memset(replayed, 0, 4 * N) and None)
        del stored
        assert (fake.bytes_of(load(handle, values, consume=False)) == raw(values)) is whole
        del x, handle
        close_stores()


def test_loads_do_not_wait_behind_stores(fake):
    """What is copied to the host does not hold up what is copied from it: the bus does both at a time."""
    engine = MemoryEngine()
    x, y = fake._tensor(100), fake._tensor(100)
    first, second = engine.alloc(100), engine.alloc(100)
    move(engine.write(first, Memory.of(x)))
    write, read = engine.write(second, Memory.of(x)), engine.read(first, Memory.of(y))
    write.start()
    move(read)
    assert not write.done()
    write.wait()


def test_bytes_of_views():
    """as_bytes sees just the elements of a dense view, whatever its dtype."""
    x = torch.arange(100, dtype=torch.int32)
    assert raw(tensors.as_bytes(x[10:20])) == raw(x[10:20])
    half = torch.randn(8, dtype=torch.bfloat16)
    assert raw(tensors.as_bytes(half[1:])) == raw(half[1:])


def test_exposed_memory_is_plain_bytes():
    """The array interface that kvikio reads."""
    exposed = cufile.Exposed(4096, 77).__cuda_array_interface__
    assert exposed == {"shape": (77,), "typestr": "|u1", "data": (4096, False), "strides": None, "version": 3}


def test_the_fake_is_a_backend():
    """Same methods, same arguments as the one of torch.cuda, so that what passes here means something there."""
    import inspect

    def methods(cls):
        found = inspect.getmembers(cls, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in found if not name.startswith("_")}

    fake = methods(FakeGpu)
    for name, parameters in methods(streams.CudaStreams).items():
        assert fake[name] == parameters


# ---- the cap on bytes in flight


@pytest.mark.parametrize(("memory_bytes", "stand"), [(0, 1), (3 * 4 * N, 3)])
def test_a_share_of_the_device_may_be_on_its_way_while_the_host_runs_ahead(fake, monkeypatch, memory_bytes, stand):
    """The device has not begun with anything. Where it is small, a store waits until the one before has ended."""
    monkeypatch.setattr(inflight, "LEAST_BYTES", 100)
    monkeypatch.setattr(FakeGpu, "memory_bytes", lambda self, device: inflight.SHARE * memory_bytes)
    [store(fake.tensor(numbers(N)), MEMORY, slot=i) for i in range(3)]
    assert get_store(MEMORY).ledger.writing_bytes == stand * 4 * N


@pytest.mark.parametrize(("option", "stand"), [("auto", 2), (4 * N, 1)])
def test_what_the_plan_has_on_its_way_may_be(fake, monkeypatch, option, stand):
    """Unless the option says how much may be."""
    monkeypatch.setattr(inflight, "LEAST_BYTES", 100)
    config = json.dumps({"engine": "memory", "inflight": option})
    op.begin_(torch.empty(0, dtype=torch.int64), config, "g", 0, 1, "", 2 * 4 * N)
    [store(fake.tensor(numbers(N)), config, slot=i) for i in range(3)]
    assert get_store(config).ledger.writing_bytes == stand * 4 * N


def given(gpu, config, slot=0):
    """What a backward got at once, while the copy of it is queued."""
    values = numbers(N, slot)
    handle = put(gpu.tensor(values), config, slot=slot)
    return load(handle, values)


def alive(gpu):
    return sum(block.live for block in gpu.blocks.values() if block.nbytes == 4 * N)


@pytest.mark.parametrize("kept", [False, True])
def test_a_host_far_ahead_gives_away_no_more_than_may_be_in_flight(fake, kept):
    """What a copy still reads is memory, and the device has not begun with anything. What the backward has used goes
    back behind its copy, so that the next tensor gets that memory."""
    config = json.dumps({"engine": "memory", "inflight": 2 * 4 * N})
    most, loaded = 0, []
    for _ in range(10):
        loaded.append(given(fake, config))
        most = max(most, len(get_store(config).writer.in_vain))
        if not kept:
            loaded.clear()
            assert alive(fake) == 1
    assert most == (2 if kept else 1)


@pytest.mark.parametrize("first", [0, 1])
def test_what_was_given_away_is_free_once_the_backward_has_used_it(fake, first):
    """In whatever order: a backward begins with what was stored last. No copy has ended as far as the host knows."""
    handles = []
    for i in range(2):
        x = fake.tensor(numbers(N, i))
        handles.append(store(x, MEMORY, slot=i))
        release(handles[i], x)
        del x
    loaded = [load(handle, numbers()) for handle in handles]
    assert alive(fake) == 2
    del loaded[first]
    store(fake.tensor(numbers(1)), MEMORY, slot=99)
    assert alive(fake) == 1


def test_what_was_given_away_is_free_though_no_op_comes_any_more(fake):
    """As between training and evaluation. The janitor looks where nothing dies."""
    given(fake, MEMORY)
    fake.finish()
    assert alive(fake) == 1
    for function in when_idle:
        function()
    assert alive(fake) == 0


def test_what_was_given_away_is_free_when_its_handle_has_died(fake):
    """The optimizer comes next, without an op of ours. It would go without the memory until the next forward."""
    handle = put(fake.tensor(numbers()), MEMORY)
    load(handle, numbers())
    fake.finish()
    assert alive(fake) == 1
    del handle
    assert entries.living() == []
    assert alive(fake) == 0


def test_what_one_model_gave_away_is_free_when_another_one_goes_on(fake):
    """It has options of its own. Its handles die so often that the janitor never finds a quiet moment."""
    given(fake, MEMORY)
    fake.finish()
    assert alive(fake) == 1
    begin(json.dumps({"engine": "memory", "inflight": 1 << 20}), offloaded=1)
    assert alive(fake) == 0


# ---- several streams of the user


@LATE
def test_what_one_stream_makes_is_not_written_before_it_is_there(gpu):
    """It is resident until a store on another stream pushes it out."""
    config = config_json("", "memory", budget=8 * N, dirs=[])
    values = torch.arange(N, dtype=torch.int64)
    x = gpu.tensor(values)
    handle = store(x, config)
    assert lookup(handle).write is None
    with gpu.on_another_stream():
        y = gpu.tensor(values + 1)
        other = store(y, config, slot=1)
        release(other, y)
    assert lookup(handle).write is not None
    release(handle, x)
    del x, y
    settle(handle)
    gpu.scrub()
    assert gpu.bytes_of(load(handle, torch.empty(N, dtype=torch.int64))) == raw(values)


@LATE
def test_what_another_stream_encodes_stays_until_its_own_waits(gpu, tmp_path, monkeypatch):
    """Its memory goes back to the stream that made it, which does not know yet that the other one reads it."""
    config = config_json(tmp_path, "memory", budget=N, dirs=[], compression={"ssd": "bitpack"})
    encoded = SimpleNamespace(nbytes=N // 8, lossy=False)
    monkeypatch.setattr(
        encoder.codec, "encode", lambda name, x: (gpu.tensor(torch.ones(N // 8, dtype=torch.int8)), encoded)
    )
    x = gpu.tensor(torch.arange(N) % 2 == 0)
    handle = store(x, config)
    release(handle, x)
    memory = StorageWeakRef(x.untyped_storage())
    del x
    found = streams.in_turn_with
    alive = []

    @contextlib.contextmanager
    def noting(*about):
        with found(*about):
            yield
            alive.append(not memory.expired())

    monkeypatch.setattr(writer.streams, "in_turn_with", noting)
    with gpu.on_another_stream():
        y = gpu.tensor(torch.arange(N) % 3 == 0)
        store(y, config, slot=1)
    assert lookup(handle).encoded
    assert alive[0]
    assert memory.expired()


@LATE
def test_what_one_stream_read_ahead_no_other_gets(gpu):
    """Its memory goes back to the stream that asked, which would reuse it too early."""
    handle = on_disk(gpu, MEMORY, numbers())
    entry = lookup(handle)
    with gpu.on_another_stream():
        entry.store.reader.ahead(entry)
    address = entry.ahead.landing.data_ptr()
    held = entry.ahead.landing
    y = start_load(handle, torch.empty(N))
    assert y.data_ptr() != address
    assert entry.ahead is None
    del held
    assert gpu.bytes_of(wait(y, handle)) == raw(numbers())


@LATE
def test_what_another_stream_stored_is_not_read_ahead(gpu):
    """The load on its own stream would drop what was read, and read it again."""

    def forward():
        begin(MEMORY, "a", offloaded=4 * N)
        first = on_disk(gpu, MEMORY, numbers(), graph="a")
        with gpu.on_another_stream():
            begin(MEMORY, "b", offloaded=4 * N)
            second = on_disk(gpu, MEMORY, numbers(), graph="b")
        return first, second

    for _ in range(2):  # the second backward knows what comes after the first graph
        first, second = forward()
        load(first, torch.empty(N))
        assert lookup(second).ahead is None
        load(second, torch.empty(N))
        del first, second


@pytest.mark.parametrize("donate", [True, False])
def test_what_the_caller_gave_to_another_stream_is_not_donated(gpu, donate):
    """A copy to the host on a side stream, `x.record_stream(side)`, `del x`: nothing shows that the side stream still
    reads the memory, into which the backward would write. So the graph says that `x` is its input."""
    config = config_json("", "memory", budget=1 << 30, dirs=[])
    values = numbers()
    x = gpu.tensor(values)
    handle = store(x, config)
    release(handle, x)
    address = x.data_ptr()
    del x
    y = wait(start_load(handle, values, donate=donate), handle)
    assert (y.data_ptr() == address) == donate
    assert gpu.bytes_of(y) == raw(values)


class PinnedTensor(torch.Tensor):
    def is_pinned(self, device=None):
        return True


def test_the_host_reads_a_pinned_tensor_when_the_copy_into_it_is_done(monkeypatch):
    """`x.to("cpu", non_blocking=True)` returns before that. What copies it back on that stream needs no wait."""
    monkeypatch.setattr(streams, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    fake = FakeGpu("lazy")
    monkeypatch.setitem(streams.BACKENDS, "cuda", fake)
    pinned, plain = torch.zeros(4).as_subclass(PinnedTensor), torch.zeros(4)
    for x in (pinned, plain):
        fake.overwrite(x, torch.ones(4))
        streams.finish_copies_into(x)
    assert (pinned.tolist(), plain.tolist()) == ([1.0] * 4, [0.0] * 4)
    fake.finish()


@LATE
@pytest.mark.parametrize("gone_by", [0, 1], ids=["the load", "the wait"])
def test_what_the_plan_has_gone_in_the_backward_goes_there(gpu, gone_by):
    """Its copy ends in the backward. A host far ahead of its device sees no end, and would hold it until its load."""
    config = json.dumps({"engine": "memory", "adapt": False, "prefetch": 0})
    begin(config, "gone", offloaded=1)
    handles = []
    for slot, by in enumerate((gone_by, -1)):
        x = gpu.tensor(numbers(start=slot))
        handles.append(op.store(x, config, "gone", slot, 2 * slot))
        op.wait_store_(handles[slot], x, 2 * slot + 1, True, False, by)
        del x
    before, first = gpu.ms, lookup(handles[0])
    y = start_load(handles[1], numbers(), seq=0)
    if gpu.order == "lazy":
        assert (first.state is State.ON_DISK) is (gone_by == 0)
    y = wait(y, handles[1], seq=1)
    assert first.state is State.ON_DISK
    if gpu.order == "lazy":
        assert gpu.ms == before, "the host had the device run"
    assert gpu.bytes_of(y) == raw(numbers(start=1))
    assert gpu.bytes_of(load(handles[0], numbers())) == raw(numbers())
    assert gpu.violations == []
