"""The parts under the store: allocator, buffers, native pool and its fallback, configuration, fake tensors."""

import ctypes
import gc
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from harness import CPU, begin, config_json, load, op, raw, settle, store, wait, watch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.runtime import native, posix
from ssd_fx.runtime.buffers import BufferPool, size_class
from ssd_fx.runtime.config import RuntimeConfig, parse
from ssd_fx.runtime.extents import Allocator, SlabFile
from ssd_fx.runtime.fallback import ThreadPool
from ssd_fx.runtime.layout import is_alone, is_dense

KIB, MIB = 1 << 10, 1 << 20

# ---- allocator


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=120))
def test_extents_never_overlap(script):
    """Random allocations and frees: live extents are disjoint and inside the file; all freed, the file is one piece."""
    allocator, live = Allocator(), {}
    for size, victim in script:
        if victim < len(live):
            offset = sorted(live)[victim]
            allocator.free(offset, live.pop(offset))
            continue
        offset = allocator.allocate(size)
        if offset is None:
            allocator.grow(size + 5 - allocator.tail_bytes() if allocator.tail_bytes() < size + 5 else 1)
            offset = allocator.allocate(size)
        if offset is None:
            continue
        assert offset + size <= allocator.end
        assert all(offset + size <= other or other + length <= offset for other, length in live.items())
        live[offset] = size
    for offset, size in live.items():
        allocator.free(offset, size)
    assert allocator.tail_bytes() == allocator.end


def test_growing_uses_the_free_tail():
    allocator = Allocator()
    allocator.grow(10)
    assert allocator.allocate(4) == 0
    assert allocator.allocate(8) is None
    assert allocator.tail_bytes() == 6
    allocator.grow(2)
    assert allocator.allocate(8) == 4


def test_best_fit_takes_the_smallest_hole():
    allocator = Allocator()
    allocator.grow(30)
    taken = [allocator.allocate(size) for size in (10, 1, 5, 1, 13)]
    allocator.free(taken[0], 10)
    allocator.free(taken[2], 5)
    assert allocator.allocate(4) == taken[2]


def test_steady_steps_do_not_grow_the_file(tmp_path):
    """300 steps of the same 40 tensors, stored and freed in random order, two steps alive at a time: no growth."""
    file = SlabFile(str(tmp_path), step=MIB)
    rng = random.Random(0)
    sizes = [rng.randrange(1, 300 * KIB) for _ in range(40)]
    before, history = [], []
    for _ in range(300):
        live = [file.allocate(nbytes) for nbytes in rng.sample(sizes, len(sizes))]
        for extent in rng.sample(before, len(before)):
            file.free(*extent)
        before = live
        history.append(file.nbytes)
    assert history[-1] == history[1]
    assert os.fstat(file.fd).st_size == file.nbytes
    file.close()


def test_sizes_that_change_all_the_time_stay_bounded(tmp_path):
    """Dynamic shapes, random lifetimes: fragments coalesce, so the file stays below three times what is alive."""
    file = SlabFile(str(tmp_path), step=64 * KIB)
    rng = random.Random(0)
    live, most = [], 0
    for _ in range(5000):
        live.append(file.allocate(rng.randrange(1, 300 * KIB)))
        most = max(most, sum(size for _, size in live))
        while len(live) > 30 or (live and rng.random() < 0.45):
            file.free(*live.pop(rng.randrange(len(live))))
    assert file.nbytes < 3 * most
    file.close()


def test_file_is_private_and_has_no_name(tmp_path):
    file = SlabFile(str(tmp_path), step=MIB)
    status = os.fstat(file.fd)
    assert os.listdir(tmp_path) == []
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    file.close()


def test_file_without_o_tmpfile(tmp_path, monkeypatch):
    """Where O_TMPFILE is refused: a private directory, an exclusive file, unlinked at once."""
    real, made = os.open, []

    def refuse(path, flags, mode=0o777, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        made.append((os.stat(os.path.dirname(path)).st_mode & 0o777, flags & (os.O_EXCL | os.O_NOFOLLOW)))
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    file = SlabFile(str(tmp_path), step=MIB)
    monkeypatch.undo()
    assert made == [(0o700, os.O_EXCL | os.O_NOFOLLOW)]
    assert os.listdir(tmp_path) == []
    assert os.fstat(file.fd).st_nlink == 0
    file.close()


def test_directories_are_dealt_round_robin(tmp_path):
    dirs = [tmp_path / name for name in "abc"]
    for path in dirs:
        path.mkdir()
    engine = posix.PosixEngine([str(path) for path in dirs], allow_tmpfs=True, step=MIB)
    assert [engine.alloc(1000).directory for _ in range(6)] == [str(path) for path in dirs] * 2
    engine.close()


# ---- buffers


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000, MIB + 1, 3 * MIB, 10**9])
def test_size_classes_waste_little(nbytes):
    size = size_class(nbytes)
    assert size % 4096 == 0
    assert nbytes <= size
    assert size <= max(nbytes * 1.125, nbytes + 4096)
    assert size_class(size) == size


@pytest.mark.parametrize("phase", [0, 64, 4095])
def test_pooled_tensor(phase):
    pool = BufferPool()
    t = pool.tensor((300, 7), (1, 300), torch.float64, 300 * 7 * 8, phase)
    assert t.data_ptr() % 4096 == phase
    assert (t.shape, t.stride(), t.dtype) == ((300, 7), (1, 300), torch.float64)
    assert t.untyped_storage().nbytes() == 300 * 7 * 8
    t.fill_(1)
    assert t.sum() == 2100


def test_memory_comes_back_when_the_last_alias_dies():
    pool = BufferPool()
    t = pool.tensor((100_000,), (1,), torch.uint8, 100_000, 64)
    address, alias = t.data_ptr(), t[5:].view(5, -1).t()
    del t
    other = pool.tensor((100_000,), (1,), torch.uint8, 100_000, 64)
    assert other.data_ptr() != address
    del alias
    again = pool.tensor((100_000,), (1,), torch.uint8, 100_000, 64)
    assert again.data_ptr() == address
    assert pool.mappings == 2


def test_free_memory_beyond_the_limit_is_unmapped_oldest_first():
    pool = BufferPool(limit=2 * MIB)
    regions = [pool.take(MIB) for _ in range(4)]
    assert (pool.resident_bytes, pool.peak_bytes) == (4 * MIB, 4 * MIB)
    for region in regions:
        pool.give(region)
    assert pool.resident_bytes == 2 * MIB
    assert {pool.take(MIB).address for _ in range(2)} == {region.address for region in regions[2:]}
    assert pool.peak_bytes == 4 * MIB


def test_memory_that_dies_during_a_critical_section():
    pool = BufferPool()
    t = pool.tensor((MIB,), (1,), torch.uint8, MIB, 0)
    with pool._guard.lock:
        del t
        assert pool.idle_bytes == 0
    pool._guard.drain()
    assert pool.idle_bytes == size_class(MIB)


def test_pool_in_many_threads_with_collections():
    pool, errors = BufferPool(limit=MIB), []

    def churn(seed):
        rng = random.Random(seed)
        try:
            kept = []
            for i in range(300):
                n = rng.choice([5000, 70_000, 300_000])
                t = pool.tensor((n,), (1,), torch.uint8, n, 64)
                t.fill_(seed)
                cycle = [t]
                cycle.append(cycle)  # freed by the collector, anywhere
                kept = [*kept, t][-3:]
                assert all((k == seed).all() for k in kept)
                if i % 100 == 0:
                    gc.collect(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert errors == []
    pool._guard.drain()
    assert pool._guard._watchers == {}
    assert pool.resident_bytes == pool.idle_bytes <= MIB


def test_alone():
    x = torch.randn(10)
    alias = x.detach()
    assert not is_alone(alias)
    del x
    assert is_alone(alias)
    storage = alias.untyped_storage()
    assert not is_alone(alias)
    del storage
    weak = watch(alias)
    assert is_alone(alias)
    assert not weak.expired()


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((), (), True),
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((3, 1, 4), (4, 99, 1), True),
        ((3, 4), (5, 1), False),
        ((3, 4), (0, 1), False),
        ((2, 2, 2), (1, 2, 4), True),
        ((2, 2, 2), (1, 2, 2), False),
    ],
)
def test_dense(size, stride, dense):
    assert is_dense(size, stride) is dense


# ---- the pool of threads, native and fallback


@pytest.fixture(params=["native", "threads"])
def pool(request):
    found = native.library()
    assert found, "the native pool must be buildable where the tests run"
    made = native.NativePool(found, 2) if request.param == "native" else ThreadPool(2)
    yield made
    made.close()


@pytest.fixture
def scratch(tmp_path):
    fd = os.open(tmp_path / "scratch", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def submit(pool, *transfer):
    request = pool.request(*transfer)
    request.start()
    return request


def memory_of(nbytes, fill=None):
    buffer = (ctypes.c_ubyte * nbytes)()
    if fill is not None:
        ctypes.memmove(buffer, fill, nbytes)
    return buffer


@pytest.mark.parametrize("nbytes", [1, 100, 8 * MIB, 8 * MIB + 1, 30 * MIB])
def test_pool_writes_and_reads(pool, scratch, nbytes):
    data = random.Random(1).randbytes(nbytes)
    source, target = memory_of(nbytes, data), memory_of(nbytes)
    write = submit(pool, True, scratch, ctypes.addressof(source), nbytes, 77)
    assert write.wait(20_000) == native.OK
    assert os.pread(scratch, nbytes, 77) == data
    read = submit(pool, False, scratch, ctypes.addressof(target), nbytes, 77)
    assert read.wait(20_000) == native.OK
    assert bytes(target) == data
    started, ended = read.span()
    assert write.span()[1] <= started <= ended <= time.perf_counter()


def test_pool_reports_errors(pool, scratch):
    buffer = memory_of(100)
    bad = submit(pool, True, 10_000, ctypes.addressof(buffer), 100, 5)
    assert bad.wait(20_000) == native.FAILED
    assert bad.error() == (9, 5)
    os.ftruncate(scratch, 60)
    short = submit(pool, False, scratch, ctypes.addressof(buffer), 100, 10)
    assert short.wait(20_000) == native.FAILED
    assert short.error() == (native.END_OF_FILE, 60)


def test_pool_cancels_what_has_not_started(pool, scratch):
    """Two workers are busy; the third request never starts, and its memory is not looked at."""
    big = memory_of(64 * MIB, bytes(64 * MIB))
    busy = [submit(pool, True, scratch, ctypes.addressof(big), 64 * MIB, 64 * MIB * i) for i in range(6)]
    waiting = submit(pool, True, scratch, ctypes.addressof(big), 100, 1000 * MIB)
    assert waiting.cancel() == native.CANCELLED
    assert waiting.state() == native.CANCELLED
    assert waiting.wait(0) == native.CANCELLED
    final = [request.cancel() for request in busy]
    assert final[-1] == native.CANCELLED
    assert os.fstat(scratch).st_size <= 6 * 64 * MIB


def test_pool_cancel_after_the_end(pool, scratch):
    buffer = memory_of(100)
    done = submit(pool, True, scratch, ctypes.addressof(buffer), 100, 0)
    assert done.wait(20_000) == native.OK
    assert done.cancel() == native.OK


def test_request_that_was_never_started(pool, scratch):
    buffer = memory_of(100)
    request = pool.request(True, scratch, ctypes.addressof(buffer), 100, 0)
    assert request.wait(1) == native.PENDING
    assert request.cancel() == native.CANCELLED
    assert os.fstat(scratch).st_size == 0


def test_closed_pool_takes_nothing(scratch):
    buffer = memory_of(100)
    for made in (native.make_pool(2), ThreadPool(2)):
        made.close()
        assert submit(made, True, scratch, ctypes.addressof(buffer), 100, 0).wait(1000) == native.CANCELLED


def test_request_dropped_under_way(scratch):
    """Nobody waits, nobody refers to it: the pool does, until it is done."""
    pool = native.make_pool(2)
    buffer = memory_of(30 * MIB, bytes(30 * MIB))
    for _ in range(20):
        submit(pool, True, scratch, ctypes.addressof(buffer), 30 * MIB, 0)
    gc.collect()
    assert len(pool._under_way) == 20
    pool.close()


def test_reads_go_before_writes(pool, scratch):
    big = memory_of(64 * MIB, bytes(64 * MIB))
    writes = [submit(pool, True, scratch, ctypes.addressof(big), 64 * MIB, 64 * MIB * (i + 1)) for i in range(5)]
    os.pwrite(scratch, b"x" * 100, 0)
    buffer = memory_of(100)
    read = submit(pool, False, scratch, ctypes.addressof(buffer), 100, 0)
    assert read.wait(60_000) == native.OK
    assert writes[-1].cancel() == native.CANCELLED
    for write in writes:
        write.cancel()


def test_closing_ends_everything(scratch):
    big = memory_of(64 * MIB, bytes(64 * MIB))
    for made in (native.make_pool(2), ThreadPool(2)):
        requests = [submit(made, True, scratch, ctypes.addressof(big), 64 * MIB, 0) for _ in range(5)]
        made.close()
        assert all(request.state() in (native.OK, native.CANCELLED) for request in requests)
        assert requests[-1].state() == native.CANCELLED


def test_wait_times_out(pool, scratch):
    big = memory_of(64 * MIB, bytes(64 * MIB))
    requests = [submit(pool, True, scratch, ctypes.addressof(big), 64 * MIB, 0) for _ in range(4)]
    assert requests[-1].wait(1) == native.PENDING
    for request in requests:
        request.cancel()


def test_alignment_is_a_power_of_two_of_at_most_a_page(tmp_path):
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    memory, offset = native.dio_alignment(fd)
    os.close(fd)
    assert {memory, offset} <= {1 << i for i in range(13)}
    read, write = os.pipe()
    assert native.dio_alignment(read) == (4096, 4096)
    os.close(read), os.close(write)


def test_versions_agree():
    assert native.source_version() == native.VERSION


@pytest.fixture
def uncached():
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_native_pool_is_built_once_into_the_cache(uncached, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_packaged", lambda: (None, "hidden by the test"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is not None
    (built,) = (tmp_path / "ssd_fx").iterdir()
    assert built.name == f"iopool-{native.source_hash()}.so"
    native.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled twice"))
    assert native.library() is not None


def test_library_of_another_source_is_not_used(uncached, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_packaged", lambda: (None, "hidden by the test"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is not None
    (built,) = (tmp_path / "ssd_fx").iterdir()
    monkeypatch.setattr(native, "source_hash", lambda: "0123456789abcdef")
    assert native._load(built) is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "VERSION", "another")
    assert native._load(built) is None


def test_build_of_the_package_carries_the_hash(tmp_path):
    """The extension that setuptools builds fits the source; after a change of any of its files it is not used."""
    pytest.importorskip("setuptools")
    root = Path(__file__).parents[2]
    shutil.copy(root / "setup.py", tmp_path)
    shutil.copytree(native.SOURCE.parent, tmp_path / "runtime" / "native")
    for changed in (False, True):
        built = f"built-{changed}"  # a library that is loaded already would be found again under its path
        if changed:
            (tmp_path / "runtime" / "native" / "pool.h").open("a").write("/* changed */\n")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", built]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        (library,) = (tmp_path / built).rglob("_iopool*.so")
        found = native._load(library)
        assert (found is None) is changed
        if found:
            assert found.source_hash().decode() == native.source_hash()


def test_cache_that_others_may_write_is_not_trusted(uncached, tmp_path, monkeypatch):
    (tmp_path / "ssd_fx").mkdir()
    (tmp_path / "ssd_fx").chmod(0o777)
    monkeypatch.setattr(native, "_packaged", lambda: (None, "hidden by the test"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="writable by nobody else"):
        assert native.library() is None


def test_fallback_without_a_compiler(uncached, tmp_path, monkeypatch):
    """No library and no compiler: one loud warning, and the same results from Python threads."""
    monkeypatch.setattr(native, "_packaged", lambda: (None, "hidden by the test"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"Python threads.*hidden by the test.*building it failed.*'cc'") as warned:
        begin(config_json(tmp_path), offloaded=1)
    assert len(warned) == 1
    config = config_json(tmp_path)
    for nbytes in (1, 70_000, 9 * MIB + 1):
        x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        h = store(x, config)
        assert isinstance(settle(h).store.engine._pool, ThreadPool)
        assert torch.equal(load(h, x), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        native.make_pool(1).close()


# ---- configuration


def test_configuration():
    text = '{"dirs": ["/a", "/b"], "engine": "memory", "inflight": 5, "prefetch": 0, "allow_tmpfs": true}'
    assert parse(text) == RuntimeConfig(dirs=("/a", "/b"), engine="memory", inflight=5, allow_tmpfs=True)
    assert parse(text) is parse(text)
    assert parse("{}").engine == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "must be a JSON object"),
        ('{"dir": "/a", "zeal": 1}', r"unknown keys \['dir', 'zeal'\].*known are \['dirs', 'engine'"),
        ('{"inflight": "5"}', "inflight must be a int, not '5'"),
        ('{"inflight": true}', "inflight must be a int, not True"),
        ('{"dirs": [1]}', "list of strings"),
        ('{"dirs": ["a"]}', r"must be absolute.*\['a'\]"),
        ('{"inflight": 0}', "must be > 0"),
    ],
)
def test_bad_configuration(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


# ---- ops without data


def test_fake_tensors(config):
    with FakeTensorMode():
        x = torch.empty(4, 5)
        begin(config)
        h = store(x, config)
        assert (h.shape, h.dtype, h.device) == ((), torch.int64, CPU)
        op.wait_store_(h, x, 1)
        y = op.load(h, [5, 4], [1, 5], torch.bfloat16, CPU, 0, True)
        assert (y.shape, y.stride(), y.dtype) == ((5, 4), (1, 5), torch.bfloat16)
        wait(y, h)


@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
def test_make_fx(config, mode):
    def step(x, token):
        op.begin_(token, config, "g", 1, 1)
        h = op.store(x, config, "g", 0, 0)
        op.wait_store_(h, x, 1, hand_over=False)
        y = op.load(h, x.shape, x.stride(), x.dtype, x.device, 0, False)
        op.wait_load_(y, h, 1)
        return y + 1

    x, token = torch.randn(6, 50), torch.empty(0, dtype=torch.int64)
    graph = make_fx(step, tracing_mode=mode)(x, token)
    graph.graph.eliminate_dead_code()
    names = [str(node.target) for node in graph.graph.nodes if "ssd_fx" in str(node.target)]
    assert names == [f"ssd_fx.{name}.default" for name in ("begin_", "store", "wait_store_", "load", "wait_load_")]
    assert torch.equal(graph(x, token), x + 1)


def test_other_devices_name_the_engine(config):
    x = torch.randn(10)
    h = store(x, config)
    with pytest.raises(NotImplementedError, match=r"engine 'posix'.*cuda"):
        op.load(h, [10], [1], torch.float32, torch.device("cuda"), 0, True)


def test_posix_and_memory_agree(tmp_path):
    x = torch.randn(100_003)
    results = []
    for engine in ("posix", "memory", "auto"):
        h = store(x, config_json(tmp_path, engine))
        settle(h)
        results.append(raw(load(h, x)))
    assert results == [raw(x)] * 3


def test_mapped_memory_of_the_host_is_not_ours_to_count():
    pool = BufferPool()
    mmap.mmap(-1, MIB).close()
    assert pool.resident_bytes == 0
