"""Fork, exit, signals: with work in flight a process ends cleanly, and leaves nothing in the directory."""

import os
import signal
import textwrap

import pytest

from tests import fresh

PREAMBLE = """
import os, signal, sys, threading, time, torch
from tests.runtime.engines import DelayedEngine, around
from tests.runtime.harness import *
from ssd_fx.runtime import entries
from ssd_fx.runtime.states import State
from ssd_fx.runtime.stores import get_store
where = sys.argv[1]
torch.set_num_threads(1)  # OpenMP does not survive a fork
N = 300_001
def slow(shortest=0.05, longest=0.1):
    return config_json(where, around(lambda inner: DelayedEngine(inner, shortest, longest)))
"""


def start(code, *arguments):
    return fresh.started("-c", PREAMBLE + textwrap.dedent(code), *arguments)


def run(code, *arguments):
    """(stdout, stderr, returncode) of a fresh interpreter."""
    done = fresh.run(PREAMBLE + textwrap.dedent(code), *arguments, timeout_s=60)
    return done.stdout, done.stderr, done.returncode


def test_imported_where_another_device_is_the_default():
    """`torch.device("meta")` is how large models are built. The runtime's own tensors are on the CPU all the same."""
    code = """
        import torch
        with torch.device("meta"):
            from ssd_fx.runtime.layout import drop_storage
        x = torch.ones(4)
        drop_storage(x)
        print(x.device, x.numel())
    """
    done = fresh.run(textwrap.dedent(code), timeout_s=60)
    assert done.stdout == "cpu 0\n", done.stderr


def test_fork(tmp_path):
    """The child: the parent's handles are refused, its own work, nothing hangs. The parent goes on."""
    code = """
        config = slow()
        xs = [torch.full((N,), float(i)) for i in range(6)]
        handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
        settle(handles[0])
        pending = start_load(handles[0], xs[0])
        entries.GUARD.lock.acquire()  # as if another thread held it at the fork
        child = os.fork()
        if child == 0:
            try:
                start_load(handles[1], xs[1])
            except RuntimeError as error:
                assert "parent process before a fork" in str(error), error
            else:
                raise AssertionError("the child must not use the parent's handle")
            handles.clear()
            own = config_json(where)
            h = store(xs[2], own)
            assert settle(h).state.where == "memory"
            assert torch.equal(load(h, xs[2]), xs[2])
            del h, pending
            print("child fine", flush=True)
            sys.exit(0)
        entries.GUARD.lock.release()
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(wait(pending, handles[0]), xs[0])
        for h, x in zip(handles, xs):
            assert torch.equal(load(h, x, consume=False), x)
        print("parent fine")
    """
    out, err, status = run(code, tmp_path)
    assert (out, status) == ("child fine\nparent fine\n", 0), err


@pytest.mark.parametrize("delay", ["0.05", "3600"])
def test_exit_in_flight(tmp_path, delay):
    """Writes queued, running and late, a load without its wait, threads holding tensors: exit is clean and quick."""
    code = f"""
        late, fast = slow({delay}, {delay}), config_json(where)
        xs = [torch.randn(5 * N) for i in range(8)]
        handles = [store(x, late, slot=i) for i, x in enumerate(xs)] + [store(x, fast) for x in xs]
        settle(handles[-1])
        y = start_load(handles[-1], xs[-1])
        print("leaving", flush=True)
    """
    out, err, status = run(code, tmp_path)
    assert (out, err, status) == ("leaving\n", "", 0)
    assert os.listdir(tmp_path) == []


def test_kill_leaves_nothing(tmp_path):
    code = """
        config = config_json(where)
        handles = [store(torch.randn(N), config, slot=i) for i in range(4)]
        print("ready", flush=True)
        while True:
            handles = [store(torch.randn(5 * N), config, slot=i) for i in range(4)]
    """
    process = start(code, tmp_path)
    assert process.stdout.readline() == "ready\n", process.communicate()
    assert os.listdir(tmp_path) == []
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_interrupts(tmp_path):
    """Ctrl-C anywhere: in a blocked release, in a blocked store, and at random points; the store goes on working."""
    code = """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what shells run in the background ignores it
        stuck = slow(3600, 3600)
        def expect_interrupt(action):
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            try:
                action()
            except KeyboardInterrupt:
                return
            raise AssertionError("no KeyboardInterrupt")
        x = torch.randn(N)
        h = store(x, stuck)
        expect_interrupt(lambda: release(h, x, hand_over=False))
        assert torch.equal(load(h, x, consume=False), x)
        del h
        assert entries.living() == []

        small = config_json(where, around(lambda inner: DelayedEngine(inner, 3600, 3600)), inflight=100)
        h = store(x, small)
        expect_interrupt(lambda: store(x, small))
        del h
        assert entries.living() == []

        config = config_json(where)
        def train():
            while True:
                handles = [store(torch.full((N,), float(i)), config, slot=i) for i in range(4)]
                ys = [start_load(h, x) for h in handles]
                for i, (y, h) in enumerate(zip(ys, handles)):
                    assert (wait(y, h) == i).all()
        import random
        rng = random.Random(0)
        for _ in range(60):
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.005, 0.05), 2)  # again: torch has __del__s
            try:
                train()
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert not entries.GUARD.is_mine()
        import gc
        gc.collect()
        store(x, config)
        assert entries.living() == [], entries.living()
        assert get_store(config).ledger.writing_bytes == 0
        h = store(x, config)
        settle(h)
        assert torch.equal(load(h, x), x)
        print("fine")
    """
    out, err, status = run(code, tmp_path)
    assert (out, status) == ("fine\n", 0), err


def test_the_thread_that_looks_at_what_died_outlives_an_error():
    """A device in error does not say whether a copy has ended. Without the thread no store would end any more."""
    out, err, code = run(
        """
        from ssd_fx.runtime import deaths
        looks = []
        def look():
            looks.append(1)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        deaths.IDLE_S = 0.01
        deaths.when_idle.insert(0, look)
        deaths.janitor()
        until = time.monotonic() + 30
        while len(looks) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        print(len(looks) >= 3)
        """,
        "",
    )
    assert (out, code) == ("True\n", 0)
    assert err.count("a task between steps failed") == 1  # not every five seconds until the end
    assert "illegal memory access" in err
