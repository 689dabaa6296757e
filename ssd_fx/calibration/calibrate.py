"""The machine's rates: measured once, and kept in the user's cache directory (`cache.py`).

One process measures at a time, because ranks that share a node would otherwise measure each other. The cache has the
rates of a process alone; a rank plans with its share (`Machine.shared`). What could not be measured is noted too, so
one process of a node says so, and the others do not try in vain. Where nothing can be kept, every process measures,
with a warning.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TypeVar

import torch

from ssd_fx import progress
from ssd_fx.calibration import cache, rates
from ssd_fx.calibration.cache import Entry
from ssd_fx.calibration.round_trip import node_s
from ssd_fx.calibration.timing import Clock, NoClock, Others, left_by
from ssd_fx.calibration.transfers import Transfers, host_copies
from ssd_fx.options import Options
from ssd_fx.passes.cost.machine import NODE_S, Machine
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.errors import first_line

log = logging.getLogger("ssd_fx")
_DIGITS = 3
# A kernel with nothing to do takes 5 to 20 us. With more threads than cores to run them it waits for a time slice of
# the scheduler, and products were measured at a hundredth of their rate.
_BUSY_S = 5e-4
_WHAT = {"compute": "how fast {device} computes", "disk": "how fast tensors of {device} are written and read"}
T = TypeVar("T")


class _Unmeasured(Exception):
    """A measurement that is not one of this machine; the text names what was measured, and why it is wrong."""


class NotMeasured(RuntimeWarning):
    """Plans are made for typical rates, for a `reason`."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


_lock = threading.Lock()
_known: dict[str, Entry] = {}  # read or measured by this process


def calibrated(config: Options, device: torch.device, *, again: bool = False) -> Machine:
    """The machine that computes on `device` with the drives of `config`: from the cache, else measured in seconds.

    `again` measures in any case. Cores that other processes use are measured by CPU time (`timing.Clock`). A full drive
    or a device without free memory cannot be measured. Then typical rates hold in this process, and none are kept. A
    RuntimeWarning says so, in the first process of a node that finds it out.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread; another thread measures
    keys = _keys(config, device)
    with _lock:
        _learn(config, device, keys, again)
        machine = Machine.default(device, torch.get_num_threads()).with_rates({_node(device): NODE_S})
        for key in keys.values():
            machine = machine.with_rates(_known[key].rates)
        return machine


def unmeasured(config: Options, device: torch.device) -> list[str]:
    """The sections that this process could not measure, so that it plans with typical rates."""
    return [section for section, key in _keys(config, device).items() if key in _known and not _known[key].rates]


def known_rates(config: Options, device: torch.device) -> dict[str, Mapping[str, object]]:
    """The rates by section that this process has measured, or read from the cache; no typical ones."""
    keys = _keys(config, device)
    return {section: _known[key].rates for section, key in keys.items() if key in _known and _known[key].rates}


def stored(config: Options, device: torch.device) -> list[str]:
    """The sections that the cache has rates of; none if it is of no use."""
    with suppress(OSError, ValueError):
        kept = cache.read()
        return [section for section, key in _keys(config, device).items() if key in kept and kept[key].rates]
    return []


def _keys(config: Options, device: torch.device) -> dict[str, str]:
    """The key of this machine in every section."""
    return {"compute": cache.compute_key(device), "disk": cache.disk_key(config, device)}


def _node(device: torch.device) -> str:
    """The name of the rate for the time of our nodes. Beside a GPU the host runs ahead, in a lane of its own."""
    return "node_s" if device.type == "cpu" else "host_node_s"


def _learn(config: Options, device: torch.device, keys: Mapping[str, str], again: bool) -> None:
    """Fill `_known` with the entries of `keys`: from the cache, else measured; with `again` measure all of them."""
    if not again:
        with suppress(OSError, ValueError):  # it is of no use, and whoever measures says so
            _recall(keys, cache.read())
        if not _missing(keys):
            return
    with cache.exclusive() as kept:
        if not again:
            _recall(keys, kept)  # another process may have measured meanwhile
        for section, key in (keys if again else _missing(keys)).items():
            found = _known[key] = _measured(section, config, device)
            if found.rates or key not in kept or not kept[key].rates:
                kept[key] = found


def _missing(keys: Mapping[str, str]) -> dict[str, str]:
    return {section: key for section, key in keys.items() if key not in _known}


def _recall(keys: Mapping[str, str], kept: Mapping[str, Entry]) -> None:
    """Take missing entries from `kept`, with rates or with a failure that is too recent to try again."""
    for key in _missing(keys).values():
        if key in kept and kept[key].holds:
            _known[key] = kept[key]
            if not kept[key].rates:
                log.info("%s", _typical(kept[key].reason))


def _typical(reason: str) -> str:
    return (
        f"ssd_fx could not measure {reason}, and plans with typical rates. `ssd-fx calibrate DIR --wait` measures when "
        "the machine is idle."
    )


def _measured(section: str, config: Options, device: torch.device) -> Entry:
    """Measure the rates of a section. If it cannot be measured, warn; the entry then has the reason, and no rates."""
    what = _WHAT[section].format(device=device)
    measure = {"compute": lambda: _compute(device), "disk": lambda: _disk(config, device)}[section]
    try:
        with progress.announced(f"measuring {what}, once", progress.MEASURING_S):
            return Entry(_rounded(_in_thread(measure, device)))
    except _Unmeasured as error:
        reason = str(error)
    except NoClock as error:
        reason = f"{what} ({error})"
    except (RuntimeError, MemoryError) as error:
        if not rates.out_of_memory(error):
            raise
        reason = f"{what} (there is no memory for it: {first_line(error)})"
    warnings.warn(NotMeasured(_typical(reason), reason), stacklevel=4)
    return Entry(at=time.time(), reason=reason)


def _compute(device: torch.device) -> dict[str, object]:
    others, clock = Others(), Clock.among_others(device)
    found = rates.Compute(device, clock).rates()
    came = left_by(others.share())
    if device.type == "cpu" and clock.idle is None and came is not None:  # somebody came meanwhile
        found = rates.Compute(device, Clock(device, came)).rates()
    if float(str(found.get("kernel_s", 0.0))) >= _BUSY_S:
        took = f"the smallest kernel took {found['kernel_s']:.3g} s, as with more threads than cores"
        raise _Unmeasured(f"how fast this machine computes ({took})")
    return found | host_copies(device)


def _disk(config: Options, device: torch.device) -> dict[str, object]:
    try:
        moved = Transfers(config, device, Clock.among_others(device)).rates()
        return {**moved, _node(device): node_s(config, device)}
    except OSError as error:
        raise _Unmeasured(f"how fast {', '.join(config.dirs)} is ({error})") from error


def _rounded(found: Mapping[str, object]) -> dict[str, object]:
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


def _after_fork() -> None:
    """In the child no thread measures."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
