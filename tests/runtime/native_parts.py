"""`native_parts.c`, built with the sources of the pool of this checkout."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from ssd_fx.runtime.native import loader


@functools.cache
def library():
    source = Path(__file__).with_suffix(".c")
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "native_parts.so"
        command = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", f"-I{loader.SOURCE.parent}", source]
        subprocess.run([*command, "-o", built], check=True)
        found = ctypes.CDLL(str(built))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    found.block_size.restype = found.device_size.restype = size
    found.checksum_by.argtypes = (ctypes.c_int, pointer, size, pointer, pointer)
    return found
