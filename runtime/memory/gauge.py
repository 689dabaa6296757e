"""How many bytes of tensors live on a device: now, and at the most since the last look."""

from __future__ import annotations

import gc
import resource
import weakref
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from ssd_fx.runtime.memory.available import available_bytes, data_bytes, total_bytes
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR, LEAST
from ssd_fx.runtime.memory.libraries import LIBRARIES


class Gauge(Protocol):
    """What a device has, and what lives there. All in bytes."""

    def total_bytes(self) -> int:
        """The most that this process could have, were it alone."""

    def spare_bytes(self) -> int:
        """What this process has and may still take, beside what others have taken."""

    def live_bytes(self) -> int:
        """The bytes of all tensors that live now."""

    def peak_bytes(self) -> int:
        """The most that lived since the last look. This call is a look, too."""

    def begin(self) -> int:
        """What lives now. The next `peak_bytes` is that of the time from here on."""

    def waste_bytes(self) -> int:
        """The bytes that the allocator had and could not use, at the time when most tensors lived. Then begins anew."""
        return 0

    def look_around(self, *, for_tensors: bool) -> None:
        """Looks for memory that nothing else counts: that of libraries and, if asked, of tensors, which takes long."""
        return


def gauge(device: torch.device) -> Gauge | None:
    """The gauge of a device; None where nothing counts its tensors."""
    if device.type == "cpu":
        return CpuGauge() if CPU_ALLOCATOR.is_installed else None
    return DeviceGauge(device) if hasattr(torch.get_device_module(device), "memory_stats") else None


def host_spare_bytes() -> int:
    """What this process may still take of the host's memory."""
    spare, limit = available_bytes(), resource.getrlimit(resource.RLIMIT_DATA)[0]
    return spare if limit == resource.RLIM_INFINITY else min(spare, max(0, limit - data_bytes()))


class CpuGauge(Gauge):
    """Counts tensors of our allocator, tensors with other memory, such as parameters from before it was installed, and
    what libraries keep. The last two are as of the last `look_around`."""

    def __init__(self) -> None:
        self._elsewhere = self._small = self._libraries = 0
        self._unseen = 0  # the highest peak that other gauges have taken since our last look
        self._asks = False  # whether it has asked for a peak
        self.look_around(for_tensors=True)

    def total_bytes(self) -> int:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return total_bytes() if limit == resource.RLIM_INFINITY else min(limit, total_bytes())

    def spare_bytes(self) -> int:
        return self.live_bytes() + host_spare_bytes()

    def live_bytes(self) -> int:
        return CPU_ALLOCATOR.live_bytes + self._elsewhere + self._libraries

    def peak_bytes(self) -> int:
        return self._take_peak() + self._elsewhere + self._libraries

    def begin(self) -> int:
        self._take_peak()
        return self.live_bytes()

    def _take_peak(self) -> int:
        """The peak of our allocator since the last look. The allocator then begins anew, so the others note it too."""
        if not self._asks:
            self._asks = True
            _cpu_gauges.add(self)  # here, under the lock of `entries`: reports make gauges without it, and ask nothing
        taken = CPU_ALLOCATOR.take_peak()
        for each in _cpu_gauges if len(_cpu_gauges) > 1 else (self,):
            each._unseen = max(each._unseen, taken)
        peak, self._unseen = self._unseen, 0
        return peak

    def look_around(self, *, for_tensors: bool) -> None:
        if for_tensors:
            self._look_for_tensors()
        self._libraries = LIBRARIES.nbytes(self._small)

    def _look_for_tensors(self) -> None:
        elsewhere = []
        for storage in storages((torch.Tensor, torch.nn.Parameter), "cpu").values():
            with suppress(RuntimeError):  # a wrapper of functionalization or vmap, which has no memory of its own
                if not CPU_ALLOCATOR.owns(storage.data_ptr()):
                    elsewhere.append(storage.nbytes())
        self._elsewhere = sum(elsewhere)
        self._small = sum(nbytes for nbytes in elsewhere if nbytes < LEAST)


_cpu_gauges: weakref.WeakSet[CpuGauge] = weakref.WeakSet()
"""Those that have asked for a peak: one for each option set with a limit of memory on the CPU."""


def storages(classes: tuple[type, ...], device_type: str) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors of these classes on devices of a type, by their addresses."""
    found = dict[int, torch.UntypedStorage]()
    for thing in gc.get_objects():
        if type(thing) in classes:
            with suppress(RuntimeError):  # a tensor without a storage
                for x in (thing, thing.grad) if thing.is_leaf and thing.grad is not None else (thing,):
                    if type(x) in classes and x.device.type == device_type and x.layout is torch.strided:
                        storage = x.untyped_storage()
                        found[storage._cdata] = storage
    return found


class _Seen(NamedTuple):
    """What PyTorch says of a device's tensors, in bytes: the peak, what lives, all ever allocated, all ever freed."""

    peak: int
    current: int
    allocated: int
    freed: int


class DeviceGauge(Gauge):
    """Reads what PyTorch's allocator of a device counts.

    Its peak is since the user's last reset, and not ours to reset. If it rose since the last look, it is the most that
    lived in that time. If not, the most is estimated: what lived at either end of that time, plus the largest rise
    above such ends that was ever seen. It is at most the peak, and what there would be if no memory had been freed
    since.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._waste = self._at = 0  # what could not be used, and what lived then
        self._before = self._read()
        self._beside: int | None = None  # the largest rise above the ends; None: none was seen yet

    def _read(self) -> _Seen:
        ask = getattr(self._module, "memory_stats_as_nested_dict", None)
        if ask is None:
            flat = self._module.memory_stats(self._device)
            return _Seen(*(flat.get(f"allocated_bytes.all.{name}", 0) for name in _Seen._fields))
        found = ask(self._device)
        seen = _Seen(*(found["allocated_bytes"]["all"].get(name, 0) for name in _Seen._fields))
        if seen.current >= self._at:
            self._at, self._waste = seen.current, found["inactive_split_bytes"]["all"]["current"]
        return seen

    def total_bytes(self) -> int:
        return int(self._module.mem_get_info(self._device)[1])

    def spare_bytes(self) -> int:
        free, total = self._module.mem_get_info(self._device)
        share = getattr(self._module, "get_per_process_memory_fraction", None)
        most = int(share(self._device) * total) if share else total
        return int(min(most, free + self._module.memory_reserved(self._device)))

    def live_bytes(self) -> int:
        return self._read().current

    def begin(self) -> int:
        self._before = self._read()
        return self._before.current

    def peak_bytes(self) -> int:
        before, now = self._before, self._read()
        self._before, ends = now, max(before.current, now.current)
        if now.peak > before.peak:
            self._beside = max(self._beside or 0, now.peak - ends)
            return now.peak
        most = [now.peak] if self._beside is None else [now.peak, ends + self._beside]
        made, gone = now.allocated - before.allocated, now.freed - before.freed
        if now.allocated and before.current + made == now.current + gone:  # else they are not counted, or were reset
            most.append(before.current + made)
        return max(min(most), ends)

    def waste_bytes(self) -> int:
        self._at = 0
        return self._waste
