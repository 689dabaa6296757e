"""A machine whose GPU the I/O threads cannot reach: no libcuda, or one that does not work, or none of NVIDIA's."""

import ctypes
import warnings

import pytest
import torch

from ssd_fx.calibration.rates import out_of_memory
from ssd_fx.runtime.device import cuda_driver, streams
from ssd_fx.runtime.engines import posix
from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.stores import get_store
from tests.runtime.harness import config_json, load, store

N = 10_240  # ten pages, so that it is whole on the drive and a device could read it


@pytest.fixture(autouse=True)
def anew():
    cuda_driver.cuda.cache_clear()
    yield
    cuda_driver.cuda.cache_clear()


class Library:
    """A libcuda whose function `broken` returns `code`, or is missing."""

    def __init__(self, broken, code=None):
        self.broken, self.code = broken, code

    def __getattr__(self, name):
        if name != self.broken:
            return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
        if self.code is None:
            raise AttributeError(f"undefined symbol: {name}")
        return lambda *arguments: self.code


def no_library(name):
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


CASES = {
    "none": (no_library, "libcuda.so.1: cannot open shared object file"),
    "no device": (lambda name: Library("cuInit", 100), "cuInit returned 100"),
    "too old": (lambda name: Library("cuMemHostAlloc"), "undefined symbol: cuMemHostAlloc"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_at_once_and_what_would_do(monkeypatch, case):
    load_library, reason = CASES[case]
    monkeypatch.setattr(cuda_driver, "load_library", load_library)
    with pytest.raises(RuntimeError, match=rf"NVIDIA's driver.*{reason}.*engine='memory'") as raised:
        cuda_driver.cuda()
    assert not isinstance(raised.value, OSError)  # which would be taken for the directory's


@pytest.mark.parametrize("operation", ["write", "read"])
def test_the_directory_is_not_to_blame(monkeypatch, tmp_path, operation):
    """A store on the GPU raises; it is no failed write, after which a directory takes nothing any more."""
    monkeypatch.setattr(cuda_driver, "load_library", no_library)
    x = torch.randn(N)
    config = config_json(tmp_path)
    handle = store(x, config) if operation == "read" else None
    if handle is not None:
        (entry,) = (e for e in get_store(config).ledger.writing)
        entry.write.wait()
        get_store(config).writer.reap()
        del x
    on_gpu = classmethod(lambda cls, t: cls(t.data_ptr(), t.numel() * t.itemsize, torch.device("cuda", 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "of", on_gpu)
            with pytest.raises(RuntimeError, match="libcuda"):
                load(handle, torch.empty(N)) if operation == "read" else store(x, config)
        engine = get_store(config).engine
        assert isinstance(engine, posix.PosixEngine)
        extent = engine.alloc(100)  # raises where a directory takes no more
        engine.free(extent)


class Noting(Library):
    """A libcuda that notes what is called, and returns `code` from `broken`. `memory`: what it pins."""

    def __init__(self, broken="", code=0):
        super().__init__(broken, code)
        self.calls = []
        self.memory = ctypes.create_string_buffer(8)

    def __getattr__(self, name):
        made = {
            "cuDevicePrimaryCtxRetain": 0x77,
            "cuStreamCreateWithPriority": 0x99,
            "cuMemHostAlloc": ctypes.addressof(self.memory),
        }

        def call(*arguments):
            self.calls.append((name, *(getattr(each, "value", None) for each in arguments)))
            if name in made:
                arguments[0]._obj.value = made[name]
            return self.code if name == self.broken else 0

        return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0) if name in cuda_driver.FUNCTIONS and not self.calls else call


@pytest.mark.parametrize("code", [0, 2])
def test_a_stream_of_our_own(monkeypatch, code):
    """It comes before PyTorch's, and the thread is afterwards in the context in which it was."""
    library = Noting("cuStreamCreateWithPriority", code)
    monkeypatch.setattr(cuda_driver, "load_library", lambda name: library)
    if code:
        with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority returned 2"):
            cuda_driver.cuda().stream(0)
    else:
        assert cuda_driver.cuda().stream(0) == 0x99
    assert library.calls[-3:] == [
        ("cuCtxPushCurrent_v2", 0x77),
        ("cuStreamCreateWithPriority", None, 1, -1),
        ("cuCtxPopCurrent_v2", None),
    ]


def test_pinned_memory_is_freed_with_its_tensor(monkeypatch):
    """PyTorch's allocator would keep it, and have taken the next power of two."""
    library = Noting()
    monkeypatch.setattr(cuda_driver, "load_library", lambda name: library)
    pinned = cuda_driver.cuda().pinned(0, 8)
    assert ("cuMemHostAlloc", None, 8, 1) in library.calls
    pinned.fill_(7)
    assert library.memory.raw == bytes([7] * 8)
    held = pinned[2:]
    del pinned
    assert library.calls[-1][0] == "cuCtxPopCurrent_v2"
    assert "cuMemFreeHost" not in [call[0] for call in library.calls]
    del held
    assert ("cuMemFreeHost", ctypes.addressof(library.memory)) in library.calls


def test_memory_that_cannot_be_pinned_is_no_fault_of_the_driver(monkeypatch):
    """Calibration then plans with typical rates, as for any device without free memory."""
    library = Noting("cuMemHostAlloc", 2)
    monkeypatch.setattr(cuda_driver, "load_library", lambda name: library)
    with pytest.raises(torch.OutOfMemoryError, match="8 B of host memory cannot be pinned") as raised:
        cuda_driver.cuda().pinned(0, 8)
    assert out_of_memory(raised.value)
    assert library.calls[-1][0] == "cuCtxPopCurrent_v2"


def test_without_the_driver_memory_and_streams_are_pytorch_s(monkeypatch, caplog):
    monkeypatch.setattr(cuda_driver, "load_library", no_library)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    streams._driver.cache_clear()
    assert streams._driver() is None
    assert "streams and pinned memory are PyTorch's: NVIDIA's driver cannot be used here" in caplog.text
    streams._driver.cache_clear()
