"""Exact peak of live CPU tensor bytes, counted by memtrack.c, which has to be preloaded when the process starts.

subprocess.Popen(command, env=os.environ | peak.environment())   # in the parent
with Peak() as p:                                                # in the child
    step()
p.peak_bytes                                                     # above the level at entry

`on(device)` is the same for a GPU, of PyTorch's allocator there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

import torch

# What PyTorch's launcher sets for jemalloc (torch/backends/xeon/run_cpu.py).
JEMALLOC_CONF = "oversize_threshold:1,background_thread:true,metadata_thp:auto"
SOURCE = Path(__file__).with_name("memtrack.c")


def library() -> Path:
    """The tracker, compiled on first use into the user's cache directory under a name that depends on its source."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd_fx"
    path = cache / f"memtrack-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / path.name
            flags = ["-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread"]
            compiler = os.environ.get("CC", "cc")
            subprocess.run([compiler, *flags, "-o", str(built), str(SOURCE), "-ldl"], check=True)
            built.replace(path)  # whole or not at all, whoever else compiles it now
    return path


def environment(preload: str = "") -> dict[str, str]:
    """What to add to the environment of a process that is to be measured, and that has `preload` too."""
    libraries = (str(library()), preload, os.environ.get("LD_PRELOAD", ""))
    settings = {"MALLOC_CONF": JEMALLOC_CONF} if "jemalloc" in Path(preload).name else {}
    return {"LD_PRELOAD": ":".join(filter(None, libraries))} | settings


def is_preloaded() -> bool:
    """Whether the tracker is in this process."""
    return hasattr(ctypes.CDLL(None), "memtrack_live")


class Peak:
    """`with Peak() as p: ...`, then `p.peak_bytes`, relative to the live bytes at entry.

    Raises `RuntimeError` where the tracker is not preloaded. One at a time: the peak belongs to the process.
    """

    def __init__(self) -> None:
        self._tracker = ctypes.CDLL(None)
        if not is_preloaded():
            raise RuntimeError(
                "memtrack is not preloaded; start the process with peak.environment() in its environment"
            )
        for name in ("memtrack_live", "memtrack_peak", "memtrack_untracked"):
            getattr(self._tracker, name).restype = ctypes.c_int64
        self.start_bytes = self.peak_bytes = 0

    @property
    def address(self) -> int:
        """Where C code finds the function that counts so many bytes of memory that is not malloc's."""
        return ctypes.cast(self._tracker.memtrack_adjust, ctypes.c_void_p).value or 0

    def __enter__(self) -> Peak:
        self._tracker.memtrack_reset_peak()
        self.start_bytes = self._tracker.memtrack_live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak_bytes = self._tracker.memtrack_peak() - self.start_bytes
        if self._tracker.memtrack_untracked():
            raise RuntimeError("memtrack's table overflowed: the figures are too low; enlarge SLOTS in memtrack.c")


class DevicePeak:
    """The same of PyTorch's allocator for a device."""

    def __init__(self, device: str) -> None:
        self._device = torch.get_device_module(device)
        self.start_bytes = self.peak_bytes = 0

    def __enter__(self) -> DevicePeak:
        self._device.reset_peak_memory_stats()
        self.start_bytes = self._device.memory_allocated()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak_bytes = self._device.max_memory_allocated() - self.start_bytes


def on(device: str) -> Peak | DevicePeak:
    """What tracks the memory of `device`, such as "cpu" or "cuda"."""
    return Peak() if device == "cpu" else DevicePeak(device)


def wait(device: str) -> None:
    """Return when the device is done."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()
