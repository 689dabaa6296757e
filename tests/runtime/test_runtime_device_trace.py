"""The times of nodes and transfers on a device that executes late: those of its events, not of the launches."""

import gc
import os
import signal
import time
from itertools import pairwise

import pytest
import torch

from ssd_fx.runtime import entries, trace
from ssd_fx.runtime.device import clock, device_trace
from ssd_fx.runtime.device.streams import Queued
from ssd_fx.runtime.stores import close_stores, get_store
from tests.runtime.fake_gpu import FakeEvent, installed
from tests.runtime.harness import begin, config_json, in_a_child, load, release, settle, start_load, store, wait

MEMORY = '{"engine": "memory", "adapt": false}'
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
N = 1000


@pytest.fixture
def gpu():
    with installed("lazy") as fake:
        yield fake
        close_stores()


def step(gpu, forward_ms, backward_ms):
    """begin, a kernel, store, a kernel, release; load, a kernel, wait, a kernel. Nothing has run when it returns."""

    def kernel(ms):
        gpu.queue(gpu.compute, lambda: None, ms)

    begin(MEMORY, offloaded=4 * N)
    x = gpu.tensor(torch.zeros(N))  # 1.5 ms
    kernel(forward_ms)
    h = store(x, MEMORY, seq=0)
    kernel(2 * forward_ms)
    release(h, x, seq=1)
    kernel(1000)  # between forward and backward
    y = start_load(h, x, seq=0)
    kernel(backward_ms)
    wait(y, h, seq=1)
    kernel(100)


def between(kind, following):
    """Milliseconds from the end of a node to the start of the following one, in every run that has both."""
    events = device_trace.events()
    ended = [event[5] for event in events if event[0] == kind]
    started = [event[4] for event in events if event[0] == following][-len(ended) :]  # the first run has no `begin`
    return [round(1e3 * (start - end), 2) for end, start in zip(ended, started, strict=True)]


def test_nodes_have_the_kernels_times(gpu):
    """The host launches a step within a few microseconds, whatever the kernels take."""
    for forward_ms, backward_ms in [(500, 500), (10, 100), (20, 200)]:
        step(gpu, forward_ms, backward_ms)
    assert between("begin", "store") == [11.5, 21.5]  # in the first step the graph's device is not known
    assert between("store", "release") == [1000, 20, 40]
    assert between("load", "wait") == [500, 100, 200]


def test_nothing_waits_for_the_device(gpu, monkeypatch):
    monkeypatch.setattr(device_trace, "UNREAD", 4)
    x = gpu.tensor(torch.zeros(N))
    handles = [store(x, MEMORY, slot=i, seq=i) for i in range(10)]
    assert gpu.compute.ran == 0
    assert len(device_trace.events()) == len(handles)  # asking does
    assert gpu.compute.ran == 1


def test_what_has_run_is_read_in_passing(gpu, monkeypatch):
    """So a long run keeps few events of the driver."""
    monkeypatch.setattr(device_trace, "UNREAD", 4)
    x = gpu.tensor(torch.zeros(N))
    for i in range(20):
        store(x, MEMORY, slot=i, seq=i)
        gpu.finish()
    assert len(device_trace._unread) == 4


def test_every_node_is_timed_in_so_many_runs(gpu):
    """Of forwards that run before a backward too, as in gradient accumulation."""
    x = gpu.tensor(torch.zeros(N))
    runs = device_trace.RUNS
    handles = [store(x, MEMORY) for _ in range(2 * runs)]  # all of the first half, and the first of the second
    for h in handles:
        load(h, x, consume=False)
    kinds = [e.kind for e in device_trace.events()]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("store", "load", "wait"), runs + 1)


def test_a_long_training_is_timed_at_its_end(gpu):
    """The runs that are timed have all of their nodes, `begin` too."""
    for run in range(10 * device_trace.RUNS):
        step(gpu, *((1, 1) if run < device_trace.RUNS else (50, 70)))
        gpu.finish()
        entries.living()  # else the janitor may see the handle's death in the middle of a later step
    assert between("begin", "store") == [2.5] * (device_trace.RUNS - 1) + [51.5] * 9
    assert between("store", "release") == [2] * device_trace.RUNS + [100] * 9
    assert between("load", "wait") == [1] * device_trace.RUNS + [70] * 9


def test_a_node_that_fails_is_not_timed(gpu):
    x = gpu.tensor(torch.zeros(N))
    h = store(x, MEMORY)
    y = start_load(h, x)
    with pytest.raises(RuntimeError, match="no load of it returned"):
        wait(torch.zeros(1), h)
    wait(y, h)
    assert [e.kind for e in device_trace.events()] == ["store", "load", "wait"]


def test_a_tensor_of_the_host_is_timed_by_its_graph_s_device(gpu, monkeypatch):
    """An offset or a mask on the CPU among the tensors of a GPU: without it no run would be complete."""
    x = gpu.tensor(torch.zeros(N))
    handle = store(x, MEMORY, slot=0, seq=0)
    with monkeypatch.context() as patch:
        patch.setattr(device_trace.streams, "of", lambda device: gpu if device is GPU else None)
        device_trace._devices["g"] = GPU
        with device_trace.node("store", "g", 1, 1, torch.device("cpu")):
            pass
        assert [(e.kind, e.slot) for e in device_trace.events()] == [("store", 0), ("store", 1)]
    del handle


def test_the_host_s_times_are_those_of_the_cpu(tmp_path):
    """Without streams nothing is timed twice."""
    config = config_json(tmp_path)
    begin(config, offloaded=4 * N)
    x = torch.zeros(N)
    load(store(x, config), x)
    assert device_trace.events() == []
    assert trace.events()


def test_transfers_that_are_looked_at_late_do_not_overlap(gpu):
    """One stream did one after the other, and the trace has the time that each took."""
    x = gpu.tensor(torch.zeros(N))
    handles = [store(x, MEMORY, slot=i, seq=i) for i in range(3)]
    gpu.finish()
    for h in handles:
        settle(h)
    store(x, MEMORY, slot=9, seq=9)  # any op sees that the writes are done
    writes = [(e.started, e.ended) for e in trace.events() if e.kind == "write"]
    assert len(writes) == 3
    assert [ended - started for started, ended in writes] == pytest.approx([1.5e-3] * 3, abs=1e-6)
    assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(writes))


def test_nodes_may_be_read_long_after_they_ran(gpu, monkeypatch):
    """Each is measured from an anchor of its own time, however many followed."""
    monkeypatch.setattr(clock, "now", lambda: gpu.ms / 1e3)
    x = gpu.tensor(torch.zeros(N))
    for second in range(0, 200, 2):
        gpu.finish()
        gpu.ms = 1e3 * second
        store(x, MEMORY, seq=second)
    found = {e.seq: e.started for e in device_trace.events()}
    assert found == pytest.approx({second: second for second in range(0, 200, 2)}, abs=2e-2)


def test_a_device_whose_clock_is_fast_is_followed(gpu, monkeypatch):
    """By a thousandth: after an hour it would be 3.6 s ahead."""
    seconds = 0.0
    monkeypatch.setattr(clock, "now", lambda: seconds)
    for seconds in range(0, 3600, 5):
        gpu.ms = 1e3 * seconds * 1.001
        taken = clock.anchor(gpu, CPU)
        made = FakeEvent(gpu.compute, timed=True)
        made.fire()
        assert taken.when(made) == pytest.approx(seconds, abs=0.015)


def test_a_signal_handler_may_export_the_trace(gpu, monkeypatch):
    """It interrupts the look at the oldest node, and comes back with the times of all, in order."""
    monkeypatch.setattr(device_trace, "UNREAD", 2)
    asked, exported = FakeEvent.query, []

    def interrupted(event):
        monkeypatch.setattr(FakeEvent, "query", asked)
        signal.raise_signal(signal.SIGUSR1)
        return event.query()

    def export(number, frame):
        exported.extend(device_trace.events())

    def hangs(number, frame):
        raise TimeoutError("the handler waits for a lock that its own thread holds")

    monkeypatch.setattr(FakeEvent, "query", interrupted)
    before = [signal.signal(signal.SIGUSR1, export), signal.signal(signal.SIGALRM, hangs)]
    signal.alarm(10)
    try:
        for seq in range(4):
            gpu.queue(gpu.compute, lambda: None, 1)
            with device_trace.node("store", "g", 0, seq, CPU):
                pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGALRM, before[1])
    assert exported
    assert [event.seq for event in device_trace.events()] == [0, 1, 2, 3]


def test_the_child_of_a_fork_takes_no_lock_that_a_thread_had(gpu):
    """As a worker of a data loader does not have that thread, nobody would let go of it."""
    store(gpu.tensor(torch.zeros(N)), MEMORY)
    with device_trace._lock, clock._making:
        child = os.fork()
        if child == 0:
            os._exit(0 if device_trace.events() == [] and clock.anchor(gpu, CPU) else 1)
    for _ in range(100):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0


@pytest.mark.parametrize("last", ["device", "cpu"])
def test_the_child_of_a_fork_destroys_no_event(gpu, last, monkeypatch):
    """The destructor of a CUDA event makes a call that fails in the child, and so ends it: a data loader's worker."""
    destroyed = []
    monkeypatch.setattr(FakeEvent, "__del__", lambda event: destroyed.append(event.ms), raising=False)
    handle = store(gpu.tensor(torch.zeros(N)), MEMORY)
    if last == "cpu":  # what was stored last says nothing of the other tensors
        monkeypatch.setattr(get_store(MEMORY), "device", torch.device("meta"))
    gpu.finish()
    for stream in (gpu.compute, *gpu.sides):
        stream.tasks.clear()  # of a GPU none of these has the event
    gc.collect()  # what other tests have left
    destroyed.clear()
    assert in_a_child(lambda: gc.collect() >= 0 and not destroyed)
    del handle


def test_a_transfer_that_never_began_is_not_in_the_trace(gpu, monkeypatch):
    """It has no times, and would stand at the start of all time."""
    x = gpu.tensor(torch.zeros(N))
    monkeypatch.setattr(Queued, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store(x, MEMORY)
    assert [e for e in trace.events() if e.kind == "write"] == []


def interrupted(transfer):
    raise KeyboardInterrupt
