"""What the libraries of this process keep, beside tensors: all that malloc has, less what compilers have taken.

oneDNN keeps what it prepares for a product of bf16 matrices: twice 252 KiB for each new shape, whatever the sizes
are, for up to 1,024 shapes (PyTorch 2.13, with AVX-512). MKL keeps buffers for each thread.

malloc tells one number for the whole process, Python's objects included. So only its growth counts, from the end of the
first compilation on and without what later ones take: neither the interpreter nor a compiler is part of a step. glibc
tells that number, over all threads, from 2.33 on. With an older one, or another malloc, nothing is counted.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

from ssd_fx.compat import callback_handler


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _reader() -> Callable[[], int]:
    """A function that returns the bytes that are malloc's and in use. It takes 0.1 ms."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return lambda: 0
    read.restype = _Mallinfo

    def in_use() -> int:
        found = read()
        return int(found.uordblks + found.hblkhd)  # in arenas, and in mappings of their own

    return in_use


class Libraries:
    """Counts what libraries keep in this process, from `watch` on, without what compilations take."""

    def __init__(self) -> None:
        self._in_use = _reader()
        self._base: int | None = None  # what malloc had that is not counted; None before `watch`
        self._before: int | None = None  # what malloc had before the compilation that runs; None between them
        self._compiled = False  # whether a compilation has ended since the last look
        self._small: int | None = None  # `small` of the first look

    def watch(self) -> None:
        """Watches compilations. Called in each one, because `torch._dynamo.reset` drops the callbacks."""
        if self._begins in callback_handler.start_callbacks:
            return
        callback_handler.register_start_callback(self._begins)
        callback_handler.register_end_callback(self._ends)
        self._before = self._in_use()
        if self._base is None:
            self._base = self._before

    def nbytes(self, small: int) -> int:
        """The bytes that libraries keep now. `small`: bytes of small tensors in malloc, which are counted elsewhere."""
        if self._base is None:
            return 0
        if self._compiled:  # a compiler leaves garbage. Were it collected later, it would hide what came meanwhile
            self._compiled = False
            garbage = self._in_use()
            gc.collect()
            self._base -= garbage - self._in_use()
        if self._small is None:
            self._small = small
        in_use = self._in_use() if self._before is None else self._before
        grown = in_use - (small - self._small)
        self._base = min(self._base, grown)
        return grown - self._base

    def _begins(self, *_: object) -> None:
        self._before = self._in_use()

    def _ends(self, *_: object) -> None:
        if self._base is not None and self._before is not None:
            self._base += self._in_use() - self._before
            self._before, self._compiled = None, True


LIBRARIES = Libraries()
