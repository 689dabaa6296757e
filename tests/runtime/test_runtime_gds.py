"""The engine "kvikio", beside what all engines on streams do (test_runtime_streams): the machine, and failures."""

import dataclasses
import gc
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from ssd_fx import cli
from ssd_fx.options import Options
from ssd_fx.runtime import stats
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines import cufile, extents, gds, registry
from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.engines.drives import STRIPE
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.stores import close_stores, get_store
from tests.runtime import stub_kvikio
from tests.runtime.fake_gpu import FakeEvent, installed
from tests.runtime.harness import config_json, directories, in_a_child, load, move, put, raw, settle, store
from tests.runtime.stub_kvikio import CompatMode

N = 50_000
WARM_UP = 1  # transfers of either kind that making the engine takes in each directory


@pytest.fixture
def gpu():
    with installed("lazy") as fake:
        yield fake
        close_stores()


@pytest.fixture
def stub(gpu, monkeypatch):
    return stub_kvikio.install(monkeypatch, gpu)


@pytest.fixture
def config(stub, tmp_path):
    return config_json(tmp_path, "kvikio")


def options(*directories, engine="kvikio"):
    return Options(dirs=tuple(map(str, directories)), engine=engine, allow_tmpfs=True)


def on_the_host():
    """Within, the device is the CPU."""
    return mock.patch.dict(streams.BACKENDS, clear=True)


def stored(gpu, config, slot=0):
    """(handle, values) of a store that was released."""
    values = torch.randn(N)
    return put(gpu.tensor(values), config, slot=slot), values


# ---- the machine


def test_status_of_a_machine_with_gds(stub):
    assert cufile.status() == cufile.Status(stub_kvikio.VERSION, True, "")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"compat": True}, "kvikio is in compatibility mode"),
        ({"nvidia_fs": False, "cufile_compat": True}, "nvidia-fs is not loaded"),
        ({"driver": False}, "cuFile does not open its driver: Unable to open GDS file driver"),
    ],
)
def test_a_machine_without_gds_is_an_error_that_names_posix(stub, tmp_path, machine, reason):
    for name, value in machine.items():
        setattr(stub, name, value)
    found = cufile.status()
    assert (found.real, found.reason[: len(reason)]) == (False, reason)
    with pytest.raises(RuntimeError, match=rf"engine 'kvikio' has no GPUDirect Storage here: {reason}.*engine='posix'"):
        registry.make_engine(options(tmp_path))
    assert stub.opened == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kvikio", "stream_register"),
        ("kvikio.cufile_driver", "get"),
        ("kvikio.cufile_driver", "driver_open"),
    ],
)
def test_a_kvikio_that_is_too_old_is_none(stub, tmp_path, monkeypatch, module, name):
    """`engine="auto"` then takes engine posix instead of failing at the first store."""
    monkeypatch.delattr(stub.import_module(module), name)
    reason = rf"kvikio {stub_kvikio.VERSION} has no {module}.{name}; right would be 26.2 or later"
    assert re.match(reason, cufile.status().reason)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert gds.usable(options(tmp_path, engine="auto")) is None
    with pytest.raises(RuntimeError, match=reason):
        registry.make_engine(options(tmp_path))


def test_peer_to_peer_without_nvidia_fs_is_gds(stub, tmp_path):
    """cuFile was told to fail rather than to copy through the host: the round trip decides."""
    stub.nvidia_fs = False
    registry.make_engine(options(tmp_path)).close()
    assert stub.counts == {"write": WARM_UP, "read": WARM_UP}


def test_the_file_is_opened_by_name_and_strictly(stub, gpu, config, tmp_path):
    handle, values = stored(gpu, config)
    assert gpu.bytes_of(load(handle, values)) == raw(values)
    ((path, mode),) = stub.opened
    assert (Path(path).parent, mode) == (tmp_path, CompatMode.OFF)
    assert stub.mode is CompatMode.AUTO
    assert list(tmp_path.iterdir()) == []  # no name is left


def test_forced_without_gds(stub, gpu, tmp_path):
    stub.compat, stub.driver = True, False
    handle, values = stored(gpu, config_json(tmp_path, "kvikio-forced"))
    settle(handle)
    assert gpu.bytes_of(load(handle, values)) == raw(values)
    assert [mode for _, mode in stub.opened] == [CompatMode.AUTO]


def test_no_package(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(cufile, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/somewhere")
    monkeypatch.setitem(sys.modules, "kvikio", None)
    for engine, lacks in (("kvikio", "GPUDirect Storage"), ("kvikio-forced", "cuFile")):
        message = rf"^engine '{engine}' has no {lacks} here: import of kvikio halted.*install the extra.*engine='posix'"
        with pytest.raises(RuntimeError, match=message + "[^;]*$"):
            registry.make_engine(options(tmp_path, engine=engine))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError('Failure finding "libcufile.so.0"'),  # a subclass of it, by cuda.pathfinder
        AttributeError("module 'kvikio._lib' has no attribute 'arr'"),  # parts of two versions
    ],
)
def test_a_kvikio_that_cannot_be_loaded_is_none(stub, monkeypatch, error):
    def refuse(name):
        raise error

    monkeypatch.setattr(cufile, "_module", refuse)
    assert cufile.status() == cufile.Status("", False, f"{error}; {cufile.MISSING}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu(tmp_path):
    assert cufile.status().reason == "torch sees no CUDA device"
    with pytest.raises(RuntimeError, match="no CUDA device"):
        registry.make_engine(options(tmp_path))


@pytest.mark.parametrize(("real", "initialized", "engine"), [(1, 1, "kvikio"), (0, 1, "posix"), (1, 0, "posix")])
def test_auto(stub, monkeypatch, tmp_path, real, initialized, engine):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(initialized))
    stub.compat = not real
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = registry.make_engine(options(tmp_path, engine="auto"))
    assert made.name == engine
    made.close()


def test_auto_warns_if_gds_is_there_and_does_not_work(stub, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stub.faults["write", 0] = "error"
    with pytest.warns(RuntimeWarning, match="does not work, so ssd_fx takes engine 'posix'.*cuFile error at: -5001"):
        made = registry.make_engine(options(tmp_path, engine="auto"))
    assert made.name == "posix"
    made.close()


def test_wrong_bytes_in_the_round_trip(stub, tmp_path):
    stub.faults["read", 0] = 0  # and claims success
    stub_length = 64 << 10
    original = stub_kvikio.StreamFuture.check_bytes_done
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stub_kvikio.StreamFuture, "check_bytes_done", lambda self: original(self) or stub_length)
        with pytest.raises(OSError, match="read other bytes than it wrote") as raised:
            registry.make_engine(options(tmp_path))
    assert raised.value.filename == str(tmp_path)


def test_a_directory_that_cufile_cannot_open(stub, monkeypatch, tmp_path):
    def refuse(self, stub, path, flags):
        raise RuntimeError("cuFile error at: unsupported file system")

    monkeypatch.setattr(stub_kvikio._CuFile, "__init__", refuse)
    with pytest.raises(OSError, match="unsupported file system"):
        registry.make_engine(options(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_no_directory(stub):
    with pytest.raises(ValueError, match="engine 'kvikio' needs at least one directory"):
        registry.make_engine(Options(engine="kvikio"))


def test_cufile_is_configured_before_it_is_loaded(stub, monkeypatch, tmp_path):
    """Without a configuration kvikio's calls block; with ours cuFile's log does not land in the working directory."""
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON")
    monkeypatch.setattr(cufile, "SYSTEM", tmp_path / "missing.json")
    monkeypatch.setattr(cufile.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    cufile.status()
    path = os.environ["CUFILE_ENV_PATH_JSON"]
    assert stub.configured == path == str(tmp_path / "cufile.json")
    settings = json.loads(Path(path).read_text())
    assert settings["logging"]["dir"] == str(tmp_path)
    assert settings["properties"] == {"allow_compat_mode": False, "use_pci_p2pdma": True}


def test_copies_are_not_forced_where_cufile_was_loaded_without(stub, monkeypatch, tmp_path):
    """As `engine="auto"` loads it, which tries without copies."""
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON")
    monkeypatch.setattr(cufile, "SYSTEM", tmp_path / "missing.json")
    cufile.status()
    with pytest.raises(RuntimeError, match=r"'kvikio-forced' comes too late in this process.*a process of its own"):
        registry.make_engine(options(tmp_path, engine="kvikio-forced"))


def test_a_forked_child_leaves_the_configuration_of_its_parent(monkeypatch, tmp_path):
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    monkeypatch.setattr(cufile, "SYSTEM", tmp_path / "missing.json")
    removers = []
    monkeypatch.setattr(cufile.atexit, "register", lambda function, *args: removers.append((function, args)))
    cufile.configure()
    path = Path(os.environ["CUFILE_ENV_PATH_JSON"])
    ((remove, args),) = removers
    assert in_a_child(lambda: remove(*args) or path.exists())
    remove(*args)
    assert not path.parent.exists()


def test_the_users_configuration_of_cufile_stays(stub):
    cufile.status()
    assert stub.configured == "/somewhere/cufile.json"


def test_the_administrators_configuration_of_cufile_stays(stub, monkeypatch, tmp_path):
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON")
    (tmp_path / "cufile.json").write_text("{}")
    monkeypatch.setattr(cufile, "SYSTEM", tmp_path / "cufile.json")
    cufile.status()
    assert stub.configured == ""


def test_doctor_tells(stub, capsys):
    stub.compat = True
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "kvikio      26.10.00: no GPUDirect Storage: kvikio is in compatibility mode" in out
    stub.compat = False
    assert cli.main(["doctor"]) == 0
    assert "kvikio      26.10.00: GPUDirect Storage is real; blocks are not verified" in capsys.readouterr().out


# ---- transfers


def test_streams_are_registered_once(stub, gpu, config):
    for i in range(3):
        handle, values = stored(gpu, config, i)
        settle(handle)
        load(handle, values)
    assert stub.registered == {s.cuda_stream: 7 for s in gpu.sides}
    assert len(gpu.sides) == 1  # no two transfers were under way at a time


def test_a_result_is_had_without_waiting_for_later_transfers(stub, gpu, config):
    """To ask kvikio for a result is to wait for all that is on its stream."""
    kept = [stored(gpu, config, i) for i in range(4)]
    settle(kept[0][0])
    assert [lookup(handle).write.done() for handle, _ in kept] == [True, False, False, False]
    assert len(gpu.sides) == 4


def test_there_are_so_many_streams_and_no_more(stub, gpu, config, monkeypatch):
    monkeypatch.setattr(gds, "_LANES", 2)
    kept = [stored(gpu, config, i) for i in range(5)]
    assert len(gpu.sides) == 2
    for handle, values in kept:
        settle(handle)
        assert gpu.bytes_of(load(handle, values)) == raw(values)


@pytest.mark.parametrize(
    ("fault", "message"), [("submit", "submission"), ("error", "-5001"), (123, "moved 123 B only")]
)
def test_a_failed_write_keeps_the_tensor(stub, gpu, config, tmp_path, fault, message):
    get_store(config)
    stub.faults["write", WARM_UP] = fault
    handle, values = stored(gpu, config)
    with pytest.raises(OSError, match=rf"write of {4 * N} B at offset \d+ of the unlinked file.*{message}") as raised:
        lookup(handle).write.wait()
    assert raised.value.filename == str(tmp_path)
    with pytest.warns(RuntimeWarning, match="keeps activations in memory that do not go to"):
        store(gpu.tensor(torch.ones(1)), config, slot=99)
    assert lookup(handle).state.where == "memory"
    assert stats.stats().kept_bytes == 4 * N + 4  # nothing more goes to a directory that failed
    assert gpu.bytes_of(load(handle, values)) == raw(values)


@pytest.mark.parametrize("fault", ["submit", "error", 0, 123])
def test_a_failed_read_is_tried_again(stub, gpu, config, fault):
    handle, values = stored(gpu, config)
    settle(handle)
    stub.faults["read", WARM_UP] = fault
    assert gpu.bytes_of(load(handle, values, consume=False)) == raw(values)
    assert stub.counts["read"] == WARM_UP + 2


def test_a_read_that_always_fails(stub, gpu, config, tmp_path):
    handle, values = stored(gpu, config)
    settle(handle)
    stub.faults |= {("read", i): 7 for i in range(WARM_UP, WARM_UP + 3)}
    with pytest.raises(
        OSError, match=r"load of slot 0 of graph 'g'.*failed 3 times: read of.*moved 7 B only"
    ) as raised:
        load(handle, values)
    assert raised.value.filename == str(tmp_path)


def test_closing_waits_for_what_is_queued(stub, gpu, config):
    """The fixture fails if the file is closed, or a future dropped, before its transfer ran."""
    kept = [stored(gpu, config, i) for i in range(3)]
    assert stub.counts["write"] == WARM_UP + 3
    close_stores()
    del kept


def test_an_error_of_the_gpu_leaves_nothing_open(stub, gpu, tmp_path, monkeypatch):
    """Such an error comes back from every later call for the GPU."""
    engine = registry.make_engine(options(tmp_path))
    x, host = gpu.tensor(torch.ones(N)), torch.ones(N)
    with on_the_host():
        write = engine.write(engine.alloc(4 * N), Memory.of(host))
        move(write)
    engine.write(engine.alloc(4 * N), Memory.of(x)).start()

    def fail(event):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kvikio_file = engine.drives.files[0].opened_by._file
    with monkeypatch.context() as broken:
        broken.setattr(FakeEvent, "synchronize", fail)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.close()
    assert extents.disk_bytes() == 0
    assert (kvikio_file.closed, engine._pool._closed) == (True, True)
    gpu.finish()
    gpu.violations.clear()  # the file was closed under a transfer, as after such an error it may be


def test_another_thread_sees_a_transfer_end_while_the_engine_closes(stub, tmp_path):
    engine = registry.make_engine(options(tmp_path))

    class Ending:
        """A transfer that another thread takes out of the table just when it is looked at."""

        @property
        def cancel(self):
            engine._queued.pop(self)
            return lambda: True

    engine._queued |= {Ending(): ([], [], []) for _ in range(2)}
    engine.close()
    assert [file.fd for file in engine.drives.files] == [-1]


def test_two_directories(stub, gpu, tmp_path):
    """A small tensor goes to one of them, a large one to both."""
    dirs = directories(tmp_path, 2)
    config = json.dumps({"dirs": dirs, "engine": "kvikio", "allow_tmpfs": True})
    kept = [stored(gpu, config, i) for i in range(4)]
    assert [lookup(handle).extent.directory for handle, _ in kept] == [dirs[i % 2] for i in range(4)]
    values = torch.randn(2 * STRIPE // 4)
    large = put(gpu.tensor(values), config, slot=4)
    assert [piece.file.directory for piece in lookup(large).extent.pieces] == dirs
    for handle, expected in [*kept, (large, values)]:
        settle(handle)
        assert gpu.bytes_of(load(handle, expected)) == raw(expected)


def test_room_is_given_back(stub, gpu, config):
    offsets = set()
    for _ in range(5):
        handle, values = stored(gpu, config)
        offsets.add(settle(handle).extent.offset)
        del handle, values
    assert len(offsets) == 1


def test_cpu_tensors_go_through_posix(gpu, stub, tmp_path):
    """To the same files, and kvikio does not see them."""
    engine = registry.make_engine(options(tmp_path))
    x, y = torch.randn(N), torch.empty(N)
    with on_the_host():
        extent = engine.alloc(4 * N)
        for transfer in (engine.write(extent, Memory.of(x)), engine.read(extent, Memory.of(y))):
            move(transfer)
        assert engine.alloc(4 * N).offset != extent.offset
        engine.free(extent)
        assert engine.alloc(4 * N).offset == extent.offset
    assert torch.equal(x, y)
    assert stub.counts == {"write": WARM_UP, "read": WARM_UP}
    engine.close()


def test_tensors_of_both_kinds_are_within_the_limit(gpu, stub, tmp_path):
    limit = 40 << 20
    engine = registry.make_engine(dataclasses.replace(options(tmp_path), disk_limit=limit))
    with on_the_host():
        move(engine.write(engine.alloc(10 << 20), Memory.of(torch.empty(10 << 20, dtype=torch.uint8))))
    with pytest.warns(RuntimeWarning, match="keeps"), pytest.raises(OSError, match=f"disk_limit is {limit} B"):
        engine.alloc(limit - (1 << 20))
    assert 10 << 20 <= extents.disk_bytes() <= limit
    engine.close()


def test_the_streams_are_dealt_to_the_directories(gpu, stub, tmp_path):
    """PyTorch has 32 of them for all its users, and whoever has the same one waits for our transfers."""
    engine = registry.make_engine(options(*directories(tmp_path, 4)))
    x = gpu.tensor(torch.ones(N))
    for _ in range(4 * gds._LANES):
        engine.write(engine.alloc(4 * N), Memory.of(x)).start()
    assert len(gpu.sides) == gds._LANES
    gpu.finish()
    engine.close()


def test_what_passed_by_the_host_does_not_come_back_to_it(gpu, stub, tmp_path):
    engine = registry.make_engine(options(tmp_path))
    x, extent = gpu.tensor(torch.ones(N)), engine.alloc(4 * N)
    move(engine.write(extent, Memory.of(x)))
    with on_the_host(), pytest.raises(NotImplementedError, match="stored from cuda cannot be loaded to cpu"):
        engine.read(extent, Memory.of(torch.empty(N)))
    engine.close()


def test_one_stripe_that_fails_is_the_fault_of_its_directory(gpu, stub, tmp_path):
    engine = registry.make_engine(options(*directories(tmp_path, 2)))
    x = gpu.tensor(torch.ones(2 * STRIPE // 4))
    for fault in ("submit", "error", 123):
        stub.faults["write", stub.counts["write"] + 1] = fault  # of the second stripe
        extent = engine.alloc(2 * STRIPE)
        write = engine.write(extent, Memory.of(x))
        write.start()
        with pytest.raises(OSError, match=f"write of {STRIPE} B at offset") as raised:
            write.wait()
        assert raised.value.filename == extent.pieces[1].file.directory
        assert list(extent.errors) == [1]
        assert engine.under_way() == [0, 0]
        engine.free(extent)
    with pytest.warns(RuntimeWarning, match="keeps activations in memory"):
        engine.failed(extent, raised.value)
    assert [bool(file.no_writes) for file in engine.drives.files] == [
        file.directory == raised.value.filename for file in engine.drives.files
    ]
    engine.close()


def test_a_forked_child_keeps_no_descriptor_of_the_file(stub, gpu, config, tmp_path):
    """Else its room is taken for as long as a worker of a data loader lives."""
    handle, _ = stored(gpu, config)
    settle(handle)

    def of_the_file():
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [name for name in names if os.path.lexists(name) and str(tmp_path) in os.readlink(name)]

    assert len(of_the_file()) == 2
    assert in_a_child(lambda: of_the_file() == [])
    assert len(of_the_file()) == 2


def test_a_forked_child_runs_no_destructor_of_the_engine(stub, gpu, config):
    """A child that drops its stores must not deregister the parent's files."""
    handle, values = stored(gpu, config)
    settle(handle)
    gpu.finish()  # what is queued has the file
    engine = get_store(config).engine
    file = weakref.ref(engine.drives.files[0].opened_by._file)
    del engine
    assert in_a_child(lambda: gc.collect() >= 0 and file() is not None)
    assert gpu.bytes_of(load(handle, values)) == raw(values)


# ---- the stub


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")
def test_the_stub_has_kvikios_interface():
    """In a process of its own: libcufile is loaded once, with the configuration that it finds then."""
    script = (
        "import inspect, json, kvikio, kvikio.defaults, kvikio.cufile_driver\n"
        "f = kvikio.CuFile\n"
        "names = ('__init__', 'raw_read_async', 'raw_write_async')\n"
        "found = {n: list(inspect.signature(getattr(f, n)).parameters) for n in names}\n"
        "found['stream_register'] = list(inspect.signature(kvikio.stream_register).parameters)\n"
        "found['get'] = list(inspect.signature(kvikio.cufile_driver.get).parameters)\n"
        "modes = {m.name: int(m) for m in kvikio.CompatMode}\n"
        "assert callable(kvikio.defaults.is_compat_mode_preferred)\n"
        "assert callable(kvikio.cufile_driver.driver_open)\n"
        "with kvikio.defaults.set({'compat_mode': kvikio.CompatMode.ON}):\n"
        "    assert kvikio.defaults.get('compat_mode') == kvikio.CompatMode.ON\n"
        "print(json.dumps([found, modes]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found, modes = json.loads(done.stdout.splitlines()[-1])

    def parameters(function):
        return list(inspect.signature(function).parameters)

    with installed("lazy") as gpu:
        stub = stub_kvikio.Kvikio(gpu)
        for name in ("__init__", "raw_read_async", "raw_write_async"):
            assert found[name] == parameters(getattr(stub.kvikio.CuFile, name))
        assert found["stream_register"] == parameters(stub.kvikio.stream_register)
        assert found["get"] == parameters(stub.cufile_driver.get)
    assert modes == {mode.name: int(mode) for mode in CompatMode}
