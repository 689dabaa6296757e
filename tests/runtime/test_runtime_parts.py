"""The parts under the store: allocator, buffers, native pool, configuration, fake tensors."""

import ctypes
import gc
import os
import random
import shutil
import subprocess
import sys
import time
import types
from array import array
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.compat import DispatchKey, _dispatch_tls_is_dispatch_key_excluded, _dispatch_tls_set_dispatch_key_excluded
from ssd_fx.options import Options
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.engines.base import outcome
from ssd_fx.runtime.engines.drives import FileExtent, Piece
from ssd_fx.runtime.engines.posix import Transfer
from ssd_fx.runtime.entries import stand_in
from ssd_fx.runtime.layout import dense_form, is_alone, versioned_alias
from ssd_fx.runtime.native import loader
from ssd_fx.runtime.native.pool import CANCELLED, FAILED, OK, PENDING
from tests.runtime.harness import CPU, begin, config_json, op, store, wait, watch

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("excluded", [False, True])
def test_an_alias_shares_the_counter_whatever_keys_are_excluded(excluded):
    """Inductor's code excludes the key under which `detach` shares it. The thread is left as it was."""
    x = torch.zeros(4)
    key = DispatchKey.ADInplaceOrView
    _dispatch_tls_set_dispatch_key_excluded(key, excluded)
    try:
        found = versioned_alias(x)
        assert _dispatch_tls_is_dispatch_key_excluded(key) == excluded
    finally:
        _dispatch_tls_set_dispatch_key_excluded(key, False)
    x.add_(1)
    assert found._version == x._version == 1


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
    x = torch.empty_strided(size, stride)
    assert (dense_form(x)[:2] == (size, stride)) is dense


# ---- the pool of threads


@pytest.fixture
def pool():
    made = loader.make_pool(1, 2)
    yield made
    made.close()


@pytest.fixture
def scratch(tmp_path):
    fd = os.open(tmp_path / "scratch", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def request(pool, write, fd, address, nbytes, offset):
    """A transfer that is not started."""
    file = types.SimpleNamespace(fd=fd, directory="/scratch")
    extent = FileExtent(nbytes, [Piece(0, file, offset, nbytes, 0, nbytes)])
    made = pool.request(write, array("q", [0, fd, address, nbytes, offset, 0, 0]))
    return Transfer(pool, made, write, extent)


def submit(pool, *transfer):
    made = request(pool, *transfer)
    made.start()
    return made


def state_of(transfer):
    """The state of a transfer, after its end."""
    outcome(transfer)
    return transfer.state()


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
    assert state_of(write) == OK
    assert os.pread(scratch, nbytes, 77) == data
    read = submit(pool, False, scratch, ctypes.addressof(target), nbytes, 77)
    assert state_of(read) == OK
    assert bytes(target) == data
    started, ended = read.span()
    assert write.span()[1] <= started <= ended <= time.perf_counter()


def test_pool_reports_errors(pool, scratch):
    buffer = memory_of(100)
    bad = submit(pool, True, 10_000, ctypes.addressof(buffer), 100, 5)
    assert state_of(bad) == FAILED
    assert "failed at offset 5: Bad file descriptor" in str(outcome(bad))
    os.ftruncate(scratch, 60)
    short = submit(pool, False, scratch, ctypes.addressof(buffer), 100, 10)
    assert state_of(short) == FAILED
    assert "hit the end of the file at offset 60" in str(outcome(short))


def test_pool_cancels_what_has_not_started(pool, scratch):
    """Two workers are busy; the third request never starts, and its memory is not looked at."""
    big = memory_of(64 * MIB, bytes(64 * MIB))
    busy = [submit(pool, True, scratch, ctypes.addressof(big), 64 * MIB, 64 * MIB * i) for i in range(6)]
    waiting = submit(pool, True, scratch, ctypes.addressof(big), 100, 1000 * MIB)
    assert waiting.cancel()
    assert waiting.state() == state_of(waiting) == CANCELLED
    cut_short = [transfer.cancel() for transfer in busy]
    assert cut_short[-1]
    assert os.fstat(scratch).st_size <= 6 * 64 * MIB


def test_pool_cancel_after_the_end(pool, scratch):
    buffer = memory_of(100)
    done = submit(pool, True, scratch, ctypes.addressof(buffer), 100, 0)
    assert state_of(done) == OK
    assert not done.cancel()


def test_request_that_was_never_started(pool, scratch):
    buffer = memory_of(100)
    never = request(pool, True, scratch, ctypes.addressof(buffer), 100, 0)
    assert pool.library.wait(never._address, 1) == PENDING
    assert never.cancel()
    assert never.state() == CANCELLED
    assert never.span() == (0.0, 0.0)  # else the trace has it last since the machine was started
    assert os.fstat(scratch).st_size == 0


def test_closed_pool_takes_nothing(scratch):
    buffer = memory_of(100)
    made = loader.make_pool(1, 2)
    made.close()
    assert state_of(submit(made, True, scratch, ctypes.addressof(buffer), 100, 0)) == CANCELLED


def test_request_dropped_under_way(scratch):
    """Nobody waits, nobody refers to it: the pool does, until it is done."""
    pool = loader.make_pool(1, 2)
    buffer = memory_of(30 * MIB, bytes(30 * MIB))
    for _ in range(20):
        submit(pool, True, scratch, ctypes.addressof(buffer), 30 * MIB, 0)
    gc.collect()
    assert len(pool.transfers) == 20
    pool.close()


def test_reads_go_before_writes(pool, scratch):
    big = memory_of(64 * MIB, bytes(64 * MIB))
    writes = [submit(pool, True, scratch, ctypes.addressof(big), 64 * MIB, 64 * MIB * (i + 1)) for i in range(5)]
    os.pwrite(scratch, b"x" * 100, 0)
    buffer = memory_of(100)
    read = submit(pool, False, scratch, ctypes.addressof(buffer), 100, 0)
    assert state_of(read) == OK
    cut_short = writes[-1].cancel()  # on a busy machine all may be done before this thread is back
    assert cut_short or writes[-1].span()[0] >= read.span()[0]
    for write in writes:
        write.cancel()


def test_closing_ends_everything(scratch):
    big = memory_of(64 * MIB, bytes(64 * MIB))
    made = loader.make_pool(1, 2)
    requests = [submit(made, True, scratch, ctypes.addressof(big), 64 * MIB, 0) for _ in range(5)]
    made.close()
    assert all(transfer.state() in (OK, CANCELLED) for transfer in requests)
    assert requests[-1].state() == CANCELLED


def test_wait_times_out(pool, scratch):
    big = memory_of(64 * MIB, bytes(64 * MIB))
    requests = [submit(pool, True, scratch, ctypes.addressof(big), 64 * MIB, 0) for _ in range(4)]
    assert pool.library.wait(requests[-1]._address, 1) == PENDING
    for transfer in requests:
        transfer.cancel()


def test_alignment_is_a_power_of_two_of_at_most_a_page(tmp_path):
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
    memory, offset = loader.dio_alignment(fd)
    os.close(fd)
    assert {memory, offset} <= {1 << i for i in range(13)}
    read, write = os.pipe()
    assert loader.dio_alignment(read) == (4096, 4096)
    os.close(read), os.close(write)


@pytest.fixture
def uncached():
    loader.library.cache_clear()
    yield
    loader.library.cache_clear()


def test_native_pool_is_built_once_into_the_cache(uncached, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_packaged", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.library()
    (built,) = (tmp_path / "ssd_fx").iterdir()
    assert built.name == f"iopool-{loader.source_hash()}.so"
    loader.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled twice"))
    loader.library()


def test_build_of_the_package_carries_the_hash(tmp_path):
    """The extension that setuptools builds fits the source; after a change of any of its files it is not used."""
    pytest.importorskip("setuptools")
    root = Path(__file__).parents[2]
    for name in ("setup.py", "README.md"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(loader.SOURCE.parent, tmp_path / "runtime" / "native")
    for changed in (False, True):
        built = f"built-{changed}"  # a library that is loaded already would be found again under its path
        if changed:
            (tmp_path / "runtime" / "native" / "pool.h").open("a").write("/* changed */\n")
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", built]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        (library,) = (tmp_path / built).rglob("_iopool*.so")
        found = loader._load(library)
        assert (found is None) is changed
        if found:
            assert found.source_hash().decode() == loader.source_hash()


def test_cache_that_others_may_write_is_not_trusted(uncached, tmp_path, monkeypatch):
    (tmp_path / "ssd_fx").mkdir()
    (tmp_path / "ssd_fx").chmod(0o777)
    monkeypatch.setattr(loader, "_packaged", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="writable by nobody else"):
        loader.library()


COMPILERS = {
    "none": ("", r"building one failed \(.*No such file or directory: 'cc'\)\. Right would be a C compiler"),
    "a broken one": ("echo no such option >&2; exit 1", r"building one failed \(.*exit status 1\.: no such option\)"),
    "of something else": ("echo nonsense >$9", r"building one failed \(.*iopool-\w+\.so: "),
}


@pytest.mark.parametrize(("script", "message"), COMPILERS.values(), ids=COMPILERS)
def test_no_compiler(uncached, tmp_path, monkeypatch, script, message):
    """No library, and none can be made: the error has the compiler's words. With a compiler the next call works."""
    monkeypatch.setattr(loader, "_packaged", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if script:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "cc").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(RuntimeError, match=message):
            begin(config_json(tmp_path), offloaded=1)
    loader.make_pool(1, 1).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_the_element_of_a_handle_is_zero(dtype):
    """Deterministic algorithms would fill it with NaN, and Inductor's `nan_asserts` look at every output."""
    torch.use_deterministic_algorithms(True)
    try:
        made = stand_in((3, 4), dtype, torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert made.untyped_storage().nbytes() == dtype.itemsize
    assert made.tolist() == [[0] * 4] * 3


# ---- configuration


def test_configuration():
    text = '{"dirs": ["/a", "/b"], "engine": "memory", "inflight": 5, "allow_tmpfs": true}'
    assert parse(text) == Options(dirs=("/a", "/b"), budget=0, engine="memory", inflight=5, allow_tmpfs=True)
    assert parse(text) is parse(text)
    assert parse("{}").engine == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "has no options: .*line 1"),
        ("[]", "has no options: "),
        ('{"dir": "/a"}', "unexpected keyword argument 'dir'"),
        ('{"dirs": ["a"]}', r"must be absolute.*\['a'\]"),
        ('{"inflight": -1}', "inflight must be >= 0, not -1"),
        ('{"ranks": 0}', "ranks must be > 0, not 0"),
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
        assert (h.shape, h.stride(), h.dtype, h.device) == ((4, 5), (0, 0), torch.float32, CPU)
        op.wait_store_(h, x, 1)
        y = op.load(h, [5, 4], [1, 5], torch.bfloat16, CPU, 0)
        assert (y.shape, y.stride(), y.dtype) == ((5, 4), (1, 5), torch.bfloat16)
        wait(y, h)


@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
def test_make_fx(config, mode):
    def step(x, token):
        op.begin_(token, config, "g", 1, 1)
        h = op.store(x, config, "g", 0, 0)
        op.wait_store_(h, x, 1, hand_over=False)
        y = op.load(h, x.shape, x.stride(), x.dtype, x.device, 0)
        op.wait_load_(y, h, 1)
        return y + 1

    x, token = torch.randn(6, 50), torch.empty(0, dtype=torch.int64)
    graph = make_fx(step, tracing_mode=mode)(x, token)
    graph.graph.eliminate_dead_code()
    names = [str(node.target) for node in graph.graph.nodes if "ssd_fx" in str(node.target)]
    assert names == [f"ssd_fx.{name}.default" for name in ("begin_", "store", "wait_store_", "load", "wait_load_")]
    assert torch.equal(graph(x, token), x + 1)


def test_load_to_another_device(config):
    x = torch.randn(10)
    h = store(x, config)
    with pytest.raises(RuntimeError, match=r"slot 0 of graph 'g' \(40 B\) was stored from cpu and cannot .* to cuda"):
        op.load(h, [10], [1], torch.float32, torch.device("cuda"), 0)
