"""Failing writes keep the tensor in memory, failing reads raise with path, offset and bytes: never wrong bytes."""

import errno
import os
import tempfile

import pytest
import torch

from ssd_fx.runtime import entries
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.engines import extents, memory, posix
from ssd_fx.runtime.engines.base import Memory, outcome
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.engines.registry import make_engine
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.native import loader
from ssd_fx.runtime.states import State
from ssd_fx.runtime.stats import stats
from ssd_fx.runtime.stores import get_store
from tests import fresh
from tests.runtime.engines import FailingEngine, around
from tests.runtime.harness import config_json, directories, load, raw, release, settle, start_load, store, wait, watch

N = 300_001


@pytest.fixture
def failing(tmp_path):
    """A function of (fails, code) that gives the configuration of such an engine."""
    return lambda fails, code=errno.EIO: config_json(tmp_path, around(lambda inner: FailingEngine(inner, fails, code)))


# ---- writes


@pytest.mark.parametrize("operation", ["alloc", "submit", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("hand_over", [True, False])
def test_a_failed_write_keeps_the_tensor(failing, operation, code, hand_over):
    config = failing(lambda op, count: op == operation and count == 1, code)
    xs = [torch.full((N,), float(i)) for i in range(3)]
    handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
    for h, x in zip(handles, xs, strict=True):
        release(h, x, hand_over=hand_over)
        if not hand_over:
            x.fill_(-1)  # the memory is somebody else's now
    del xs, x
    for i, h in enumerate(handles):
        assert torch.equal(load(h, torch.empty(N), consume=False), torch.full((N,), float(i)))
    assert lookup(handles[1]).state.where == "memory"
    assert stats().kept_bytes == 4 * N
    engine = get_store(config).engine
    assert engine.refused == ([] if operation == "alloc" else [code])
    assert get_store(config).ledger.writing_bytes <= 8 * N
    del handles, h
    assert entries.living() == []


@pytest.mark.parametrize("engine", ["posix", "memory"])
@pytest.mark.parametrize("count", [1, 2])
def test_no_memory_for_a_bounce_is_not_the_drives_fault(tmp_path, monkeypatch, engine, count):
    """The tensor stays in memory, and the next one is written."""
    config = config_json(tmp_path, engine, dirs=directories(tmp_path, count))

    def nothing(nbytes):
        raise OSError(errno.ENOMEM, f"no memory for a buffer of {nbytes} B")

    x, y = torch.arange(10.0)[1:], torch.arange(10.0)[1:]  # at no page boundary
    with monkeypatch.context() as patch:
        patch.setattr(posix, "Buffer", nothing)
        patch.setattr(memory, "Buffer", nothing)
        with pytest.warns(RuntimeWarning, match="storing slot 0 .*no memory for a buffer"):
            first = store(x, config)
    second = store(y, config, slot=1)
    assert lookup(first).state.where == "memory"
    settle(second)
    release(second, y)
    assert lookup(second).state is State.ON_DISK
    for handle in (first, second):
        assert torch.equal(load(handle, x), torch.arange(10.0)[1:])


def test_every_write_fails_and_training_goes_on(failing):
    config = failing(lambda op, count: op == "write")
    for step in range(3):
        xs = [torch.full((N,), float(10 * step + i)) for i in range(3)]
        handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
        for h, x in zip(handles, xs, strict=True):
            release(h, x)
        del xs, x
        for i, h in enumerate(handles):
            alive = watch(lookup(h).held)
            y = load(h, torch.empty(N))
            assert (y == 10 * step + i).all()
            del y
            assert alive.expired()
    assert stats().written_bytes == 0


@pytest.mark.parametrize(("code", "refused"), [(errno.EIO, [errno.EIO]), (errno.ECANCELED, [])])
def test_a_failed_write_is_the_drives_fault_even_if_nobody_wants_the_bytes(failing, code, refused):
    """Its handle dies, which cancels the write; it has failed by then. The next tensor must not go to that drive."""
    config = failing(lambda op, count: op == "write", code)
    h = store(torch.arange(9.0), config)
    del h
    assert entries.living() == []
    assert get_store(config).engine.refused == refused
    assert stats().cancelled_bytes == (0 if refused else 36)


def test_a_failed_write_frees_nothing_by_itself(failing):
    config = failing(lambda op, count: op == "write")
    x = torch.randn(N)
    alive = watch(x)
    h = store(x, config)
    release(h, x)
    del x
    store(torch.randn(3), config)
    assert not alive.expired()
    del h
    assert entries.living() == []
    assert alive.expired()


def test_real_directory_that_fails_warns_once_and_is_left_alone(tmp_path):
    """Two directories; writes to one fail: one warning, and all new extents come from the other."""
    dirs = directories(tmp_path, 2)
    config = config_json(tmp_path, dirs=dirs)
    engine = get_store(config).engine
    for extent in [engine.alloc(4 * N) for _ in dirs]:
        engine.free(extent)  # both files have room: it is the write that fails
    bad = engine.drives.files[0]
    fd, bad.fd = bad.fd, os.open(dirs[0], os.O_RDONLY)  # a directory: EBADF or EISDIR at every write

    def store_and_release(i):
        x = torch.full((N,), float(i))
        h = store(x, config, slot=i)
        release(h, x, hand_over=False)
        return h

    with pytest.warns(RuntimeWarning, match="keeps activations in memory") as warned:
        handles = [store_and_release(i) for i in range(6)]
    assert len(warned) == 1
    assert dirs[0] in str(warned[0].message)
    assert f"{4 * N} B" in str(warned[0].message)
    assert [lookup(h).state.where == "memory" for h in handles].count(True) == 1
    assert {lookup(h).extent.directory for h in handles if lookup(h).extent} == {dirs[1]}
    for i, h in enumerate(handles):
        assert (load(h, torch.empty(N)) == i).all()
    os.close(bad.fd)
    bad.fd = fd


def test_no_space(tmp_path, monkeypatch):
    """The free-space check: a disk that is full within the reserve is not touched."""
    real = os.fstatvfs

    def full(fd):
        status = list(real(fd))
        status[3] = status[4] = extents.RESERVE // status[1] + 10  # f_bfree, f_bavail in units of f_frsize
        return os.statvfs_result(status)

    monkeypatch.setattr(os, "fstatvfs", full)
    config = config_json(tmp_path)
    x = torch.randn(N)
    with pytest.warns(RuntimeWarning, match="more are needed and .* are free beyond the reserve"):
        h = store(x, config)
    store(x, config)
    assert stats().disk_bytes == 0
    assert stats().kept_bytes == 8 * N
    assert torch.equal(load(h, x, consume=False), x)


def test_file_size_limit(tmp_path):
    """EFBIG from the kernel: 1 MiB fits, the rest stays in memory, everything comes back, the exit is clean."""
    code = """
        import resource, sys, warnings, torch
        from tests.runtime.harness import *
        from ssd_fx.runtime.stats import stats
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
        config = config_json(sys.argv[1])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            xs = [torch.full((1 << 18,), float(i)) for i in range(4)]
            handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
            [settle(h) for h in handles]
            [release(h, x) for h, x in zip(handles, xs)]
            for i, h in enumerate(handles):
                assert torch.equal(load(h, xs[i], consume=False), torch.full((1 << 18,), float(i)))
        assert [w.category for w in warned] == [RuntimeWarning], [str(w.message) for w in warned]
        assert "File too large" in str(warned[0].message), str(warned[0].message)
        assert stats().kept_bytes == 2 << 20 and stats().written_bytes == 2 << 20, stats()
        print("fine")
    """
    done = fresh.run(code, tmp_path)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


# ---- reads


def test_a_read_that_fails_twice_is_tried_a_third_time(failing):
    config = failing(lambda op, count: op == "read" and count < 2)
    x = torch.randn(N)
    h = store(x, config)
    settle(h)
    assert torch.equal(load(h, x), x)


def test_a_read_that_is_tried_again_finds_no_memory(tmp_path, monkeypatch):
    """The error names the tensor, and a later load works."""
    config = config_json(tmp_path)
    x = torch.arange(10.0)[1:]
    h = store(x, config, slot=7)
    settle(h)
    release(h, x)
    y = start_load(h, x)
    descriptor = get_store(config).engine.drives.files[0].fd
    size = os.fstat(descriptor).st_size
    os.truncate(descriptor, 0)
    y = start_load(h, x)

    def nothing(nbytes):
        raise OSError(errno.ENOMEM, f"no memory for a buffer of {nbytes} B")

    monkeypatch.setattr(posix, "Buffer", nothing)
    with pytest.raises(OSError, match=r"slot 7 of graph 'g'.* no memory for a buffer"):
        wait(y, h)
    os.truncate(descriptor, size)


def test_a_read_that_always_fails(failing):
    config = failing(lambda op, count: op == "read" and count < 3)
    x = torch.randn(N)
    h = store(x, config, slot=7)
    settle(h)
    y = start_load(h, x)
    with pytest.raises(OSError, match=r"slot 7 of graph 'g' \(1200004 B\) failed 3 times: a planted failure") as caught:
        wait(y, h)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "/planted")
    assert get_store(config).engine.counts["read"] == 3
    assert torch.equal(load(h, x), x)  # the state is good: a later load works


def test_file_that_became_shorter(config, tmp_path):
    x = torch.randn(N)
    h = store(x, config)
    extent = settle(h).extent
    os.ftruncate(get_store(config).engine.drives.files[0].fd, extent.offset + 4096)
    expected = f"read of {4 * N} B at offset {extent.offset}.*end of the file at offset"
    with pytest.raises(OSError, match=expected) as caught:
        load(h, x)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(tmp_path)


def test_descriptor_that_went_bad(config):
    x = torch.randn(N)
    h = store(x, config)
    settle(h)
    file = get_store(config).engine.drives.files[0]
    fd, file.fd = file.fd, 10_000
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        load(h, x)
    assert caught.value.errno == errno.EBADF
    file.fd = fd
    assert torch.equal(load(h, x), x)


@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("operation", ["alloc", "submit", "write", "read"])
def test_the_nth_call_fails(failing, operation, nth, forever):
    """Each fault at each call, once and from then on: right bytes or a clean error, and then right bytes again."""
    config = failing(lambda op, count: op == operation and (count >= nth if forever else count == nth))
    for step in range(2):
        xs = [torch.full((20_000 + i,), float(10 * step + i)) for i in range(3)]
        handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
        for h, x in zip(handles, xs, strict=True):
            release(h, x, hand_over=False)
            x.fill_(-1)
        for i, h in enumerate(handles):
            y = start_load(h, torch.empty(20_000 + i))
            if operation == "read" and forever and get_store(config).engine.counts["read"] > nth:
                with pytest.raises(OSError, match=f"slot {i} of"):
                    wait(y, h)
            else:
                assert (wait(y, h) == 10 * step + i).all()
        del handles, h
    assert get_store(config).engine.counts[operation] > nth, "the fault was met"
    assert entries.living() == []
    assert get_store(config).ledger.writing_bytes == 0


# ---- directories


def test_directories_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist") as caught:
        check_directory(str(tmp_path / "missing"))
    assert caught.value.filename == str(tmp_path / "missing")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(NotADirectoryError, match="need a directory"):
        check_directory(str(file))
    check_directory(str(tmp_path), allow_tmpfs=True)


def test_directory_without_permission(tmp_path, monkeypatch):
    def refuses(**_):  # root may write everywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    with pytest.raises(PermissionError, match="write permission") as caught:
        check_directory(str(tmp_path))
    assert caught.value.filename == str(tmp_path)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_tmpfs_is_refused_unless_asked_for():
    with pytest.raises(OSError, match=r"tmpfs, which keeps files in RAM.*allow_tmpfs") as caught:
        check_directory("/dev/shm")
    assert caught.value.filename == "/dev/shm"
    check_directory("/dev/shm", allow_tmpfs=True)
    with pytest.raises(OSError, match="tmpfs"):
        make_engine(parse('{"dirs": ["/dev/shm"]}'))


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_tmpfs_works_when_asked_for():
    x = torch.randn(N)
    h = store(x, config_json("/dev/shm"))
    settle(h)
    assert torch.equal(load(h, x), x)


def test_posix_without_directories():
    with pytest.raises(ValueError, match="at least one directory"):
        make_engine(parse("{}"))
    with pytest.raises(ValueError, match=r"unknown engine 'tape'; known are .*'posix'"):
        make_engine(parse('{"engine": "tape"}'))


def test_cancelled_transfer_says_so(config):
    x = torch.randn(N)
    h = store(x, config)
    extent = settle(h).extent
    engine = get_store(config).engine
    engine._pool.close()
    read = engine.read(extent, Memory.of(x))
    read.start()
    error = outcome(read)
    assert error.errno == errno.ECANCELED
    assert f"read of {4 * N} B at offset {extent.offset}" in str(error)
    engine._pool = loader.make_pool(1, 1)
    assert raw(load(h, x)) == raw(x)
