"""The machine's rates: measured once, kept in the user's cache directory with the hardware that they belong to.

    ~/.cache/ssd_fx/machine.json        {"version": 6, "compute": {hardware: rates}, "disk": {hardware, drive: rates},
                                         "tried": {hardware, perhaps drive: {"at": seconds, "reason": text}}}

One process measures at a time, because ranks that share a node would otherwise measure each other. They lock a file
beside the cache, or the temporary directory where no such file can be locked. What is in the cache is read without the
lock. The cache has the rates of a process alone; a rank plans with its share (`Machine.shared`). What could not be
measured is noted too, so one process of a node says so, and the others do not try in vain. Where nothing can be kept,
every process measures, with a warning.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from ssd_fx import progress
from ssd_fx.calibration import rates
from ssd_fx.calibration.host_copies import host_copies
from ssd_fx.calibration.round_trip import node_s
from ssd_fx.calibration.timing import Clock, NoClock
from ssd_fx.passes.cost.machine import NODE_S, Machine
from ssd_fx.runtime.build import cache_home
from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.errors import first_line

log = logging.getLogger("ssd_fx")
_VERSION = 6  # rises when something is measured otherwise, so that figures of before are not used
SECTIONS, _TRIED = ("compute", "disk"), "tried"
_DIGITS = 3
# A kernel with nothing to do takes 5 to 20 us. With more threads than cores to run them it waits for a time slice of
# the scheduler, and products were measured at a hundredth of their rate.
_BUSY_S = 5e-4
_OTHERS = 0.15  # share of the cores that other processes use, from which on CPU time counts
_LOOK_S = 0.3  # the kernel counts in 10 ms
_TRIED_S = 600.0  # what could not be measured is not tried again for so long, by any process
_WHAT = {"compute": "how fast {device} computes", "disk": "how fast tensors of {device} are written and read"}
T = TypeVar("T")
Rates = dict[str, object]
Cached = dict[str, dict[str, Rates]]  # section -> key -> rates; of "tried": when, and why not


class _Unmeasured(Exception):
    """A measurement that is not one of this machine; the text names what was measured, and why it is wrong."""


class NotMeasured(RuntimeWarning):
    """Plans are made for typical rates, for a `reason`."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


_lock = threading.Lock()
_known: Cached = {section: {} for section in (*SECTIONS, _TRIED)}  # read or measured by this process


def calibrated(config: RuntimeConfig, device: torch.device, *, again: bool = False) -> Machine:
    """The machine that computes on `device` with the drives of `config`: from the cache, else measured in seconds.

    `again` measures in any case. Cores that other processes use are measured by CPU time (`timing.Clock`). A full drive
    or a device without free memory cannot be measured. Then typical rates hold in this process, and none are kept. A
    RuntimeWarning says so, in the first process of a node that finds it out.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread; another thread measures
    keys = _keys(config, device)
    with _lock:
        wanted = keys if again else _missing(keys, _known)
        if wanted:
            _learn(config, device, wanted, again)
        machine = Machine.default(device, torch.get_num_threads()).with_rates({_node(device): NODE_S})
        for section, key in keys.items():
            machine = machine.with_rates(_known[section][key])
        return machine


def _node(device: torch.device) -> str:
    """The rate of a machine that has the time of our nodes. A GPU runs behind the host, which has a lane of its own."""
    return "node_s" if device.type == "cpu" else "host_node_s"


def _keys(config: RuntimeConfig, device: torch.device) -> dict[str, str]:
    """The key of this machine in every section."""
    return {"compute": compute_key(device), "disk": disk_key(config, device)}


def _missing(keys: Mapping[str, str], found: Cached) -> dict[str, str]:
    """Those of `keys` that `found` has no rates of."""
    return {section: key for section, key in keys.items() if key not in found[section]}


def _learn(config: RuntimeConfig, device: torch.device, keys: Mapping[str, str], again: bool) -> None:
    """Fill `_known` with the rates of `keys`: from the cache, else measured; with `again` measure all of them."""
    if not again:
        with suppress(OSError, ValueError):  # it is of no use, and whoever measures says so
            keys = _recalled(keys, cached())
    if not keys:
        return
    measure = {"compute": lambda: _compute(device), "disk": lambda: _disk(config, device)}
    with _exclusive() as kept:
        if not again:
            keys = _recalled(keys, kept)  # another process may have measured meanwhile
        tried = kept[_TRIED]
        for section, key in keys.items():
            before = tried.pop(key, None)
            if before and not again and 0 <= time.time() - float(str(before["at"])) < _TRIED_S:
                tried[key] = before
                log.info("%s", _typical(before["reason"]))
                _known[section][key] = {}
                continue
            what = f"measuring {_WHAT[section].format(device=device)}, once"
            with progress.announced(what, progress.MEASURING_S):
                found, reason = _measured(section, measure[section], device)
            _known[section][key] = found
            if found:
                kept[section][key] = found
            else:
                tried[key] = {"at": time.time(), "reason": reason}
                warnings.warn(NotMeasured(_typical(reason), reason), stacklevel=3)


def _typical(reason: object) -> str:
    return (
        f"ssd_fx could not measure {reason}, and plans with typical rates. `ssd-fx calibrate DIR --wait` measures when "
        "the machine is idle."
    )


def _recalled(keys: Mapping[str, str], kept: Cached) -> Mapping[str, str]:
    """Take the rates of `keys` from `kept` to `_known`. Returns the keys that it lacks."""
    missing = _missing(keys, kept)
    for section in keys.keys() - missing.keys():
        _known[section][keys[section]] = kept[section][keys[section]]
    return missing


def _measured(section: str, measure: Callable[[], Rates], device: torch.device) -> tuple[Rates, str]:
    """The rates that `measure` finds; none, and why, if they are not those of this machine."""
    try:
        return _rounded(_in_thread(measure, device)), ""
    except _Unmeasured as error:
        return {}, str(error)
    except NoClock as error:
        return {}, f"{_WHAT[section].format(device=device)} ({error})"
    except (RuntimeError, MemoryError) as error:
        if not rates.out_of_memory(error):
            raise
        return {}, f"{_WHAT[section].format(device=device)} (there is no memory for it: {first_line(error)})"


def cached() -> Cached:
    """The contents of the cache, by section and hardware; empty if there is no file yet.

    Raises:
        OSError, ValueError: the file is of no use.
    """
    try:
        return _parse(cache_path().read_text())
    except FileNotFoundError:
        return nothing()


def nothing() -> Cached:
    """The contents of an empty cache."""
    return {section: {} for section in (*SECTIONS, _TRIED)}


def unmeasured(config: RuntimeConfig, device: torch.device) -> list[str]:
    """The sections that this process could not measure, and plans with typical rates for."""
    return [section for section, key in _keys(config, device).items() if _known[section].get(key) == {}]


def cache_path() -> Path:
    """The file of the cache.

    Raises:
        FileNotFoundError: there is no home directory.
    """
    return cache_home() / "ssd_fx" / "machine.json"


def compute_key(device: torch.device) -> str:
    """The hardware and software that computes, as JSON."""
    what = {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    what |= {"torch": torch.__version__, "device": "cpu"}
    if device.type == "cuda":
        what["device"] = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        what["device"] = device.type
    return json.dumps(what, sort_keys=True)


def disk_key(config: RuntimeConfig, device: torch.device) -> str:
    """What moves bytes, as JSON: the block devices under the directories (not their paths), engine and checksums."""
    numbers = [] if config.engine == "memory" else sorted({os.stat(path).st_dev for path in config.dirs})
    drives = [f"{os.major(n)}:{os.minor(n)}" for n in numbers]
    what = {"drives": drives, "engine": config.engine, "checksums": config.checksums}
    return json.dumps(json.loads(compute_key(device)) | what, sort_keys=True)


def _compute(device: torch.device) -> Rates:
    idle = _idle_cores(device)
    busy_s, started = _others_s(), time.perf_counter()
    found = rates.Compute(device, Clock(device, idle)).rates()
    share = _share(busy_s, started)
    if idle is None and device.type == "cpu" and share >= _OTHERS:  # somebody came meanwhile
        found = rates.Compute(device, Clock(device, _left(share))).rates()
    if float(str(found.get("kernel_s", 0.0))) >= _BUSY_S:
        took = f"the smallest kernel took {found['kernel_s']:.3g} s, as with more threads than cores"
        raise _Unmeasured(f"how fast this machine computes ({took})")
    return found | host_copies(device)


def _idle_cores(device: torch.device) -> int | None:
    """How many cores other processes leave idle, at least one; None if they use few, or the device computes."""
    if device.type != "cpu":
        return None
    before, started = _others_s(), time.perf_counter()
    time.sleep(_LOOK_S)
    share = _share(before, started)
    if share < _OTHERS:
        return None
    log.info("other processes use %.0f%% of the cores, so their rates are taken by CPU time", 100 * share)
    return _left(share)


def _left(share: float) -> int:
    return max(1, int((1 - share) * len(os.sched_getaffinity(0))))


def _share(before_s: float, started: float) -> float:
    """The share of the cores that other processes have used since then."""
    seconds = max(time.perf_counter() - started, _LOOK_S)
    return (_others_s() - before_s) / (seconds * len(os.sched_getaffinity(0)))


def wait_until_idle(quiet: int = 3) -> None:
    """Return when other processes have used little of the cores for `quiet` seconds in a row."""
    in_a_row = 0
    while in_a_row < quiet:
        before, started = _others_s(), time.perf_counter()
        time.sleep(1.0)
        in_a_row = in_a_row + 1 if _share(before, started) < _OTHERS else 0


def _others_s() -> float:
    """CPU seconds that other processes have had of this process's cores; 0 where the kernel has no /proc/stat."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    used = 0
    for ticks in (line.split()[1:] for line in lines if line.split()[0] in ours):
        user, nice, system, _, _, irq, softirq, *_ = map(int, ticks)
        used += user + nice + system + irq + softirq
    return used / os.sysconf("SC_CLK_TCK") - time.process_time()


def _disk(config: RuntimeConfig, device: torch.device) -> Rates:
    try:
        found = asdict(rates.Transfers(config, device, Clock(device, _idle_cores(device))).measure())
        return found | {_node(device): node_s(config, device)}
    except OSError as error:
        raise _Unmeasured(f"how fast {', '.join(config.dirs)} is ({error})") from error


def _rounded(found: Mapping[str, object]) -> Rates:
    whole = Machine.default(torch.device("cpu"), 1).with_rates(found).rounded(_DIGITS).rates()
    return {name: whole[name] for name in found}


def _in_thread(work: Callable[[], T], device: torch.device) -> T:
    """The result of `work` in a new thread, where no autocast, mode or compilation of the caller is in force.

    The thread is set to `device`, because a new thread is on device 0, whatever the caller's is.
    """
    queued = streams.of(device)

    def run() -> T:
        with torch.no_grad(), queued.on(device) if queued else nullcontext():
            return work()

    with ThreadPoolExecutor(1, "ssd_fx calibration") as pool:
        return pool.submit(run).result()


@contextmanager
def _exclusive() -> Iterator[Cached]:
    """The contents of the cache, locked against other processes. Additions of the caller are written at the end.

    Empty after a RuntimeWarning where nothing can be kept.
    """
    with ExitStack() as turn:
        path = None
        try:
            path = cache_path()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            turn.enter_context(_in_turn(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT))
        except OSError as error:
            path = None
            _warn_unkept(error)
            with suppress(OSError):  # all ranks measure, but not each other
                turn.enter_context(_in_turn(Path(tempfile.gettempdir()), os.O_RDONLY))
        contents = _usable(path) if path else nothing()
        before = {section: dict(entries) for section, entries in contents.items()}
        yield contents
        if path and contents != before:
            try:
                _write(path, contents)
            except OSError as error:
                _warn_unkept(error)


def _usable(path: Path) -> Cached:
    """The contents of the cache at `path`; empty after a RuntimeWarning if the file is of no use."""
    try:
        return cached()
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is of no use ({error}), so ssd_fx measures again", RuntimeWarning, stacklevel=2)
        return nothing()


@contextmanager
def _in_turn(path: Path, flags: int) -> Iterator[None]:
    """Hold the lock of a file that is opened with `flags`.

    Raises:
        OSError: it cannot be opened or locked.
    """
    lock = os.open(path, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too
    finally:
        os.close(lock)


def _warn_unkept(error: OSError) -> None:
    text = f"ssd_fx cannot keep the machine's rates ({error}), and measures them in every process"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _write(path: Path, contents: Cached) -> None:
    """Write the cache in one move: a reader sees the old file or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            there = {section: entries for section, entries in contents.items() if entries or section in SECTIONS}
            json.dump({"version": _VERSION} | there, file, indent=1, sort_keys=True)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _parse(text: str) -> Cached:
    """The contents of a file of this version.

    Raises:
        ValueError: another version or something else wrote it.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError(f"not version {_VERSION} of the machine's rates")
    base = Machine.default(torch.device("cpu"), 1)
    for section in SECTIONS:
        if not isinstance(found.get(section), dict):
            raise ValueError(f"no section {section!r}")
        for entry in found[section].values():
            if not isinstance(entry, dict):
                raise ValueError(f"{entry!r} are no rates")
            base.with_rates(entry)
    tried = found.get(_TRIED, {})
    if not isinstance(tried, dict) or not all(
        isinstance(e, dict) and {"at", "reason"} <= e.keys() for e in tried.values()
    ):
        raise ValueError(f"{tried!r} is no list of what could not be measured")
    return {section: found[section] for section in SECTIONS} | {_TRIED: tried}


def _cpu() -> str:
    """The name of the CPU model, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _after_fork() -> None:
    """In the child no thread measures."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
