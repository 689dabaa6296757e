"""The driver of `fake_cuda.c`: devices that are host memory, and streams that do their work when they must."""

import ctypes
import functools
from pathlib import Path

import torch

from ssd_fx.runtime.device.cuda_driver import FUNCTIONS
from ssd_fx.runtime.engines.base import Memory
from tests import built

SOURCE = Path(__file__).with_suffix(".c")
ADDRESSES = (  # in the order of FUNCTIONS
    "fake_set_context",
    "fake_stream_create",
    "fake_stream_destroy",
    "fake_event_synchronize",
    "fake_stream_synchronize",
    "fake_copy",
    "fake_host_alloc",
    "fake_host_free",
    "fake_capture_mode",
)


@functools.cache
def library():
    found = ctypes.PyDLL(str(built.library(SOURCE, (*built.C, "-O1"))))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    found.fake_event.restype = pointer
    found.fake_count.restype = ctypes.c_long
    found.fake_declare.argtypes = (pointer, size)
    found.fake_undeclare.argtypes = (pointer,)
    found.fake_launch.argtypes = (pointer, pointer, size)
    found.fake_forget.argtypes = found.fake_event_destroy.argtypes = (pointer,)
    return found


class FakeEvent:
    alive = 0

    def __init__(self):
        self.cuda_event = library().fake_event()
        FakeEvent.alive += 1

    def __del__(self):
        library().fake_event_destroy(self.cuda_event)
        FakeEvent.alive -= 1


class FakeDriver:
    """`cuda_driver.CudaDriver`. `eager`: streams do their work at once, else when they are synchronised."""

    def __init__(self, eager=False):
        library().fake_reset(int(eager))

    def functions(self):
        return [ctypes.cast(getattr(library(), name), ctypes.c_void_p).value for name in ADDRESSES]

    def context(self, index):
        return 0x1000 * (index + 1)

    def record(self, index):
        return FakeEvent()

    def fail(self, function, nth, code):
        """The `nth` call of a function from now on returns `code`."""
        library().fake_fail(FUNCTIONS.index(function), nth, code)

    @property
    def streams(self):
        return library().fake_count(0)

    @property
    def pinned(self):
        return library().fake_count(1)

    @property
    def copies(self):
        return library().fake_count(2)

    @property
    def copied_bytes(self):
        return library().fake_count(4)

    @property
    def pinned_bytes(self):
        return library().fake_count(5)

    @property
    def made(self):
        """The pinned blocks and streams that were ever made."""
        return library().fake_count(6)

    @property
    def unfinished(self):
        """Copies that a stream has not done yet."""
        return library().fake_count(3)


class DeviceMemory:
    """`nbytes` of device `index`, at an odd address, between guards."""

    GUARD = 64

    def __init__(self, nbytes, index=0):
        self.raw = (ctypes.c_ubyte * (nbytes + 2 * self.GUARD + 1))()
        ctypes.memset(self.raw, 0xEE, len(self.raw))
        self.memory = Memory(ctypes.addressof(self.raw) + self.GUARD + 1, nbytes, torch.device("cuda", index))
        library().fake_declare(self.memory.ptr, nbytes)

    def __del__(self):
        library().fake_undeclare(self.memory.ptr)  # before the memory is somebody else's

    def write_late(self, data):
        """A kernel of the compute stream will write `data`; until then other bytes are there."""
        library().fake_launch(self.memory.ptr, data, len(data))

    def bytes(self):
        """What the host finds once the compute stream has done all it was given; the guards must not have changed."""
        library().fake_finish()
        before, after = bytes(self.raw[: self.GUARD + 1]), bytes(self.raw[self.GUARD + 1 + self.memory.nbytes :])
        assert (before, after) == (b"\xee" * (self.GUARD + 1), b"\xee" * self.GUARD)
        return ctypes.string_at(self.memory.ptr, self.memory.nbytes)
