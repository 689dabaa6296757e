"""Memory near a device: on a machine of several sockets each has memory of its own, and a GPU is at one of them.

The kernel gives a thread memory of the node on which the thread runs. Source: Linux, `numa_memory_policy.rst`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")


@contextmanager
def near(device: torch.device) -> Iterator[None]:
    """A context within which this thread runs on the cores of the device's node, if they are known and allowed.

    A container may refuse the call, and the allowed cores may change meanwhile. Nothing but speed depends on it.
    """
    before = os.sched_getaffinity(0)
    cores = before & _cores(device)
    if not cores or cores == before:
        yield
        return
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _cores(device: torch.device) -> set[int]:
    """The cores of the device's node; empty if the system does not tell."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return set()
    about: Any = torch.cuda.get_device_properties(device)
    try:
        place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        node = int((_PCI / place / "numa_node").read_text())
        return cores_in((_NODES / f"node{node}" / "cpulist").read_text()) if node >= 0 else set()
    except (AttributeError, OSError, ValueError):  # an older torch, a virtual machine without these files
        return set()


def cores_in(text: str) -> set[int]:
    """The numbers of a list such as `0-3,8`, which may be empty."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
