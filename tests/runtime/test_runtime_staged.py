"""Files behind pinned memory, for devices without another way, and transfers in two parts.

What goes wrong with streams is tested for all engines in test_runtime_streams.
"""

import errno
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ssd_fx.options import Options
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines import registry, staged
from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE, Memory
from ssd_fx.runtime.engines.drives import STRIPE
from ssd_fx.runtime.engines.staged import Chain
from tests.runtime.fake_gpu import installed
from tests.runtime.harness import directories, move, raw


class Part:
    """A completion whose end is the test's to say."""

    def __init__(self, error=None):
        self.error, self.started, self.cancelled, self.over = error, False, False, threading.Event()

    def start(self):
        self.started = True

    def done(self):
        return self.over.is_set()

    def wait(self):
        assert self.over.wait(10)
        if self.error:
            raise self.error

    def cancel(self):
        cut_short = not self.over.is_set()
        self.cancelled = True
        self.error = self.error or (OSError(errno.ECANCELED, "cut short") if cut_short else None)
        self.over.set()
        return cut_short

    def span(self):
        return (0.0, 1.0)


@pytest.fixture
def follow():
    with ThreadPoolExecutor(1) as made:
        yield made


def test_a_copy_of_the_device_that_fails_is_an_error_of_the_transfer(follow):
    """Not of whoever looks at the writes next, nor of the drive, which would get no more tensors."""

    class Broken(Part):
        def start(self):
            raise RuntimeError("planted: the device is lost")

    first = Part()
    chain = Chain(first, Broken(), follow, keep=None)
    chain.start()
    first.over.set()
    with pytest.raises(OSError, match="planted: the device is lost") as raised:
        chain.wait()
    assert raised.value.errno in NOT_OF_THE_DRIVE
    assert chain.done()


def test_the_second_part_starts_when_the_first_has_ended(follow):
    first, second = Part(), Part()
    chain = Chain(first, second, follow, keep=None)
    chain.start()
    assert (first.started, second.started, chain.done()) == (True, False, False)
    first.over.set()
    follow.submit(lambda: None).result()
    assert second.started
    assert not chain.done()
    second.over.set()
    for _ in range(2):
        chain.wait()
    assert chain.done()
    assert not chain.cancel()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_either_part_is_that_of_the_whole(follow, failing):
    parts = [Part(), Part()]
    parts[failing].error = OSError(5, "broken")
    chain = Chain(*parts, follow, keep=None)
    chain.start()
    for part in parts:
        part.over.set()
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            chain.wait()
    assert chain.done()
    assert parts[1].started is (failing == 1)


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_cancelled_while_so_many_parts_have_ended(follow, ended):
    parts = [Part(), Part()]
    chain = Chain(*parts, follow, keep=None)
    chain.start()
    for part in parts[:ended]:
        part.over.set()
        follow.submit(lambda: None).result()
    assert chain.cancel() is (ended < 2)
    assert chain.done()
    assert parts[1].started is (ended > 0)  # nothing starts behind a cancel
    if ended < 2:
        with pytest.raises(OSError, match=r"cancelled|cut short"):
            chain.wait()


def test_what_was_never_started_is_no_success(follow):
    parts = [Part(), Part()]
    chain = Chain(*parts, follow, keep=None)
    assert not chain.done()
    with pytest.raises(OSError, match="never queued"):
        chain.wait()
    assert chain.cancel()
    assert not parts[1].started


def test_memory_is_let_go_at_the_end(follow):
    parts = [Part(), Part()]
    kept = torch.empty(8)
    gone = weakref.ref(kept)
    chain = Chain(*parts, follow, keep=kept)
    del kept
    chain.start()
    for part in parts:
        assert gone() is not None
        part.over.set()
    chain.wait()
    assert gone() is None


def test_at_the_end_of_the_interpreter_no_thread_is_needed():
    """From then on threads get no work; a handle may still die, and a store may still be made."""
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    parts = [Part(), Part()]
    parts[0].over.set()
    chain = Chain(*parts, ended, keep=None)
    chain.start()
    parts[1].over.set()
    chain.wait()


@pytest.mark.parametrize(
    ("accelerator", "hip", "needed"),
    [
        (None, None, None),
        ("cuda", None, None),
        ("cuda", "6.4", "cuda"),
        ("xpu", None, "xpu"),
        ("openreg", None, "openreg"),
    ],
)
def test_who_needs_it(monkeypatch, accelerator, hip, needed):
    """CUDA has another way to files. ROCm calls itself CUDA, and has not."""
    monkeypatch.setattr(streams, "accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert staged.needed() == needed


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 4097, 2 * STRIPE + 5])
def test_tensors_of_the_cpu_beside_those_of_the_device(monkeypatch, tmp_path, count, nbytes):
    monkeypatch.setattr(staged, "needed", lambda: "xpu")
    dirs = tuple(directories(tmp_path, count))
    with pytest.warns(RuntimeWarning, match="ssd_fx has no fast way between xpu and files"):
        engine = registry.make_engine(Options(dirs=dirs, engine="posix", allow_tmpfs=True))
    assert engine.devices >= {"cpu", "xpu"}
    x, y = torch.randint(0, 256, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    extent = engine.alloc(nbytes)
    for transfer in (engine.write(extent, Memory.of(x)), engine.read(extent, Memory.of(y))):
        move(transfer)
        began, ended = transfer.span()
        assert 0 < began <= ended
    assert torch.equal(x, y)
    assert all(file.nbytes for file in engine.drives.files[: len(extent.pieces)])
    engine.free(extent)
    engine.close()


def test_a_load_does_not_wait_for_kernels_that_are_queued_while_its_file_is_read(tmp_path):
    with installed("sides first") as gpu:
        with pytest.warns(RuntimeWarning, match="no fast way"):
            engine = staged.StagedEngine("cuda", str(tmp_path), allow_tmpfs=True)
        x, y = gpu.tensor(torch.ones(5000)), gpu.tensor(torch.zeros(5000))
        extent = engine.alloc(20_000)
        move(engine.write(extent, Memory.of(x)))
        load = engine.read(extent, Memory.of(y))
        file, read = load._first, threading.Event()
        load._first = types.SimpleNamespace(start=file.start, span=file.span, wait=lambda: (read.wait(), file.wait()))
        load.start()
        before = gpu.compute.queued
        for _ in range(5):
            gpu.queue(gpu.compute, lambda: None)
        read.set()
        load.wait()
        assert gpu.compute.ran == before
        assert gpu.bytes_of(y) == raw(torch.ones(5000))
        gpu.finish()
        engine.close()


def test_a_failed_write_retires_the_directory(tmp_path):
    with pytest.warns(RuntimeWarning, match="no fast way"):
        engine = staged.StagedEngine("xpu", str(tmp_path), allow_tmpfs=True)
    extent = engine.alloc(10)
    with pytest.warns(RuntimeWarning, match="keeps activations in memory"):
        engine.failed(extent, OSError(5, "broken", str(tmp_path)))
    with pytest.raises(OSError, match="an earlier write here failed"):
        engine.alloc(10)
    engine.close()
