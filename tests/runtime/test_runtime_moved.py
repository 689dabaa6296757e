"""A device's tensor that moved on from host memory to the drive, and is read back on the device.

The bytes that go to the drive lie in pinned host memory then, and the memory that they come back to is the device's:
whatever form an engine gives to what it writes from the host, the device must be able to read it.
"""

import random
from collections.abc import Callable

import pytest
import torch

from ssd_fx.options import Options
from ssd_fx.runtime.device import cuda_driver, streams
from ssd_fx.runtime.engines.base import Engine, Memory, outcome
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.engines.registry import make_engine
from ssd_fx.runtime.engines.tiered import TieredEngine
from ssd_fx.runtime.memory import numa
from tests.runtime import stub_kvikio
from tests.runtime.fake_cuda import FakeDriver, FakeEvent, library
from tests.runtime.fake_gpu import FakeGpu, installed
from tests.runtime.harness import move

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 511, 4095, 4096, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB, MIB + 513, 5 * MIB + 77)
CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 1)
NOISE = random.Random(0).randbytes(2 * SIZES[-1])
ENGINES = ("memory", "posix", "striped", "kvikio", "kvikio-forced")


class Driver(FakeDriver):
    """For the I/O threads: device memory is what the fake GPU gave, and an event is behind all of its kernels."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def record(self, index: int) -> FakeEvent:
        self.gpu.record(self.gpu.compute).reach()
        return super().record(index)


@pytest.fixture(params=["lazy", "sides first"])
def gpu(request, monkeypatch):
    """A fake GPU, at first for the type "cpu", as `make` of the engines needs it; `as_cuda` makes it device cuda:1."""
    with installed(request.param) as fake:
        yield fake


def as_cuda(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on its memory is a `Memory` of DEVICE, and host memory is nobody's."""
    monkeypatch.setattr(streams, "of", lambda device: gpu if device.type == "cuda" else None)
    monkeypatch.setattr(numa, "_cores", lambda device: set())  # on a machine with a GPU it would ask that one


@pytest.fixture
def stub(gpu: FakeGpu, monkeypatch) -> stub_kvikio.Kvikio:
    return stub_kvikio.install(monkeypatch, gpu)


@pytest.fixture
def make(gpu: FakeGpu, stub, tmp_path, monkeypatch) -> Callable[[str], Engine]:
    """An engine by the name that a user gives it, but for "striped": posix over two directories."""

    def posix(*directories: str) -> PosixEngine:
        return PosixEngine(*directories, allow_tmpfs=True, step=MIB, cuda=lambda: driver)

    def made(name: str) -> Engine:
        if name == "striped":
            for part in "ab":
                (tmp_path / part).mkdir()
            return posix(*(str(tmp_path / part) for part in "ab"))
        if name == "posix":
            return posix(str(tmp_path))
        config = Options(dirs=(str(tmp_path),), engine=name, allow_tmpfs=True)
        return make_engine(config)

    driver = Driver(gpu)
    monkeypatch.setattr(cuda_driver, "cuda", lambda: driver)  # which engine "kvikio" takes
    return made


@pytest.fixture(params=ENGINES)
def drive(request, make, gpu, monkeypatch):
    engine = make(request.param)
    as_cuda(gpu, monkeypatch)
    yield engine
    engine.close()


def on_device(gpu: FakeGpu, data: bytes) -> tuple[torch.Tensor, Memory]:
    """A tensor of the device that a kernel, which is queued only, will fill with `data`."""
    x = gpu.tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    library().fake_declare(x.data_ptr(), len(data))
    return x, Memory(x.data_ptr(), len(data), DEVICE)


def stored(engine: Engine, gpu: FakeGpu, data: bytes, tier: str = "host"):
    """The extent of a tensor that was written, and whose memory is gone."""
    x, memory = on_device(gpu, data)
    extent = engine.alloc(len(data), tier)
    move(engine.write(extent, memory))
    library().fake_forget(x.data_ptr())
    return extent


def loaded(engine: Engine, gpu: FakeGpu, extent) -> bytes:
    """What the device finds of it."""
    y, memory = on_device(gpu, bytes(extent.nbytes))
    move(engine.read(extent, memory))
    library().fake_forget(y.data_ptr())
    return gpu.bytes_of(y)


def moved(drive: Engine, gpu: FakeGpu, data: bytes):
    """(tiers, extent) of a tensor that host memory had no room for when the next one came."""
    host = MemoryEngine()
    engine = TieredEngine(host, drive, len(data), 1 << 30)
    first = stored(engine, gpu, data)
    stored(engine, gpu, NOISE[-len(data) :])
    assert first.moving is not None
    assert outcome(first.moving) is None
    engine._reap()
    assert first.host is None
    assert first.drive is not None
    return engine, first


@pytest.mark.parametrize("nbytes", SIZES)
def test_it_comes_back_whole(drive: Engine, gpu: FakeGpu, nbytes: int) -> None:
    """Others are written afterwards, into whatever room looks free."""
    data = NOISE[:nbytes]
    engine, extent = moved(drive, gpu, data)
    others = [stored(engine, gpu, NOISE[-nbytes - i : -i], "ssd") for i in (1, 2, 3)]
    right = loaded(engine, gpu, extent) == data
    assert right
    for i, other in enumerate(others, 1):
        assert loaded(engine, gpu, other) == NOISE[-nbytes - i : -i]


def test_it_comes_back_twice_and_its_room_is_used_again(drive: Engine, gpu: FakeGpu) -> None:
    for start in range(3):
        data = NOISE[start : start + 300_001]
        engine, extent = moved(drive, gpu, data)
        assert loaded(engine, gpu, extent) == data
        assert loaded(engine, gpu, extent) == data
        engine.free(extent)
        assert engine.host_bytes == len(data)


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_memory_of_a_device_knows_where_it_goes_back(gpu: FakeGpu, monkeypatch, nbytes: int) -> None:
    as_cuda(gpu, monkeypatch)
    Driver(gpu)
    host = MemoryEngine()
    located = host.located(stored(host, gpu, NOISE[:nbytes]))
    assert (located.nbytes, located.device, located.reader) == (nbytes, CPU, DEVICE)


@pytest.mark.parametrize("nbytes", [4095, 64 * KIB + 1, MIB + 513])
def test_what_was_written_for_the_host_is_refused_or_right(drive: Engine, gpu: FakeGpu, nbytes: int) -> None:
    """A tensor of the CPU that is read on a device: never other bytes."""
    x = torch.frombuffer(bytearray(NOISE[:nbytes]), dtype=torch.uint8)
    extent = drive.alloc(nbytes)
    write = drive.write(extent, Memory.of(x))
    move(write)
    stored(drive, gpu, NOISE[-nbytes:])
    try:
        found: object = loaded(drive, gpu, extent)
    except NotImplementedError as error:
        found = str(error)
    right = found in (NOISE[:nbytes], "what was stored from the CPU cannot be loaded to cuda:1")
    assert right


def test_the_tensor_of_a_device_in_the_hosts_memory_is_refused(gpu: FakeGpu, monkeypatch) -> None:
    as_cuda(gpu, monkeypatch)
    Driver(gpu)
    host = MemoryEngine()
    extent = stored(host, gpu, NOISE[:100])
    with pytest.raises(NotImplementedError, match="stored from cuda:1 cannot be loaded to cpu"):
        host.read(extent, Memory.of(torch.empty(100, dtype=torch.uint8)))


def test_a_drive_that_has_no_room_for_it_leaves_it_in_host_memory(drive: Engine, gpu: FakeGpu, monkeypatch) -> None:
    """And the room that was meant for it is taken by nobody else while it has it."""

    def full(extent, memory):
        raise OSError(28, "full", "/full")

    data = NOISE[:300_001]
    host = MemoryEngine()
    engine = TieredEngine(host, drive, len(data), 1 << 30)
    first = stored(engine, gpu, data)
    with monkeypatch.context() as patch:
        patch.setattr(drive, "write", full)
        patch.setattr(drive, "failed", lambda extent, error: None)
        with pytest.raises(OSError, match="full"):
            stored(engine, gpu, NOISE[-len(data) :])
    assert loaded(engine, gpu, first) == data


def test_gds_is_not_asked_for_what_it_never_had(make, stub, gpu: FakeGpu, monkeypatch) -> None:
    """What the I/O threads wrote they read, and compare with its checksums."""
    engine = make("kvikio")
    as_cuda(gpu, monkeypatch)
    before = dict(stub.counts)
    tiers, extent = moved(engine, gpu, NOISE[:70_001])
    assert not extent.drive.past_host
    assert loaded(tiers, gpu, extent) == NOISE[:70_001]
    assert stub.counts == before
    engine.close()
