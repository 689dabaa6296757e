"""Tensors on a CUDA device through the staging of the native pool, against a driver that does everything too late."""

import ctypes
import errno
import functools
import gc
import os
import random
import re
import shutil
import subprocess

import pytest
import torch

from ssd_fx.runtime.device import cuda_driver
from ssd_fx.runtime.engines import posix
from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE
from ssd_fx.runtime.native import loader, pool
from tests.runtime import native_parts
from tests.runtime.fake_cuda import ADDRESSES, DeviceMemory, FakeDriver, FakeEvent
from tests.runtime.harness import move
from tests.runtime.test_runtime_checksums import Aligned, Behind, expect_mismatch

KIB, MIB = 1 << 10, 1 << 20
NOISE = random.Random(0).randbytes(18 * MIB)
OTHER = random.Random(1).randbytes(18 * MIB)
SIZES = (1, 511, 4096, 70_001, MIB, 4 * MIB, 4 * MIB + 1, 8 * MIB + 3, 17 * MIB + 5)


def built(directory, changes=(), flags=()):
    """The pool from sources of which every (old, new) in `changes` is replaced."""
    source = directory / "native"
    shutil.copytree(loader.SOURCE.parent, source)
    for old, new in changes:
        (path,) = (path for path in source.glob("*.[ch]") if old in path.read_text())
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))
    target = directory / "iopool.so"
    command = ["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", *flags, source / "iopool.c", "-o", target]
    subprocess.run(command, check=True)
    return loader.Library(str(target))


@functools.cache
def with_small_halves(scratch):
    """Eight copies a piece instead of two, so that each half is used again and again."""
    return built(scratch, flags=["-DHALF=((size_t)1<<20)"])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("small")


@pytest.fixture(params=["lazy", "eager"])
def cuda(request):
    return FakeDriver(eager=request.param == "eager")


@pytest.fixture
def make_engine(tmp_path):
    made = []

    def make(cuda, **options):
        engine = posix.PosixEngine(str(tmp_path), allow_tmpfs=True, step=MIB, cuda=lambda: cuda, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make_engine, cuda):
    return make_engine(cuda)


def write(engine, data, index=0):
    source = DeviceMemory(len(data), index)
    source.write_late(data)
    extent = engine.alloc(len(data))
    move(engine.write(extent, source.memory))
    return extent


def read(engine, extent, index=0):
    """Into memory that kernels launched before are still writing to."""
    target = DeviceMemory(extent.nbytes, index)
    target.write_late(OTHER[: extent.nbytes])
    move(engine.read(extent, target.memory))
    return target.bytes()


def round_trips(engine, sizes=SIZES):
    for nbytes in sizes:
        data = NOISE[-nbytes:]
        extent = write(engine, data)
        padding = -nbytes % engine.drives.files[0].align
        # Compared outside of the asserts: pytest's picture of how millions of bytes differ takes longer than all tests.
        with Behind(engine) as file:
            written = file.get(extent.offset, nbytes + padding) == data + bytes(padding)
        assert written
        loaded = read(engine, extent) == data
        assert loaded
        engine.free(extent)


@pytest.mark.parametrize("halves", ["4 MiB", "1 MiB"])
@pytest.mark.parametrize("checksums", [True, False])
def test_round_trip(make_engine, cuda, halves, checksums, scratch, monkeypatch):
    """A kernel launched before the write makes the bytes, one launched before the read still uses the target."""
    if halves == "1 MiB":
        small = with_small_halves(scratch)
        monkeypatch.setattr(loader, "make_pool", lambda drives, threads: pool.Pool(small, drives, threads))
    engine, before = make_engine(cuda, checksums=checksums), cuda.copied_bytes
    round_trips(engine)
    assert cuda.copied_bytes - before == 2 * sum(SIZES)
    assert (engine._pool.summed_bytes() > 0) is checksums
    assert cuda.unfinished == 0


WAIT = "    int result = part->device->cuda.event_synchronize(part->request->event);"
FAULTS = {
    "no wait for the event": (WAIT, "    int result = 0;"),
    "no wait for the copy that is to be written": (
        "        if (!synchronize(part, at, stream, failure)) return 0;\n",
        "",
    ),
    "no wait before a half is read into again": (
        "        if (at > from && !synchronize(part, at, stream, failure)) return 0;",
        "        if (0) return 0;",
    ),
    "no wait at the end of a read": ("    return synchronize(part, from, stream, failure);", "    return 1;"),
    "the padding is not zeroed": ("    if (write) memset(half + content, 0, bytes - content);\n", ""),
    "the padding is copied": ("? 0 : (part->content - from < bytes ? part->content - from : bytes)", "? 0 : bytes"),
    "always the same half": ("    int turn = 0;\n    if (!ready", "    int turn = 1;\n    if (!ready"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(make_engine, fault, tmp_path_factory, monkeypatch):
    """The tests of this file fail where the code does not do what it must."""
    directory = tmp_path_factory.mktemp("fault")
    faulty = built(directory, [FAULTS[fault]], ["-DHALF=((size_t)1<<20)"])
    monkeypatch.setattr(loader, "make_pool", lambda drives, threads: pool.Pool(faulty, drives, threads))
    with pytest.raises((AssertionError, OSError)):
        round_trips(make_engine(FakeDriver(), checksums=False), sizes=(4 * MIB + 1, 70_001))


def test_several_requests_at_a_time(engine, cuda):
    """Both workers, two devices, writes and reads mixed."""
    data = [NOISE[i : i + 5 * MIB + 7 * i] for i in range(12)]
    extents, writes, reads = [], [], []
    for i, content in enumerate(data):
        source = DeviceMemory(len(content), i % 2)
        source.write_late(content)
        extents.append(engine.alloc(len(content)))
        writes.append((engine.write(extents[-1], source.memory), source))
        writes[-1][0].start()
    for transfer, _ in writes:
        transfer.wait()
    for i, extent in enumerate(extents):
        target = DeviceMemory(extent.nbytes, i % 2)
        target.write_late(OTHER[: extent.nbytes])
        reads.append((engine.read(extent, target.memory), target))
        reads[-1][0].start()
    for transfer, _ in reads:
        transfer.wait()
    assert [target.bytes() for _, target in reads] == data


def test_staging_is_allocated_once_per_worker(make_engine, cuda):
    engine, before = make_engine(cuda, threads=1), cuda.made
    assert cuda.pinned_bytes == 0
    for _ in range(5):
        for index in (0, 1, 0):
            extent = write(engine, NOISE[: 9 * MIB], index)
            assert read(engine, extent, index) == NOISE[: 9 * MIB]
    assert (cuda.pinned, cuda.streams, cuda.made - before) == (1, 2, 3)
    assert cuda.pinned_bytes == 2 * 4 * MIB + 4096
    engine.close()
    assert (cuda.pinned, cuda.streams, cuda.pinned_bytes) == (0, 0, 0)
    engine.close = lambda: None


@pytest.mark.parametrize("block", [0, 3, 4, 8, 9])
def test_damage_is_found(engine, block):
    nbytes = 9 * MIB + 100
    extent = write(engine, NOISE[:nbytes])
    at = extent.offset + block * MIB
    with Behind(engine) as file:
        file.put(at + 99, bytes([NOISE[block * MIB + 99] ^ 16]))
        target = DeviceMemory(nbytes)
        completion = engine.read(extent, target.memory)
        completion.start()
        with pytest.raises(OSError, match=f"checksum mismatch in the block at offset {at}:"):
            completion.wait()
        expect_mismatch(engine, extent, at)  # into host memory too
        file.put(at + 99, NOISE[block * MIB + 99 :][:1])
    assert read(engine, extent) == NOISE[:nbytes]


def test_padding_is_summed_too(engine):
    """It is of no use to anybody, but bytes that changed there say that the disk cannot be trusted."""
    extent = write(engine, NOISE[: MIB + 1])
    with Behind(engine) as file:
        file.put(extent.offset + MIB + 2, b"x")
    expect_mismatch(engine, extent, extent.offset + MIB)


def test_from_the_device_into_host_memory(engine):
    for nbytes in (70_001, 2 * MIB):
        extent = write(engine, NOISE[:nbytes])
        target = Aligned(nbytes, phase=64)
        move(engine.read(extent, target.memory))
        assert target.bytes() == NOISE[:nbytes]


def test_from_host_memory_to_a_device(engine):
    """What is whole on disk can be read; where a tail stayed in memory, it is refused by name."""
    unaligned, aligned = Aligned(MIB + 5, NOISE[: MIB + 5], phase=64), Aligned(MIB + 5, NOISE[: MIB + 5])
    extent = engine.alloc(MIB + 5)
    move(engine.write(extent, unaligned.memory))
    assert read(engine, extent) == NOISE[: MIB + 5]
    extent = engine.alloc(MIB + 5)
    move(engine.write(extent, aligned.memory))
    target = DeviceMemory(MIB + 5)
    with pytest.raises(NotImplementedError, match="stored from the CPU cannot be loaded to cuda:0"):
        engine.read(extent, target.memory)


def failing(completion, match):
    """The errno of the failure."""
    completion.start()
    with pytest.raises(OSError, match=match) as raised:
        completion.wait()
    assert raised.value.filename
    return raised.value.errno


ON_EVERY_PATH = ("cuCtxSetCurrent", "cuStreamCreate", "cuEventSynchronize", "cuMemHostAlloc")
NTH = [(name, 1) for name in ON_EVERY_PATH] + [(n, i) for n in ("cuMemcpyAsync", "cuStreamSynchronize") for i in (1, 2)]


@pytest.mark.parametrize(("function", "nth"), NTH)
@pytest.mark.parametrize(("operation", "code", "expected"), [("write", 719, errno.EFAULT), ("read", 2, errno.ENOMEM)])
def test_errors_of_the_driver(make_engine, cuda, function, nth, operation, code, expected):
    """Each is named with its code, leaves no copy under way, and the next transfer works. None is the drive's."""
    earlier = make_engine(cuda, threads=1)
    first = write(earlier, NOISE[: 6 * MIB])
    engine = make_engine(cuda, threads=1)  # whose worker has no stream and no memory yet
    os.dup2(earlier.drives.files[0].fd, engine.drives.files[0].fd)
    device = DeviceMemory(6 * MIB)
    device.write_late(NOISE[: 6 * MIB])
    extent = engine.alloc(6 * MIB) if operation == "write" else first
    cuda.fail(function, nth, code)
    where = re.escape(f"{operation} of {6 * MIB} B at offset {extent.offset} of the unlinked file in")
    transfer = (engine.write if operation == "write" else engine.read)(extent, device.memory)
    assert failing(transfer, f"{where} .*{function} returned CUDA error {code}") == expected
    assert expected in NOT_OF_THE_DRIVE
    assert cuda.unfinished == 0
    assert read(engine, write(engine, OTHER[: 6 * MIB])) == OTHER[: 6 * MIB]


def test_errors_of_the_file_leave_no_copy_under_way(make_engine, cuda, scratch, monkeypatch):
    """The file ends in the middle of a piece, while the half before is on its way to the device."""
    small = with_small_halves(scratch)
    monkeypatch.setattr(loader, "make_pool", lambda drives, threads: pool.Pool(small, drives, threads))
    engine = make_engine(cuda)
    extent = write(engine, NOISE[: 6 * MIB])
    os.ftruncate(engine.drives.files[0].fd, extent.offset + 3 * MIB)
    target = DeviceMemory(6 * MIB)
    assert failing(engine.read(extent, target.memory), "hit the end of the file") == errno.EIO
    assert cuda.unfinished == 0
    read_only = os.open(f"/proc/self/fd/{engine.drives.files[0].fd}", os.O_RDONLY)
    os.dup2(read_only, engine.drives.files[0].fd)
    os.close(read_only)
    device = DeviceMemory(6 * MIB)
    completion = engine.write(extent, device.memory)
    completion.start()
    with pytest.raises(OSError, match="Bad file descriptor"):
        completion.wait()
    assert cuda.unfinished == 0


def test_events_live_until_the_end_and_no_longer(make_engine, cuda):
    """Nobody but the request keeps the event, and the pool keeps the request, whoever drops it."""
    gc.collect()
    before = FakeEvent.alive
    engine = make_engine(cuda, threads=1)
    sources, completions = [], []
    for _ in range(6):
        sources.append(DeviceMemory(17 * MIB))
        sources[-1].write_late(NOISE[: 17 * MIB])
        completions.append(engine.write(engine.alloc(17 * MIB), sources[-1].memory))
        assert FakeEvent.alive == before + len(completions) - 1  # made at the start, not before
        completions[-1].start()
    assert FakeEvent.alive == before + 6
    last = completions.pop()
    del completions
    gc.collect()
    assert FakeEvent.alive == before + 6
    last.wait()
    assert FakeEvent.alive == before + 5  # the others are dropped when somebody asks, here when the engine ends


def test_cancelled_requests_copy_nothing(make_engine, cuda):
    engine = make_engine(cuda, threads=1)
    device = DeviceMemory(17 * MIB)
    busy = [engine.write(engine.alloc(17 * MIB), device.memory) for _ in range(4)]
    for completion in busy:
        completion.start()
    never = engine.write(engine.alloc(17 * MIB), device.memory)
    assert never.cancel()
    ended = [completion.cancel() for completion in reversed(busy)]
    assert ended[0]
    copies = cuda.copies
    assert cuda.unfinished == 0
    with pytest.raises(OSError, match="was cancelled"):
        never.wait()
    assert cuda.copies == copies


# ---- the table of functions


def test_the_table_is_in_the_order_of_the_struct():
    header = (loader.SOURCE.parent / "pool.h").read_text()
    members = re.findall(r"int \(\*(\w+)\)\(", header)
    assert [f"fake_{member}" for member in members] == list(ADDRESSES)
    meanings = {
        "set_context": "cuCtxSetCurrent",
        "stream_create": "cuStreamCreate",
        "stream_destroy": "cuStreamDestroy_v2",
        "event_synchronize": "cuEventSynchronize",
        "stream_synchronize": "cuStreamSynchronize",
        "copy": "cuMemcpyAsync",
        "host_alloc": "cuMemHostAlloc",
        "host_free": "cuMemFreeHost",
        "capture_mode": "cuThreadExchangeStreamCaptureMode",
    }
    assert tuple(meanings[member] for member in members) == cuda_driver.FUNCTIONS
    assert f"#define DEVICES {cuda_driver.DEVICES}\n" in header
    assert native_parts.library().device_size() == ctypes.sizeof(cuda_driver.Device)


def test_too_many_devices():
    with pytest.raises(ValueError, match="device 32 is beyond the 32 devices"):
        cuda_driver.describe(FakeDriver(), 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_round_trip_on_a_device(tmp_path):
    """The real driver: writes start while the kernels that make the bytes run, reads while others use the memory."""
    engine = posix.PosixEngine(str(tmp_path), allow_tmpfs=True, step=MIB)
    for nbytes in SIZES:
        a = torch.randn(3000, 3000, device="cuda")
        for _ in range(20):
            a = a @ a / 3000
        x = (a.view(-1).view(torch.uint8)[:nbytes] if nbytes <= a.nbytes else a.view(-1).view(torch.uint8)) + 0
        extent = engine.alloc(x.numel())
        move(engine.write(extent, posix.Memory.of(x)))
        want = x.cpu()
        y = torch.empty_like(x)
        y.fill_(7)
        move(engine.read(extent, posix.Memory.of(y)))
        assert torch.equal(y.cpu(), want)
    engine.close()
