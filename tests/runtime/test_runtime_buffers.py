"""Page-aligned memory, which lives for as long as a thread may transfer into it."""

import ctypes
import errno
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ssd_fx.runtime.engines import memory, posix
from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.memory.buffers import PAGE, Buffer
from ssd_fx.runtime.native.pool import PENDING
from tests.runtime.harness import move, until, watch

MIB = 1 << 20


@pytest.fixture
def buffers(monkeypatch):
    """A weak reference to the memory of every buffer that an engine makes from here on."""
    made = []

    class Watched(Buffer):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            made.append(watch(self._memory))

    for module in (posix, memory):
        monkeypatch.setattr(module, "Buffer", Watched)
    return made


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 70_001, 3 * MIB])
def test_all_of_a_buffer_is_usable_and_aligned(nbytes):
    buffers = [Buffer(nbytes) for _ in range(5)]
    for i, buffer in enumerate(buffers):
        assert buffer.address % PAGE == 0
        ctypes.memset(buffer.address, i, nbytes)
    for i, buffer in enumerate(buffers):
        assert ctypes.string_at(buffer.address, nbytes) == bytes([i]) * nbytes


def test_a_buffer_is_host_memory_whatever_the_default_device():
    with torch.device("meta"):
        assert Buffer(100).address


def test_no_memory_is_an_oserror():
    """So the engine's caller keeps the tensor in memory, as after any failed write."""
    with pytest.raises(OSError, match="no memory for a buffer of") as raised:
        Buffer(1 << 60)
    assert raised.value.errno == errno.ENOMEM


def noise(nbytes):
    """A tensor that is at no page boundary."""
    return torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8)[1:]


def test_a_bounce_lives_while_its_request_runs_though_everybody_dropped_it(tmp_path, buffers):
    engine = posix.PosixEngine(str(tmp_path), allow_tmpfs=True, threads=1)
    large, x, y = torch.zeros(64 * MIB, dtype=torch.uint8), noise(70_000), noise(70_000)
    before, extent = engine.write(engine.alloc(64 * MIB), Memory.of(large)), engine.alloc(70_000)
    before.start()
    write = engine.write(extent, Memory.of(x))
    write.start()  # behind the large one, in the only thread
    del write
    gc.collect()
    assert not buffers[-1].expired()
    others = [Buffer(70_000) for _ in range(20)]  # would get the memory if it were free
    for other in others:
        ctypes.memset(other.address, 0, 70_000)
    before.wait()
    until(lambda: not any(transfer.state() == PENDING for transfer in list(engine._pool.transfers)))
    assert buffers[-1].expired()
    move(engine.read(extent, Memory.of(y)))
    assert torch.equal(x, y)
    engine.close()


@pytest.mark.parametrize("end", ["wait", "cancel"])
def test_a_bounce_goes_with_the_end_of_its_transfer(tmp_path, buffers, end):
    """Its owner may keep the completion for longer."""
    engine = posix.PosixEngine(str(tmp_path), allow_tmpfs=True)
    write = engine.write(engine.alloc(70_000), Memory.of(noise(70_000)))
    assert not buffers[-1].expired()
    write.start()
    getattr(write, end)()
    assert buffers[-1].expired()
    engine.close()


def test_a_read_that_was_cancelled_does_not_look_complete(tmp_path):
    """Even if all bytes had come: they were in the buffer, and not in the tensor yet."""
    engine = posix.PosixEngine(str(tmp_path), allow_tmpfs=True)
    x, y = noise(70_000)[1:], torch.zeros(70_000, dtype=torch.uint8)[1:]
    extent = engine.alloc(x.nbytes)
    move(engine.write(extent, Memory.of(x)))
    read = engine.read(extent, Memory.of(y))
    read.start()
    until(read.done)
    read.cancel()
    with pytest.raises(OSError, match="was cancelled"):
        read.wait()
    engine.close()


def test_a_cancelled_read_leaves_the_tensor_alone(tmp_path, monkeypatch):
    """Another thread may be copying the bytes to the tensor just then: `cancel` returns after it."""
    engine = posix.PosixEngine(str(tmp_path), allow_tmpfs=True)
    x, y = noise(70_000)[1:], torch.zeros(70_000, dtype=torch.uint8)[1:]
    extent = engine.alloc(x.nbytes)
    move(engine.write(extent, Memory.of(x)))
    read = engine.read(extent, Memory.of(y))
    copying, cancelled = threading.Event(), threading.Event()
    memmove = ctypes.memmove

    def slow(target, source, nbytes):
        if target == y.data_ptr():
            copying.set()
            cancelled.wait(0.3)  # a cancel that did not wait for the copy ends this at once
            assert not cancelled.is_set()
        memmove(target, source, nbytes)

    monkeypatch.setattr(ctypes, "memmove", slow)
    read.start()
    with ThreadPoolExecutor(1) as other:
        waited = other.submit(read.wait)
        copying.wait()
        assert not read.cancel(), "no bytes were left to read"
        cancelled.set()
        waited.result()
    assert torch.equal(x, y)
    engine.close()


def test_a_copy_in_memory_keeps_what_it_reads(buffers):
    engine = memory.MemoryEngine()
    x, y = noise(70_000), noise(70_000)
    extent = engine.alloc(70_000)
    move(engine.write(extent, Memory.of(x)))
    read = engine.read(extent, Memory.of(y))
    engine.free(extent)
    assert not buffers[-1].expired()
    move(read)
    assert torch.equal(x, y)
    del read
    assert buffers[-1].expired()
