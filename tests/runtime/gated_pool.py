"""Drives that are slow or fail: the real pool, whose writes to a file wait, or fail, as the test says."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from ssd_fx.runtime.engines.extents import BackingFile
from ssd_fx.runtime.native import loader, pool
from tests import built


class Gates:
    """Of the files of all engines that are made within `installed`."""

    def __init__(self) -> None:
        sources = loader.SOURCE.parent
        command = (*built.C, "-O1", f"-I{sources}")
        made = str(built.library(Path(__file__).with_suffix(".c"), command, among=sources.glob("*.[ch]")))
        self.library = loader.Library(made)
        self._dll = ctypes.CDLL(made)
        self._files: set[int] = set()

    def hold(self, file: BackingFile) -> None:
        """Writes to the file wait from here on."""
        self._files.add(file.fd)
        self._dll.gate_hold(file.fd, 1)

    def let_go(self, file: BackingFile) -> None:
        self._dll.gate_hold(file.fd, 0)

    def fail(self, file: BackingFile, code: int, nth: int = 0) -> None:
        """The write after `nth` others fails with the errno `code`."""
        self._files.add(file.fd)
        self._dll.gate_fail(file.fd, code, nth)

    def open_all(self) -> None:
        for fd in self._files:
            self._dll.gate_hold(fd, 0)
            self._dll.gate_fail(fd, 0, 0)
        self._files.clear()


_gates = functools.cache(Gates)


@contextlib.contextmanager
def installed() -> Iterator[Gates]:
    gates = _gates()

    def make_pool(drives: int, threads: int) -> pool.Pool:
        return pool.Pool(gates.library, drives, threads)

    with mock.patch.object(loader, "make_pool", make_pool):
        try:
            yield gates
        finally:
            gates.open_all()
