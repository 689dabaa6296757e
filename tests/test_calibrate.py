"""The machine's rates: measured once, kept, and never in the way of a compilation."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import pwd
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch.utils._python_dispatch import TorchDispatchMode

import ssd_fx
from ssd_fx import Config, cli, mounts
from ssd_fx.backend import machine_of
from ssd_fx.calibration import cache, calibrate, launches, rates, round_trip, timing, transfers
from ssd_fx.calibration.transfers import host_copies
from ssd_fx.command import limits
from ssd_fx.options import Options
from ssd_fx.passes.cost.machine import NODE_S, Machine
from ssd_fx.runtime import trace
from ssd_fx.runtime.device import device_trace
from tests import fresh
from tests.passes.lowered import captured
from tests.runtime.fake_gpu import FakeGpu, installed

CPU = torch.device("cpu")
ONES = torch.ones(2, 2)
COMPUTE = {"flops": 2e11, "memory_bw": 2e10, "kernel_s": 1e-5}
DISK = {"write_bw": 1.5e9, "read_bw": 1e9, "latency_s": 1e-4, "drag_s_per_byte": 1e-10}


def forget() -> None:
    """What this process has read or measured; the file stays."""
    calibrate._known.clear()


class Calls:
    """Stands in for the measurements: how often each was made, and what it gives."""

    def __init__(self) -> None:
        self.compute = self.disk = 0
        self.rates: dict[str, object] = dict(COMPUTE)
        self.error: OSError | None = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Calls]:
    """An empty cache directory, and measurements that only count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Calls()

    def compute(self: rates.Compute) -> dict[str, object]:
        made.compute += 1
        return made.rates

    def disk(self: transfers.Transfers) -> dict[str, float]:
        made.disk += 1
        self.engine.close()
        if made.error:
            raise made.error
        return DISK

    monkeypatch.setattr(rates.Compute, "rates", compute)
    monkeypatch.setattr(transfers.Transfers, "rates", disk)
    monkeypatch.setattr(calibrate, "node_s", lambda config, device: 1e-4)
    forget()
    yield made
    forget()


def section(key: str) -> str:
    return key.partition(" ")[0]


def kept() -> list[str]:
    """The sections that the file has rates of."""
    return [section(key) for key, entry in cache.read().items() if entry.rates]


def config_for(path: Path, **more: object) -> Options:
    return Options(dirs=(str(path),), engine="posix", **more)  # type: ignore[arg-type]


def test_it_measures_once_for_all_directories_of_a_drive(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    machines = {calibrate.calibrated(config_for(tmp_path / d), CPU) for d in ("a", "b", "a")}
    forget()  # as another process: from the file
    machines.add(calibrate.calibrated(config_for(tmp_path / "a"), CPU))
    assert (calls.compute, calls.disk) == (1, 1)
    assert machines == {
        Machine(2e11, 2e10, 1.5e9, 1e9, latency_s=1e-4, node_s=1e-4, drag_s_per_byte=1e-10, kernel_s=1e-5),
    }


def test_another_engine_or_other_checksums_are_another_drive(calls: Calls, tmp_path: Path) -> None:
    calibrate.calibrated(config_for(tmp_path), CPU)
    calibrate.calibrated(config_for(tmp_path, checksums=False), CPU)
    calibrate.calibrated(Options(engine="memory"), CPU)
    assert (calls.compute, calls.disk) == (1, 3)


def test_a_drive_of_another_name_is_another_drive(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has the same number, as on another node with the same home directory, or after a start."""
    calibrate.calibrated(config_for(tmp_path), CPU)
    monkeypatch.setattr(mounts, "name_of", lambda _: "eui.0002")
    calibrate.calibrated(config_for(tmp_path), CPU)
    assert (calls.compute, calls.disk) == (1, 2)


def test_another_number_of_threads_is_another_machine(calls: Calls, tmp_path: Path) -> None:
    calibrate.calibrated(config_for(tmp_path), CPU)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        calibrate.calibrated(config_for(tmp_path), CPU)
    finally:
        torch.set_num_threads(threads)
    assert (calls.compute, calls.disk) == (2, 2)


def test_threads_that_compile_at_once_measure_once(calls: Calls, tmp_path: Path) -> None:
    threads = [threading.Thread(target=calibrate.calibrated, args=(config_for(tmp_path), CPU)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (calls.compute, calls.disk) == (1, 1)


OF_NOW = f'{{"version": {cache._VERSION}'  # how a file of this version begins
NO_RATES = {
    "empty": "",
    "no JSON": "rates",
    "a list": "[]",
    "another version": '{"version": 0}',
    "nothing measured": OF_NOW + "}",
    "a number": OF_NOW + ', "measured": 1}',
    "no entry": OF_NOW + ', "measured": {"k": 1}}',
    "another entry": OF_NOW + ', "measured": {"k": {"speed": 1}}}',
    "no rate": OF_NOW + ', "measured": {"k": {"rates": {"flops": "fast"}}}}',
}


@pytest.mark.parametrize("text", NO_RATES.values(), ids=NO_RATES)
def test_a_file_of_no_use_is_measured_again_with_one_warning(calls: Calls, tmp_path: Path, text: str) -> None:
    path = cache.path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="machine.json is of no use .*, so ssd_fx measures again") as seen:
        calibrate.calibrated(config_for(tmp_path), CPU)
    assert len(seen) == 1
    assert [section(key) for key in json.loads(path.read_text())["measured"]] == ["compute", "disk"]
    assert {p.name for p in path.parent.iterdir()} == {"machine.json", "machine.lock", f"{platform.node()}.lock"}


def test_another_machine_need_not_wait_and_adds_what_it_measures(calls: Calls) -> None:
    """Machines may share a home directory, and each measures its own drives."""
    ours, theirs = cache.Entry({"flops": 1e9}), cache.Entry({"flops": 2e9})
    with cache.exclusive() as kept:
        with mock.patch.object(platform, "node", return_value="another"), cache.exclusive() as others:
            others["theirs"] = theirs
        kept["ours"] = ours
    assert cache.read() == {"ours": ours, "theirs": theirs}


def test_a_cache_directory_that_cannot_be_made(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"cannot keep the machine's rates \(.*Not a directory"):
        assert calibrate.calibrated(config_for(tmp_path), CPU).flops == 2e11
    calibrate.calibrated(config_for(tmp_path), CPU)
    assert calls.compute == 1


def test_a_file_system_without_locks_stops_no_compilation(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home directory on Lustre may be mounted so."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(RuntimeWarning, match=r"cannot keep the machine's rates \(.*not implemented\)") as seen:
        assert calibrate.calibrated(config_for(tmp_path), CPU).flops == 2e11
    assert len(seen) == 1


def test_what_is_kept_is_read_beside_a_process_that_measures_and_never_ends(calls: Calls, tmp_path: Path) -> None:
    """One that was stopped in the terminal holds its lock for as long."""
    calibrate.calibrated(config_for(tmp_path), CPU)
    forget()
    reader = threading.Thread(target=calibrate.calibrated, args=(config_for(tmp_path), CPU), daemon=True)
    with cache.exclusive():
        reader.start()
        reader.join(20)
        waits = reader.is_alive()
    reader.join()
    assert not waits
    assert (calls.compute, calls.disk) == (1, 1)


def test_a_process_that_measures_nothing_writes_nothing(calls: Calls, tmp_path: Path) -> None:

    def written_at() -> int:
        return cache.path().stat().st_mtime_ns

    calibrate.calibrated(config_for(tmp_path), CPU)
    before = written_at()
    forget()
    calibrate.calibrated(config_for(tmp_path), CPU)
    assert written_at() == before


def test_rates_that_can_be_read_count_where_nothing_can_be_kept(calls: Calls, tmp_path: Path) -> None:
    """In a home directory that is mounted read-only. What is not there is measured, and that alone."""
    calibrate.calibrated(config_for(tmp_path), CPU)
    forget()
    cannot_be_locked()
    assert calibrate.calibrated(config_for(tmp_path), CPU).flops == 2e11
    with pytest.warns(RuntimeWarning, match="cannot keep the machine's rates"):
        calibrate.calibrated(config_for(tmp_path, checksums=False), CPU)
    assert (calls.compute, calls.disk) == (1, 2)


def cannot_be_locked() -> None:
    lock = cache.path().with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.mkdir(parents=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("slow", [False, True])
def test_rates_do_not_change_within_a_process(calls: Calls, tmp_path: Path, slow: bool) -> None:
    """Where they cannot be kept, or could not be measured at first: other options compile for the same machine."""
    cannot_be_locked()
    calls.rates["kernel_s"] = 0.0144 if slow else 1e-5
    first = calibrate.calibrated(config_for(tmp_path), CPU)
    calls.rates |= {"flops": 1e9, "kernel_s": 1e-5}
    other = calibrate.calibrated(config_for(tmp_path, checksums=False), CPU)
    assert other == first == calibrate.calibrated(config_for(tmp_path), CPU)
    assert first.flops == (Machine.default(CPU, torch.get_num_threads()).flops if slow else 2e11)
    assert (calls.compute, calls.disk) == (1, 2)


FORKED = """
import os, sys, threading, torch
from ssd_fx.calibration import calibrate
from ssd_fx.options import Options

def compute(device):
    measures.set()
    forked.wait()
    return {"flops": 2e11}

measures, forked = threading.Event(), threading.Event()
calibrate._compute, calibrate._disk = compute, lambda config, device: {"write_bw": 1.5e9}
asked = Options(dirs=(sys.argv[1],), engine="posix"), torch.device("cpu")
thread = threading.Thread(target=calibrate.calibrated, args=asked)
thread.start()
measures.wait()
child = os.fork()
if not child:
    os._exit(calibrate.calibrated(*asked).flops != 2e11)
forked.set()
thread.join()
print(os.waitpid(child, 0)[1])
"""


def test_a_child_that_was_forked_while_another_thread_measured(tmp_path: Path) -> None:
    """It has the locks of that thread, and nobody who would release them."""
    done = fresh.run(FORKED, tmp_path, timeout_s=60, XDG_CACHE_HOME=str(tmp_path))
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_no_home_directory(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that it does not know. No directory is called `~` then."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.warns(RuntimeWarning, match=r"cannot keep the machine's rates \(neither XDG_CACHE_HOME nor HOME names"):
        assert calibrate.calibrated(config_for(tmp_path), CPU).flops == 2e11
    assert cache.read() == {}
    (found,) = limits.cache()
    assert found.says == (
        "neither XDG_CACHE_HOME nor HOME names an absolute directory, so every process measures the machine"
    )
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_relative_cache_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification says so: it would be another one after every chdir."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert cache.path() == tmp_path / ".cache" / "ssd_fx" / "machine.json"


def test_a_drive_that_cannot_be_measured_has_typical_rates_and_is_not_kept(calls: Calls, tmp_path: Path) -> None:
    calls.error = OSError(28, "No space left on device")
    with pytest.warns(
        RuntimeWarning, match="could not measure how fast .*No space left.* and plans with typical rates"
    ):
        machine = calibrate.calibrated(config_for(tmp_path), CPU)
    typical = Machine.default(CPU, torch.get_num_threads())
    assert (machine.flops, machine.write_bw) == (2e11, typical.write_bw)
    assert kept() == ["compute"]


def test_busy_cores_are_not_kept(calls: Calls, tmp_path: Path) -> None:
    calls.rates["kernel_s"] = 0.0144
    with pytest.warns(
        RuntimeWarning, match=r"the smallest kernel took 0\.0144 s.* plans with typical rates\. `ssd-fx calibrate"
    ):
        machine = calibrate.calibrated(config_for(tmp_path), CPU)
    assert machine.flops == Machine.default(CPU, torch.get_num_threads()).flops
    assert kept() == ["disk"]


@pytest.mark.parametrize(("shares", "idle"), [((0.1, 0.1), None), ((0.75, 0.75), 1), ((0.0, 0.6), 1)])
def test_what_others_use_of_the_cores(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: tuple[float, float], idle: int | None
) -> None:
    """From 15% on CPU time counts, also where others came while the clock counted."""
    seen: list[int | None] = []
    found = iter(shares)
    monkeypatch.setattr(timing.Others, "share", lambda self: next(found, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def measured(self: rates.Compute) -> dict[str, object]:
        seen.append(self.clock.idle)
        return COMPUTE

    monkeypatch.setattr(rates.Compute, "rates", measured)
    calibrate.calibrated(config_for(tmp_path), CPU)
    assert seen == ([None] if idle is None else [None, idle] if not shares[0] else [idle])
    assert kept() == ["compute", "disk"]


SPINS = """
import sys, time
while True:  # three quarters of the time, as a data loader that decodes
    started = time.perf_counter()
    while time.perf_counter() - started < 0.015:
        pass
    time.sleep(0.005)
"""


@pytest.mark.slow
@pytest.mark.alone  # it measures seconds
def test_rates_hold_where_others_use_three_quarters_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock they are a half and less of what they are by CPU time, alone and beside the others."""

    def measured(idle: int | None) -> dict[str, float]:
        found = rates.Compute(CPU, timing.Clock(CPU, idle))
        with found.clock.on_idle_cores():
            return {"float32": found.product_flops(torch.float32), "memory": found.memory_bw()}

    alone = calibrate._in_thread(lambda: measured(1), CPU)
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        for _ in range(cores):
            loader = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPINS]))
            stack.callback(loader.kill)
        time.sleep(0.5)
        idle = timing.Clock.among_others(CPU).idle
        assert idle == max(1, cores // 4)
        busy = calibrate._in_thread(lambda: measured(idle), CPU)
        assert torch.get_num_threads() == cores
    for name, rate in alone.items():
        assert 0.6 < busy[name] / rate < 1.5, f"{name}: {busy[name]:.3g} beside others, {rate:.3g} alone"


def test_the_command_that_cannot_measure(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not recommend itself, and prints no typical rates as if they had been measured."""
    calls.rates["kernel_s"] = 0.0144
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    why = "how fast this machine computes (the smallest kernel took 0.0144 s, as with more threads than cores)"
    assert err == f"ssd-fx: not measured: {why}\n"
    assert "ssd-fx calibrate" not in out
    assert "drives, write" in out
    assert "products" not in out
    measured, missed = out.splitlines()[-2:]
    assert re.fullmatch(rf"disk measured in [\d.]+ s; kept in {cache.path()}", measured)
    assert missed == "compute not measured, and no rates of it are kept, so plans take typical ones"


def test_the_command_leaves_what_it_cannot_measure_again(
    calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", str(tmp_path)]) == 0
    calls.rates["kernel_s"] = 0.0144
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    missed = capsys.readouterr().out.splitlines()[-1]
    assert missed == f"compute not measured; its rates of before stay in {cache.path()}"
    assert kept() == ["compute", "disk"]


def test_the_command_measures_nothing(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls.rates["kernel_s"] = 0.0144
    calls.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["compute", "disk"]
    assert cli.main(["calibrate", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["rates"], found["unmeasured"], found["kept"]) == ({}, ["compute", "disk"], False)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_command_cannot_keep_what_it_measures(
    words: list[str], calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cannot_be_locked()
    assert cli.main(["calibrate", str(tmp_path), *words]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("ssd-fx: ssd_fx cannot keep the machine's rates (")
    if words:
        assert json.loads(out)["kept"] is False
    else:
        assert out.endswith(" s; not kept\n")


def test_one_process_of_a_node_says_what_could_not_be_measured(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks find it noted, and neither try nor warn. Ten minutes later it is tried again."""
    calls.rates["kernel_s"] = 0.0144
    with pytest.warns(calibrate.NotMeasured):
        calibrate.calibrated(config_for(tmp_path), CPU)
    with warnings.catch_warnings(), caplog.at_level("INFO", "ssd_fx"):
        warnings.simplefilter("error")
        for _ in range(2):
            forget()  # as another process
            assert (
                calibrate.calibrated(config_for(tmp_path), CPU).flops
                == Machine.default(CPU, torch.get_num_threads()).flops
            )
            assert calibrate.unmeasured(config_for(tmp_path), CPU) == ["compute"]
    assert (calls.compute, calls.disk) == (1, 1)
    assert "could not measure how fast this machine computes" in caplog.text
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 601)
    calls.rates["kernel_s"] = 1e-5
    forget()
    assert calibrate.calibrated(config_for(tmp_path), CPU).flops == 2e11
    assert kept() == ["compute", "disk"]


def test_waiting_for_idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three idle seconds in a row, of one core's use: 1, 0, 1, 0, 0, 0."""
    shares = iter((1.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    slept: list[float] = []
    monkeypatch.setattr(timing.Others, "share", lambda self: next(shares))
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    timing.wait_until_idle()
    assert slept == [1.0] * 6


@pytest.mark.alone  # another worker would be a neighbour too
def test_a_neighbour_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        time.sleep(0.3)
        before = timing.Others.cpu_s()
        time.sleep(1.0)
        used = timing.Others.cpu_s() - before
        neighbour.kill()
    assert used > 0.3


def test_the_option(calls: Calls, tmp_path: Path) -> None:
    typical = Machine.default(CPU, torch.get_num_threads())
    options: dict[str, object] = {"dirs": [str(tmp_path)], "engine": "posix"}
    assert machine_of(Config.make(options | {"machine": "default"}), CPU) == typical
    said = machine_of(Config.make(options | {"machine": {"flops": 3e14, "write_bw": 6e9}}), CPU)
    assert said == typical.with_rates({"flops": 3e14, "write_bw": 6e9})
    assert calls.compute == 0
    assert machine_of(Config.make(options | {"machine": "auto"}), CPU).flops == 2e11
    assert calls.compute == 1


def test_calibrate_and_info(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(tmp_path)]) == 0
    assert cli.main(["calibrate", str(tmp_path)]) == 0
    assert calls.compute == 2
    written = re.compile(r"^ *drives, write +1,500 MB/s$", re.MULTILINE)
    assert written.search(capsys.readouterr().out)
    assert cli.main(["doctor"]) == 0
    assert written.search(capsys.readouterr().out)
    assert cli.main(["calibrate", str(tmp_path / "missing")]) == 1


@pytest.mark.parametrize("engine", ["posix", "memory"])
def test_transfers_are_measured_and_leave_no_trace(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_TRANSFER_BYTES", 2**20)
    monkeypatch.setattr(transfers, "_TRANSFERS", 4)
    config = Options(dirs=(str(tmp_path),), engine=engine)
    found = transfers.Transfers(config, CPU).rates()
    assert 1e6 < found["write_bw"] < 1e12
    assert 1e6 < found["read_bw"] < 1e12
    assert 0 <= found["drag_s_per_byte"] < 1e-6
    assert (ssd_fx.stats().stores, ssd_fx.stats().disk_bytes, trace.events()) == (0, 0, [])
    assert list(tmp_path.iterdir()) == []


class HostClock:
    """The CPU time of a thread that needs 4 ms for a store, 1 for a release, 2 for a load and 1 for a wait.

    It is asked before and after each node, and `TENSORS` tensors go through one kind of node after the other. What
    comes between the nodes takes an hour.
    """

    COSTS_S = (4e-3, 1e-3, 2e-3, 1e-3)
    TENSORS = 8

    def __init__(self) -> None:
        self.now, self.asked = 0.0, 0

    def __call__(self) -> float:
        node, ended = divmod(self.asked, 2)
        self.now += self.COSTS_S[node // self.TENSORS % 4] if ended else 3600.0
        self.asked += 1
        return self.now


@pytest.mark.parametrize("engine", ["posix", "memory"])
def test_a_node_takes_what_its_thread_computes(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the measurement leaves no trace, whatever the options keep in memory."""
    clock = HostClock()
    monkeypatch.setattr(round_trip.time, "thread_time", clock)
    config = Options(dirs=(str(tmp_path),), engine=engine, budget=1 << 30, compression=(("ssd", "bitpack"),))
    assert round_trip.node_s(config, CPU) == pytest.approx(2e-3)
    assert clock.asked == round_trip._PASSES * 4 * 2 * HostClock.TENSORS
    assert (ssd_fx.stats().stores, ssd_fx.stats().disk_bytes, trace.events()) == (0, 0, [])
    assert list(tmp_path.iterdir()) == []


def test_nodes_beside_a_device_that_runs_behind_are_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first runs are timed on the device, which takes longer: they do not count, and are forgotten."""
    with installed("sides first") as gpu:
        monkeypatch.setattr(torch, "full", lambda size, fill, *_, **__: gpu.empty(size, (1,), torch.uint8, CPU))
        clock = HostClock()
        monkeypatch.setattr(round_trip.time, "thread_time", clock)
        assert round_trip.node_s(Options(engine="memory"), CPU) == pytest.approx(2e-3)
        assert clock.asked == (round_trip._PASSES + device_trace.RUNS) * 4 * 2 * HostClock.TENSORS
        assert device_trace.events() == []


def test_a_launch_takes_what_its_thread_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 for each layer, while the device has nothing to do: it would hold the host up, or begin late."""
    with installed("lazy") as gpu:
        seen: list[int] = []

        def run(given: list[torch.Tensor]) -> None:
            seen.append(len(gpu.compute.tasks))
            gpu.queue(gpu.compute, lambda: None)

        monkeypatch.setattr(launches, "compiled", lambda function, inputs: run)
        ticks = itertools.count()
        monkeypatch.setattr(launches.time, "thread_time", lambda: 0.48 * next(ticks))
        with gpu.on(CPU):
            assert launches.launch_s(CPU) == pytest.approx(0.01)
    assert seen == [0] * (launches._WARM_UP + launches._RUNS)


def test_launches_are_those_of_inductor_s_code() -> None:
    """Three for each layer. Whoever measures is compiling in another thread, and holds the lock of Dynamo."""
    inputs = [torch.ones((8, 8), dtype=torch.bfloat16), *(torch.ones(shape) for shape in ((8, 8), (8,)) * 2)]
    with captured({}) as found, compile_lock, ThreadPoolExecutor(1) as pool:
        pool.submit(launches.compiled, launches.forward, inputs).result(timeout=60)
    kernels = [node.is_extern() for node in found[0].kernels]
    assert (len(kernels), sum(kernels)) == (6, 2)


def test_a_device_without_inductor_has_its_launches_guessed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(*_: object) -> None:
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(launches, "compiled", compiled)
    assert rates.Compute(CPU).launch_s(kernel_s=1e-6) == pytest.approx(6e-6)
    assert "could not time launches in code of Inductor (no Triton here), and guesses" in caplog.text


def test_a_node_that_was_not_measured_takes_what_nodes_took_elsewhere(calls: Calls, tmp_path: Path) -> None:
    """As on a full drive."""
    assert calibrate.calibrated(config_for(tmp_path), CPU).node_s == 1e-4
    calls.error = OSError(28, "No space left on device")
    with pytest.warns(RuntimeWarning, match="could not measure"):
        assert calibrate.calibrated(config_for(tmp_path), CPU, again=True).node_s == NODE_S


class Products(TorchDispatchMode):
    """Counts the flops of matrix products by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            (rows, inner), (_, columns) = args[0].shape, args[1].shape
            self.flops[args[0].dtype] += 2 * rows * inner * columns
        return func(*args, **(kwargs or {}))


def test_the_rate_of_products_is_that_of_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which bfloat16 takes twice as long as float32, and float16 so long that its products are small."""
    speed = {torch.float32: 1e12, torch.bfloat16: 5e11, torch.float16: 1e9}
    largest: Counter[torch.dtype] = Counter()

    def typical(self: timing.Clock, work: Callable[[], object]) -> float:
        with Products() as products:
            work()
        for dtype, flops in products.flops.items():
            largest[dtype] = max(largest[dtype], flops)
        return sum(flops / speed[t] for t, flops in products.flops.items()) or 1.0

    monkeypatch.setattr(timing.Clock, "typical", typical)
    monkeypatch.setattr(rates, "_PASSES", 1)
    found = rates.Compute(CPU).rates()
    assert found["flops_by_dtype"] == pytest.approx({"float32": 1e12, "bfloat16": 5e11, "float16": 1e9}, rel=1e-12)
    machine = Machine.default(CPU, 1).with_rates({name: found[name] for name in ("flops", "flops_by_dtype")})
    for dtype, rate in speed.items():
        assert machine.product_flops(dtype) == pytest.approx(rate, rel=1e-12)
    assert machine.product_flops(torch.float64) == machine.flops == pytest.approx(1e12, rel=1e-12)
    large = 2 * (4 * 512) * 512 * 512
    assert largest == {torch.float32: large, torch.bfloat16: large, torch.float16: 2 * 256**3}  # and then 4 * 128 rows


def test_seconds_in_which_shared_cores_are_slow_change_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are two fifths of the time that measuring takes."""
    calls = 0
    slow: set[int] = set()

    def typical(self: timing.Clock, work: Callable[[], object]) -> float:
        nonlocal calls
        calls += 1
        return 3.0 if calls in slow else 1.0

    monkeypatch.setattr(timing.Clock, "typical", typical)
    found = rates.Compute(CPU).rates()
    fifth, calls = calls // 5, 0
    slow = {*range(1, fifth + 1), *range(2 * fifth + 1, 3 * fifth + 1)}
    assert rates.Compute(CPU).rates() == found


def test_a_figure_that_one_pass_lacks_is_none() -> None:
    """Such as that of an attention whose kernel failed once."""
    assert rates._medians([{"float32": 1.0, "bfloat16": 1.0}, {"float32": 3.0}, {"float32": 2.0}]) == {"float32": 2.0}


def test_the_program_s_random_numbers_and_autocast_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        seconds, product = calibrate._in_thread(lambda: (rates.Compute(CPU).random_s(), ONES.mm(ONES)), CPU)
    assert product.dtype == torch.float32
    assert 1e-12 < seconds < 1e-3
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.alone  # it measures seconds
def test_copies_to_host_memory_are_measured_on_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that executes late: a copy that was not waited for would take no time."""
    with installed("lazy") as gpu:
        moved: list[tuple[int, bool]] = []
        copy = FakeGpu.copy

        def slow(self: FakeGpu, stream: object, target: torch.Tensor, source: torch.Tensor) -> None:
            copy(self, stream, target, source)
            self.queue(stream, lambda: time.sleep(0.02 if target.numel() > 2**16 else 0.001))
            moved.append((target.numel(), stream is not self.compute))

        monkeypatch.setattr(FakeGpu, "copy", slow)
        found = host_copies(CPU, nbytes=2**20)
        assert moved == [(2**20, True)] * 10 + [(2**16, True)] * 10
        assert gpu.sides
    assert 2**20 / 0.1 < found["to_host_bw"] < 2**20 / 0.02
    assert 2**20 / 0.1 < found["from_host_bw"] < 2**20 / 0.02
    assert found["host_latency_s"] < 0.02
    assert Machine.default(CPU, 1).with_rates(found).to_host_bw == found["to_host_bw"]


def test_transfers_of_a_device_take_the_time_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody on the host knows when one ended before it looks."""
    with installed(1) as gpu:
        monkeypatch.setattr(torch, "full", lambda size, *_, **__: gpu.empty(size, (1,), torch.uint8, CPU))
        found = transfers.Transfers(Options(engine="memory"), CPU).rates()
    assert found["write_bw"] == pytest.approx(transfers._TRANSFER_BYTES / 1.5e-3, rel=0.01)
    assert found["read_bw"] == pytest.approx(transfers._TRANSFER_BYTES / 1.5e-3, rel=0.01)


def test_what_the_host_does_costs_a_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan would otherwise recompute what could be offloaded for nothing (docs/results/gpu, "Steps on that H200")."""
    with installed(1) as gpu:
        monkeypatch.setattr(torch, "full", lambda size, *_, **__: gpu.empty(size, (1,), torch.uint8, CPU))
        monkeypatch.setattr(transfers.Transfers, "_start", slowly(transfers.Transfers._start))
        found = transfers.Transfers(Options(engine="memory"), CPU).rates()
    assert found["drag_s_per_byte"] == 0.0


def slowly(start: Any) -> Any:
    def started(*args: Any) -> Any:
        time.sleep(0.02)
        return start(*args)

    return started


def test_work_on_a_device_is_timed_by_its_events_in_any_thread() -> None:
    """Its kernels take 5 ms, and the host no time to launch them; a new thread is on another device."""
    with installed("lazy") as gpu:
        clock = timing.Clock(CPU)
        seen: list[float] = []

        def work() -> None:
            assert gpu.entered
            gpu.queue(gpu.compute, lambda: None, ms=5.0)

        thread = threading.Thread(target=lambda: seen.extend((clock.once(work), clock.typical(work))))
        thread.start()
        thread.join()
    assert seen == pytest.approx([5e-3, 5e-3])


def test_a_clock_that_stands_still_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go on for as long as its events say that no time has passed."""
    monkeypatch.setattr(timing, "_PATIENCE_S", 0.2)
    launched = 0
    with installed("lazy") as gpu:

        def work() -> None:
            nonlocal launched
            launched += 1
            gpu.queue(gpu.compute, lambda: None, ms=0.0)

        with pytest.raises(timing.NoClock, match=r"0\.2 s on the host and no time by the events of cpu"):
            timing.Clock(CPU).typical(work)
    assert 1 < launched < 1e6


def test_how_long_was_waited_for_a_clock_where_others_use_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_BUSY_S", 0.1)
    monkeypatch.setattr(timing.time, "process_time", lambda: 1.0)
    with pytest.raises(timing.NoClock, match=r"runs took 0\.1 s on the host"):
        timing.Clock(CPU, idle=1).typical(lambda: None)


def test_measuring_is_on_the_device_that_is_measured(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread of its own, which is on device 0 by itself: kernels, events and what kvikio does go by that."""
    with installed("lazy") as gpu:
        where: list[tuple[str, bool]] = []
        monkeypatch.setattr(rates.Compute, "rates", lambda self: where.append(("compute", gpu.entered)) or COMPUTE)

        def measure(self: transfers.Transfers) -> Any:
            self.engine.close()
            where.append(("disk", gpu.entered))
            return DISK

        monkeypatch.setattr(transfers.Transfers, "rates", measure)
        monkeypatch.setattr(calibrate, "host_copies", lambda device: {})
        calibrate.calibrated(config_for(tmp_path), CPU)
    assert where == [("compute", True), ("disk", True)]


def test_a_device_without_a_number_is_the_caller_s(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that measures would take its own, the first."""
    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(calibrate, "_compute", lambda device: seen.append(device) or COMPUTE)
    monkeypatch.setattr(calibrate, "_disk", lambda config, device: seen.append(device) or DISK)
    monkeypatch.setattr(calibrate.streams, "of", lambda device: None)
    machine = calibrate.calibrated(config_for(tmp_path), torch.device("cuda"))
    assert seen == [torch.device("cuda", 3)] * 2
    assert (machine.node_s, machine.host_node_s) == (0.0, NODE_S)  # the device runs behind the host


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: f"{type(error).__name__} {error}"[:40])
def test_no_memory_to_measure_with_is_not_the_end(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The model may be on the device already, and fit; it is measured when there is room."""

    def full(self: rates.Compute) -> float:
        raise error

    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rates.Compute, "memory_bw", full)
    monkeypatch.setattr(timing.Clock, "typical", lambda self, work: 1.0)
    monkeypatch.setattr(transfers.Transfers, "rates", lambda self: self.engine.close() or DISK)
    monkeypatch.setattr(calibrate, "node_s", lambda config, device: 1e-4)
    with pytest.warns(RuntimeWarning, match=r"could not measure how fast .* \(there is no memory for it: "):
        machine = calibrate.calibrated(config_for(tmp_path), CPU)
    assert machine.flops == Machine.default(CPU, torch.get_num_threads()).flops
    assert kept() == ["disk"]


def test_attention_without_memory_is_not_attention_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise OUT_OF_MEMORY[0]

    monkeypatch.setattr(rates.F, "scaled_dot_product_attention", full)
    with pytest.raises(torch.OutOfMemoryError):
        rates.Compute(CPU).attention_flops(torch.float32, 64)


def test_another_error_is_not_lack_of_memory(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: rates.Compute) -> dict[str, object]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(rates.Compute, "rates", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        calibrate.calibrated(config_for(tmp_path), CPU)


def test_the_cpu_copies_nothing(calls: Calls, tmp_path: Path) -> None:
    assert host_copies(CPU) == {}
    machine = calibrate.calibrated(config_for(tmp_path), CPU)
    assert machine.to_host_bw == Machine.default(CPU, 1).to_host_bw


def test_what_was_measured_of_the_copies_is_kept(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"to_host_bw": 2.5e10, "from_host_bw": 2.4e10, "host_latency_s": 1e-5}
    monkeypatch.setattr(calibrate, "host_copies", lambda device: found)
    calibrate.calibrated(config_for(tmp_path), CPU)
    forget()
    monkeypatch.setattr(calibrate, "host_copies", lambda device: {})
    machine = calibrate.calibrated(config_for(tmp_path), CPU)
    assert {name: machine.rates()[name] for name in found} == found
