"""What libraries keep with malloc is counted beside tensors, and what compilers keep is not."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ssd_fx.runtime.memory import gauge as gauges
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.memory.gauge import CpuGauge
from ssd_fx.runtime.memory.libraries import Libraries

MIB = 1 << 20
NEAR = MIB // 2  # what Python takes meanwhile
C = ctypes.CDLL(None)
C.malloc.argtypes, C.malloc.restype, C.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
pytestmark = pytest.mark.skipif(not hasattr(C, "mallinfo2"), reason="malloc tells what is in use since glibc 2.33")


@pytest.fixture
def kept() -> Iterator[Callable[[int], None]]:
    """Takes so many bytes, as a library may."""
    blocks: list[int] = []
    yield lambda nbytes: blocks.append(C.malloc(nbytes))
    for block in blocks:
        C.free(block)


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch) -> CpuGauge:
    """In a process that has compiled something."""
    torch._dynamo.reset()
    CPU_ALLOCATOR.install()
    libraries = Libraries()
    monkeypatch.setattr(gauges, "LIBRARIES", libraries)
    compiled(libraries.watch)
    gc.collect()
    return CpuGauge()


def compiled(during: Callable[[], Any]) -> None:
    def backend(gm: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        during()
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))


def look(gauge: CpuGauge) -> int:
    gauge.look_around(for_tensors=True)
    return gauge.live_bytes()


@pytest.mark.parametrize("nbytes", [8 * MIB, 100 << 10])
def test_what_a_library_keeps_is_counted(gauge: CpuGauge, kept: Callable[[int], None], nbytes: int) -> None:
    """In mappings of its own, and in malloc's arenas."""
    before = look(gauge)
    for _ in range(8 * MIB // nbytes):
        kept(nbytes)
    assert abs(look(gauge) - before - 8 * MIB) < NEAR
    assert gauge.begin() == gauge.peak_bytes() == gauge.live_bytes()


def test_what_a_library_gives_back_is_not_counted(gauge: CpuGauge) -> None:
    before = look(gauge)
    block = C.malloc(8 * MIB)
    assert look(gauge) - before > 7 * MIB
    C.free(block)
    assert abs(look(gauge) - before) < NEAR


def test_what_a_compiler_keeps_is_not_counted(gauge: CpuGauge, kept: Callable[[int], None]) -> None:
    """Nor while it compiles, when the plan asks what is there."""
    before, during = look(gauge), []

    def compiles() -> None:
        kept(8 * MIB)
        during.append(look(gauge))

    compiled(compiles)
    assert [abs(each - before) < NEAR for each in (*during, look(gauge))] == [True, True]
    torch._dynamo.reset()  # forgets who wants to know of compilations
    compiled(gauges.LIBRARIES.watch)
    compiled(compiles)
    assert abs(look(gauge) - before) < NEAR


def test_garbage_of_a_compiler_hides_nothing(gauge: CpuGauge, kept: Callable[[int], None]) -> None:
    """It is collected at any time, and is malloc's until then."""
    before = look(gauge)

    def leaves_garbage() -> None:
        circle: list[object] = [bytearray(8 * MIB)]
        circle.append(circle)

    gc.disable()
    try:
        compiled(leaves_garbage)
        look(gauge)
        kept(8 * MIB)
    finally:
        gc.enable()
    gc.collect()
    assert abs(look(gauge) - before - 8 * MIB) < NEAR


def test_small_tensors_are_counted_once(gauge: CpuGauge) -> None:
    """They are malloc's. A look at all tensors finds them, and a look at malloc does before."""
    before = look(gauge)
    small = [torch.ones(8 << 10) for _ in range(8 * 32)]
    gauge.look_around(for_tensors=False)
    counted = gauge.live_bytes() - before
    assert abs(counted - len(small) * (32 << 10)) < NEAR
    assert abs(look(gauge) - before - counted) < NEAR
