"""Checks faultio.c itself, in a process that was started with it: python -m tests.faults.selftest DIRECTORY."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
from collections.abc import Callable

from tests.faults.faultio import Action, Call, Faults

BYTES = bytes(range(256)) * 64  # four blocks
OLD = b"\xaa" * len(BYTES)
HALF = len(BYTES) // 2


def code_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0


def unlinked(directory: str) -> int:
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.pwrite(fd, OLD, 0)
    return fd


FLIPPED = BYTES[:HALF] + bytes([BYTES[HALF] ^ 4]) + BYTES[HALF + 1 :]
WANTED = {  # what a write or a read says, and what the file or the buffer has then
    Action.SHORT: (HALF, BYTES[:HALF] + OLD[HALF:]),
    Action.NOTHING: (0, OLD),
    Action.LOST: (len(BYTES), OLD),
    Action.FLIP: (len(BYTES), FLIPPED),
    Action.ZEROS: (len(BYTES), bytes(len(BYTES))),
}


def check_writes(faults: Faults, fd: int) -> None:
    for action, (says, has) in WANTED.items():
        os.pwrite(fd, OLD, 0)
        faults.at(Call.WRITE, action, 1)
        assert os.pwrite(fd, BYTES, 0) == says, action
        assert os.pread(fd, len(BYTES), 0) == has, action
        faults.reset()
    os.pwrite(fd, OLD, 0)
    faults.at(Call.WRITE, errno.EDQUOT, 1)
    assert code_of(lambda: os.pwritev(fd, [BYTES], 0)) == errno.EDQUOT
    assert os.pread(fd, len(BYTES), 0) == OLD
    faults.reset()


def check_reads(faults: Faults, fd: int) -> None:
    os.pwrite(fd, BYTES, 0)
    for action, (says, has) in WANTED.items():
        buffer = bytearray(OLD)
        faults.at(Call.READ, action, 1)
        assert os.preadv(fd, [buffer], 0) == says, action
        assert buffer == has, action
        faults.reset()
    faults.at(Call.READ, errno.EIO, 1)
    assert code_of(lambda: os.pread(fd, 10, 0)) == errno.EIO
    faults.reset()
    faults.at(Call.READ, Action.SLEEP, 1, milliseconds=60)
    started = time.perf_counter()
    assert os.pread(fd, 10, 0) == BYTES[:10]
    assert time.perf_counter() - started >= 0.06
    faults.reset()


def check_others(faults: Faults, fd: int, directory: str) -> None:
    calls: dict[Call, Callable[[], object]] = {
        Call.ALLOCATE: lambda: os.posix_fallocate(fd, 0, 4096),
        Call.TRUNCATE: lambda: os.ftruncate(fd, 4096),
        Call.OPEN: lambda: os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)),
    }
    for call, action in calls.items():
        faults.at(call, errno.ENOSPC, 1)
        assert code_of(action) == errno.ENOSPC, call
        assert code_of(action) == 0, call
        assert (faults.calls(call), faults.count([call])) == (2, 1), call
        faults.reset()


def check_when(faults: Faults, fd: int) -> None:
    """The n-th, from the n-th on, some at random, and nothing once disarmed."""

    def fails(times: int) -> list[int]:
        return [n for n in range(1, times + 1) if code_of(lambda: os.pread(fd, 10, 0))]

    faults.at(Call.READ, errno.EIO, 3)
    assert fails(6) == [3]
    faults.reset()
    faults.at(Call.READ, errno.EIO, 3, most=0)
    assert fails(6) == [3, 4, 5, 6]
    faults.disarm()
    assert fails(6) == []
    assert (faults.calls(Call.READ), faults.count(), faults.count_by_name()) == (12, 4, {"READ EIO": 4})
    faults.reset()
    faults.some(Call.READ, errno.EIO, 0.25, seed=1)
    first = fails(1000)
    assert 180 < len(first) < 320, len(first)
    faults.reset()
    faults.some(Call.READ, errno.EIO, 0.25, seed=1)
    assert fails(1000) == first
    faults.reset()


def check_others_are_left_alone(faults: Faults, directory: str) -> None:
    """A file with a name, and an unlinked one elsewhere."""
    with open(os.path.join(directory, "named"), "wb+") as named, tempfile.TemporaryFile() as elsewhere:
        for call in (Call.WRITE, Call.READ):
            faults.at(call, errno.EIO, 1, most=0)
        for file in (named, elsewhere):
            assert os.pwrite(file.fileno(), BYTES, 0) == len(BYTES)
            assert os.pread(file.fileno(), len(BYTES), 0) == BYTES
        assert faults.count() == 0
    faults.reset()
    os.unlink(os.path.join(directory, "named"))


def main() -> None:
    directory = os.path.join(os.path.realpath(sys.argv[1]), "watched")
    os.mkdir(directory)
    faults = Faults(directory)
    fd = unlinked(directory)
    faults.reset()
    check_writes(faults, fd)
    check_reads(faults, fd)
    check_others(faults, fd, directory)
    check_when(faults, fd)
    check_others_are_left_alone(faults, directory)
    print("every fault came as it was planted")


if __name__ == "__main__":
    main()
