"""`native_parts.c`, built with the sources of the pool of this checkout."""

import ctypes
import functools
from pathlib import Path

from ssd_fx.runtime.native import loader
from tests import built


@functools.cache
def library():
    pool = loader.SOURCE.parent
    command = (*built.C, "-O2", "-Wno-unused-function", f"-I{pool}")
    found = ctypes.CDLL(str(built.library(Path(__file__).with_suffix(".c"), command, among=pool.glob("*.[ch]"))))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    found.block_size.restype = found.device_size.restype = size
    found.checksum_by.argtypes = (ctypes.c_int, pointer, size, pointer, pointer)
    return found
