"""Several directories as one: every byte comes back, and a directory that fails or fills up stops nobody."""

import ctypes
import errno
import os
import random
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.runtime import entries
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.engines.base import Memory, outcome
from ssd_fx.runtime.engines.drives import STRIPE, FileExtent, stripes
from ssd_fx.runtime.engines.extents import BackingFile
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.engines.registry import make_engine
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory.buffers import ALIGN
from ssd_fx.runtime.stats import stats
from ssd_fx.runtime.stores import get_store
from tests import fresh
from tests.runtime import gated_pool
from tests.runtime.harness import config_json, directories, load, move, raw, release, settle, store, until

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
BORDERS = [k * STRIPE + delta for k in (1, 2, 3) for delta in (-4097, -4096, -1, 0, 1, 64, 4096)]
SIZES = [1, 511, 4096, 64 * KIB, *BORDERS, 40 * MIB, 40 * MIB + 4097]


@pytest.fixture
def engine_on(tmp_path):
    """A function of a count that gives an engine on as many directories."""
    made = []

    def make(count, **options):
        made.append(PosixEngine(*directories(tmp_path, count), allow_tmpfs=True, step=MIB, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def gates():
    with gated_pool.installed() as made:
        yield made


def memory_of(nbytes, seed=None):
    """(array that owns it, memory) with noise in it, or zeros."""
    array = (ctypes.c_ubyte * nbytes)()
    if seed is not None:
        ctypes.memmove(array, random.Random(seed).randbytes(nbytes), nbytes)
    return array, Memory(ctypes.addressof(array), nbytes, CPU)


def write(engine, nbytes, seed=0):
    """(extent, bytes) of a tensor that was written."""
    array, memory = memory_of(nbytes, seed)
    extent = engine.alloc(nbytes)
    transfer = engine.write(extent, memory)
    move(transfer)
    assert transfer.done()
    assert not transfer.cancel()  # it was done: nothing is cut short
    return extent, bytes(array)


def read(engine, extent):
    array, memory = memory_of(extent.nbytes)
    move(engine.read(extent, memory))
    return bytes(array)


def pieces(extent):
    return [(piece.file.directory[-1], piece.start, piece.nbytes) for piece in extent.pieces]


@pytest.mark.parametrize("count", [2, 3])
def test_round_trip_of_every_size(engine_on, count):
    """Sizes around all borders of stripes, all stored before any is loaded."""
    engine = engine_on(count)
    stored = [write(engine, nbytes, seed) for seed, nbytes in enumerate(SIZES)]
    for extent, expected in stored:
        assert read(engine, extent) == expected
        assert len(extent.pieces) == max(1, min(count, extent.nbytes // STRIPE))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.integers(1, 2**40), st.integers(16, 21))
def test_stripes_tile_the_tensor(count, nbytes, shift):
    """They are contiguous, begin at multiples of 64 KiB, and differ by that at most."""
    drives = list(range(count))[: max(1, nbytes >> shift)]
    cut = stripes(drives, nbytes)
    at = 0
    for drive, (used, start, size) in zip(drives, cut, strict=True):
        assert used is drive
        assert (start, start % ALIGN) == (at, 0)
        assert size > 0
        at += size
    assert at == nbytes
    sizes = [size for _, _, size in cut]
    assert max(sizes) - min(sizes) < 2 * ALIGN


def test_a_large_tensor_uses_all_directories_and_a_small_one_the_idlest(engine_on):
    engine = engine_on(3)
    assert pieces(engine.alloc(3 * MIB)) == [("a", 0, MIB), ("b", MIB, MIB), ("c", 2 * MIB, MIB)]
    assert pieces(engine.alloc(2 * MIB)) == [("a", 0, MIB), ("b", MIB, MIB)]
    assert [pieces(engine.alloc(1000))[0][0] for _ in range(3)] == ["c"] * 3  # which has less than a and b
    assert pieces(engine.alloc(2 * MIB - 1)) == [("c", 0, 2 * MIB - 1)]


def test_small_tensors_avoid_a_directory_that_is_behind(engine_on, gates):
    """Writes of the first directory wait for a while: what comes meanwhile goes to the others."""
    engine = engine_on(3)
    gates.hold(engine.drives.files[0])
    _array, memory = memory_of(1000, 1)
    first = engine.alloc(1000)
    transfer = engine.write(first, memory)
    transfer.start()
    used = [pieces(write(engine, 1000)[0])[0][0] for _ in range(8)]
    assert (pieces(first)[0][0], sorted(used)) == ("a", list("bbbbcccc"))
    gates.let_go(engine.drives.files[0])
    transfer.wait()
    assert pieces(engine.alloc(1000))[0][0] == "a"  # it has nothing to do any more, and the least to keep


def test_a_slow_directory_stops_no_other(engine_on, gates):
    """Nor does a stripe that is done count as under way, because others of its tensor are not."""
    engine = engine_on(2)
    gates.hold(engine.drives.files[0])
    _array, memory = memory_of(40 * MIB, 1)
    large = engine.write(engine.alloc(40 * MIB), memory)
    large.start()
    until(lambda: not engine._pool.under_way()[1])
    small, data = write(engine, 1000)
    assert pieces(small)[0][0] == "b"
    assert read(engine, small) == data
    assert engine._pool.under_way()[0] == 20 * MIB
    assert not large.done()
    gates.let_go(engine.drives.files[0])
    large.wait()
    assert engine._pool.under_way() == [0, 0]


def test_directories_get_about_the_same(engine_on):
    engine, rng = engine_on(3), random.Random(0)
    drives = engine.drives
    live = [engine.alloc(int(2 ** rng.uniform(10, 24))) for _ in range(200)]
    assert sum(drives.live_bytes) == sum(extent.nbytes for extent in live)
    assert max(drives.live_bytes) - min(drives.live_bytes) < 2 * STRIPE
    assert sum(file.nbytes for file in drives.files) >= sum(drives.live_bytes)
    for extent in live:
        engine.free(extent)
    assert drives.live_bytes == [0, 0, 0]
    assert [len(file._free._lengths) for file in drives.files] == [1, 1, 1]


def test_the_first_error_names_its_own_directory(engine_on):
    engine = engine_on(3)
    files = engine.drives.files
    extent, _ = write(engine, 6 * MIB)
    os.ftruncate(files[1].fd, 4096)
    offset = extent.pieces[1].offset
    with pytest.raises(OSError, match=f"read of {2 * MIB} B at offset {offset} .*end of the file at offset") as caught:
        read(engine, extent)
    assert (caught.value.errno, caught.value.filename[-1]) == (errno.EIO, "b")
    engine.failed(extent, caught.value)  # of a read: nobody is retired
    assert not any(file.no_writes for file in files)


def test_every_directory_whose_write_failed_is_retired(engine_on, gates):
    """One error is raised, that of the drive that failed first; a drive that did its part goes on."""
    engine = engine_on(3)
    files = engine.drives.files
    extent = engine.alloc(6 * MIB)
    gates.fail(files[0], errno.EIO)
    gates.fail(files[2], errno.EROFS)
    gates.hold(files[0])
    _array, memory = memory_of(6 * MIB, 1)
    transfer = engine.write(extent, memory)
    transfer.start()
    until(lambda: not engine._pool.under_way()[2])
    gates.let_go(files[0])
    error = outcome(transfer)
    assert (error.errno, error.filename) == (errno.EROFS, files[2].directory)
    assert {index: each.errno for index, each in extent.errors.items()} == {0: errno.EIO, 2: errno.EROFS}
    with pytest.warns(RuntimeWarning, match="keeps activations in memory") as warned:
        engine.failed(extent, error)
    assert len(warned) == 2
    assert [bool(file.no_writes) for file in files] == [True, False, True]


@pytest.mark.filterwarnings("error")
def test_a_directory_that_fails_is_retired_and_stays_readable(engine_on):
    engine = engine_on(3)
    before, expected = write(engine, 6 * MIB)
    file = engine.drives.files[1]
    extent = engine.alloc(6 * MIB)
    fd, file.fd = file.fd, os.open(file.directory, os.O_RDONLY)  # a directory: every write fails
    _, memory = memory_of(6 * MIB, 2)
    transfer = engine.write(extent, memory)
    transfer.start()
    error = outcome(transfer)
    assert (error.errno, error.filename) in [(errno.EBADF, file.directory), (errno.EISDIR, file.directory)]
    engine.free(extent)
    with pytest.warns(RuntimeWarning, match=f"do not go to {file.directory}") as warned:
        engine.failed(extent, error)
    later = [write(engine, nbytes, seed) for seed, nbytes in enumerate([1000, 4 * MIB, 9 * MIB, 1000])]
    assert len(warned) == 1
    os.close(file.fd)
    file.fd = fd
    assert {directory for other, _ in later for directory, _, _ in pieces(other)} == {"a", "c"}
    for other, data in [(before, expected), *later]:
        assert read(engine, other) == data


@pytest.mark.parametrize("operation", ["alloc", "write"])
@pytest.mark.parametrize("nth", range(4))
def test_a_failing_part_in_the_store(tmp_path, gates, monkeypatch, operation, nth):
    """One of two directories fails at its n-th call: the bytes are right, and only a write can keep a tensor back."""
    config = config_json(tmp_path, dirs=directories(tmp_path, 2))
    engine = get_store(config).engine
    file, calls = engine.drives.files[1], []
    if operation == "write":
        gates.fail(file, errno.EIO, nth)
    else:
        allocate = file.allocate

        def full(nbytes):
            calls.append(nbytes)
            if len(calls) == nth + 1:
                raise OSError(errno.ENOSPC, "a planted failure", "/planted")
            return allocate(nbytes)

        monkeypatch.setattr(file, "allocate", full)
    xs = [torch.full((700_000 + i,), float(i)) for i in range(5)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handles = []
        for i, x in enumerate(xs):
            handles.append(store(x, config, slot=i))
            if write := lookup(handles[-1]).write:
                outcome(write)  # one after the other, so that it is known which is the n-th
            release(handles[-1], x, hand_over=False)
            x.fill_(-1)
    assert [str(each.message).split(" go to ")[1].split(":")[0] for each in warned] == [file.directory]
    kept = [i for i, h in enumerate(handles) if lookup(h).state.where == "memory"]
    assert kept == ([] if operation == "alloc" else [nth])
    assert bool(file.no_writes) is (operation == "write")
    for i, h in enumerate(handles):
        assert (load(h, torch.empty(700_000 + i)) == i).all()
    handles.clear()
    del h
    assert entries.living() == []
    assert engine.drives.live_bytes == [0, 0]


def test_one_full_directory_leaves_its_share_to_the_other(engine_on):
    engine = engine_on(2)
    engine.drives.files[0]._limit = 2 * MIB
    with pytest.warns(RuntimeWarning, match=rf"storing {3 * MIB} B failed .*disk_limit is {2 * MIB} B") as warned:
        stored = [write(engine, 6 * MIB, seed) for seed in range(3)]
    assert len(warned) == 1
    assert [pieces(extent) for extent, _ in stored] == [[("b", 0, 6 * MIB)]] * 3
    assert len(pieces(engine.alloc(4 * MIB))) == 2  # a smaller share fits
    for extent, expected in stored:
        assert read(engine, extent) == expected


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_keeps_no_room(engine_on):
    engine = engine_on(2)
    engine.drives.files[1]._limit = 2 * MIB
    with pytest.raises(RuntimeWarning, match="disk_limit"):
        engine.alloc(6 * MIB)
    assert engine.drives.live_bytes == [0, 0]


@pytest.mark.filterwarnings("error")
def test_all_directories_full(tmp_path):
    """The tensor stays in memory; what was taken of one directory before the other refused is free again."""
    dirs = directories(tmp_path, 2)
    config = config_json(tmp_path, dirs=dirs, disk_limit=MIB)
    x = torch.randn(MIB)
    with pytest.warns(RuntimeWarning, match="disk_limit") as warned:
        h = store(x, config)
    store(x, config)  # without another warning, which would be an error here
    assert sorted(str(w.message).split(" go to ")[1].split(":")[0] for w in warned) == dirs
    assert lookup(h).state.where == "memory"
    assert stats().kept_bytes == 8 * MIB
    small = torch.randn(1000)
    h2 = store(small, config)
    assert settle(h2).extent.directory in dirs
    assert raw(load(h2, small)) == raw(small)
    assert raw(load(h, x, consume=False)) == raw(x)
    assert stats().disk_bytes <= 2 * MIB


def behind_others(engine, gates, places):
    """Writes that hold all threads of some drives until the gates are opened. Each drive has one."""
    kept = []
    for place in places:
        gates.hold(engine.drives.files[place])
        array, memory = memory_of(1000, 1)
        extent = FileExtent(1000, [engine.drives.take(place, 0, 1000)])
        kept.append((engine.write(extent, memory), array))
        kept[-1][0].start()
    return kept


def test_cancel_ends_all_parts(engine_on, gates):
    """Writes that wait are cancelled: all parts say so, the memory is not looked at, and no drive has it under way."""
    engine = engine_on(3, threads=1)
    kept = behind_others(engine, gates, range(3))
    array, memory = memory_of(6 * MIB, 1)
    extent = engine.alloc(6 * MIB)
    transfer = engine.write(extent, memory)
    transfer.start()
    assert not transfer.done()
    waiting = engine._pool.under_way()
    assert all(nbytes > 2 * MIB for nbytes in waiting)
    assert transfer.cancel()
    assert transfer.done()
    assert outcome(transfer).errno == errno.ECANCELED
    assert engine._pool.under_way() == [nbytes - 2 * MIB for nbytes in waiting]
    del array
    engine.free(extent)
    gates.open_all()
    for other, _ in kept:
        other.wait()
    assert engine._pool.under_way() == [0] * 3


def test_cancelled_when_only_some_parts_were_done(engine_on, gates):
    engine = engine_on(2, threads=1)
    kept = behind_others(engine, gates, [1])
    _array, memory = memory_of(4 * MIB, 1)
    transfer = engine.write(engine.alloc(4 * MIB), memory)
    transfer.start()
    until(lambda: not engine._pool.under_way()[0])
    assert not transfer.done()
    assert transfer.cancel()
    gates.open_all()
    kept[0][0].wait()


def test_span_covers_all_parts(engine_on, gates):
    engine = engine_on(3)
    gates.hold(engine.drives.files[0])
    _array, memory = memory_of(12 * MIB, 1)
    transfer = engine.write(engine.alloc(12 * MIB), memory)
    before = time.perf_counter()
    transfer.start()
    until(lambda: not any(engine._pool.under_way()[1:]))
    others_ended = time.perf_counter()
    gates.let_go(engine.drives.files[0])
    transfer.wait()
    started, ended = transfer.span()
    assert before <= started <= others_ended <= ended <= time.perf_counter()


def test_an_engine_that_cannot_be_made_leaves_none(tmp_path):
    opened = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    with pytest.raises(FileNotFoundError):
        make_engine(parse(config_json(tmp_path, dirs=[*directories(tmp_path, 2), str(tmp_path / "missing")])))
    assert len(os.listdir("/proc/self/fd")) == opened
    # the kernel lists a thread for a moment after it was joined
    until(lambda: len(os.listdir("/proc/self/task")) <= threads)


def test_fork_and_close(tmp_path):
    """The child stripes over files of its own; the parent's handles work on; closing leaves no file and no thread."""
    code = """
        import os, sys, torch
        from ssd_fx.runtime.stores import close_stores, get_store
        from tests.runtime.harness import *
        torch.set_num_threads(1)  # OpenMP does not survive a fork
        before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        config = config_json(sys.argv[1], dirs=sys.argv[1:])
        xs = [torch.full((1 << 20,), float(i)) for i in range(4)]
        handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
        parent = {id(file) for file in get_store(config).engine.drives.files}
        child = os.fork()
        if child == 0:
            h = store(xs[1], config)
            assert len(settle(h).extent.pieces) == 2
            assert {id(file) for file in get_store(config).engine.drives.files}.isdisjoint(parent)
            assert torch.equal(load(h, xs[1], consume=False), xs[1])
            del h
            print("child fine", flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for h, x in zip(handles, xs):
            settle(h)
            assert torch.equal(load(h, x, consume=False), x)
        close_stores()
        after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        assert after[0] == before[0], (before, after)
        assert after[1] <= before[1] + 1, (before, after)  # the janitor
        print("parent fine")
    """
    done = fresh.run(code, *directories(tmp_path, 2), timeout_s=60)
    assert (done.stdout, done.returncode) == ("child fine\nparent fine\n", 0), done.stderr


# ---- the limit on a file, and on a file system that several share


@pytest.mark.parametrize("limit", [MIB, 3 * MIB + 4096, 10 * MIB])
def test_a_file_never_exceeds_its_limit(tmp_path, limit):
    file, live, refused, rng = BackingFile(str(tmp_path), step=MIB, limit=limit), [], [], random.Random(0)
    for _ in range(300):
        try:
            live.append(file.allocate(rng.randrange(1, MIB)))
        except OSError as error:
            refused.append((error.errno, error.filename, str(error).count(f"disk_limit is {limit} B")))
        assert os.fstat(file.fd).st_size == file.nbytes <= limit
        while live and rng.random() < 0.4:
            file.free(*live.pop(rng.randrange(len(live))))
    assert set(refused) == {(errno.ENOSPC, str(tmp_path), 1)}
    for extent in live:
        file.free(*extent)
    assert file.allocate(limit)[1] == limit  # all of it can be used
    file.close()


def test_one_warning_names_path_limit_and_need(tmp_path):
    config = config_json(tmp_path, disk_limit=6 * MIB)
    xs = [torch.full((MIB,), float(i)) for i in range(4)]
    with pytest.warns(RuntimeWarning) as warned:
        handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
    assert len(warned) == 1
    message = str(warned[0].message)
    assert str(tmp_path) in message
    assert f"storing {4 * MIB} B failed" in message
    assert f"would have {8 * MIB} B, and disk_limit is {6 * MIB} B" in message
    assert stats().kept_bytes == 12 * MIB
    assert stats().disk_bytes == 4 * MIB
    for h, x in zip(handles, xs, strict=True):
        assert raw(load(h, x, consume=False)) == raw(x)


@pytest.fixture
def small_file_system(tmp_path):
    """A mount point with 64 MiB of its own."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the permission to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)  # a process of a test that failed may be there


def test_two_processes_leave_the_reserve_free_together(small_file_system, monkeypatch):
    """They take 1 MiB in turn, each in its own file, until neither gets more: 5% are free all the time, and no more
    than that when both are full; when one ends its space is there for the other."""
    code = textwrap.dedent("""
        import sys
        from ssd_fx.runtime.engines.extents import BackingFile
        file = BackingFile(sys.argv[1], step=1 << 20)
        for line in sys.stdin:
            try:
                print(file.allocate(1 << 20)[1], flush=True)
            except OSError as error:
                print(-error.errno, flush=True)
    """)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen([sys.executable, "-c", code, str(small_file_system)], env=path, text=True, **pipes)
    ours = BackingFile(str(small_file_system), step=MIB)
    reserve = 64 * MIB // 20

    def free():
        status = os.statvfs(small_file_system)
        return status.f_bavail * status.f_frsize

    def take_there():
        other.stdin.write("\n")
        other.stdin.flush()
        return int(other.stdout.readline())

    def take_here():
        try:
            return ours.allocate(MIB)[1]
        except OSError as error:
            return -error.errno

    taken = {take_here: 0, take_there: 0}
    for _ in range(70):
        for take in taken:
            got = take()
            assert got in (MIB, -errno.ENOSPC)
            taken[take] += max(got, 0)
            assert free() >= reserve
    assert sum(taken.values()) == 60 * MIB  # of 60.8 beyond the reserve
    _, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    assert free() == 64 * MIB - taken[take_here]
    assert take_here() == MIB
    ours.close()


@pytest.mark.parametrize("when", ["before", "behind", "the first file"])
def test_a_ctrl_c_while_drives_are_closed_leaves_no_drive_open(engine_on, monkeypatch, when):
    """Closing waits for threads and for the file system, so that is when people press it.

    No thread may go on after its file is closed: another file of the process may get the number of the descriptor.
    """
    engine = engine_on(3)
    closing = engine.drives.files[-1] if when == "the first file" else engine._pool
    close = closing.close

    def interrupted():
        monkeypatch.setattr(closing, "close", close)
        if when != "before":
            close()
        raise KeyboardInterrupt

    monkeypatch.setattr(closing, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert [file.fd for file in engine.drives.files] == [-1] * 3
    assert engine._pool._closed
