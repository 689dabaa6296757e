"""faultio.c from Python: build it, start a process with it, arm rules in that process."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from tests import built, fresh

SOURCE = Path(__file__).with_name("faultio.c")
ROOT = Path(__file__).resolve().parents[2]


class Call(enum.IntEnum):
    """The kinds of calls, as numbered in faultio.c."""

    WRITE = 0
    READ = 1
    ALLOCATE = 2
    TRUNCATE = 3
    OPEN = 4


class Action(enum.IntEnum):
    """What may happen beside an errno, which is positive."""

    SHORT = -1
    NOTHING = -2
    FLIP = -3
    LOST = -4
    ZEROS = -5
    SLEEP = -6


def action_name(action: int) -> str:
    """What an action is called: "EIO", "FLIP"."""
    return errno.errorcode[action] if action > 0 else Action(action).name


def library() -> Path:
    """The library, compiled at first use."""
    return built.library(SOURCE, (*built.C, "-O2"), ["-ldl"])


def run(module: str, *arguments: object, timeout_s: float = 300) -> fresh.Done:
    """`python -m module arguments...` with the library preloaded.

    Raises: subprocess.TimeoutExpired for a process that hangs.
    """
    return fresh.ended("-m", module, *arguments, timeout_s=timeout_s, LD_PRELOAD=str(library()))


class Faults:
    """The library in a process that was started with it. Rules touch unlinked files under `directory` only.

    Raises: RuntimeError where the library is not preloaded.
    """

    def __init__(self, directory: str | Path) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "faultio_arm"):
            raise RuntimeError(f"start the process with LD_PRELOAD={library()}")
        os.environ.pop("LD_PRELOAD", None)  # compilers and other children need none
        self._rules: list[str] = []
        for name in ("faultio_calls", "faultio_faults", "faultio_fired"):
            getattr(self._library, name).restype = ctypes.c_int64
        number = ctypes.c_int64
        self._library.faultio_arm.argtypes = [
            ctypes.c_int, ctypes.c_int, number, number, number, ctypes.c_double, ctypes.c_uint64, ctypes.c_int,
        ]  # fmt: skip
        self._library.faultio_directory(os.fsencode(os.path.realpath(directory)))

    def at(self, call: Call, action: int, nth: int, most: int = 1, milliseconds: int = 1) -> None:
        """The `nth` call from now on (1 is the next) meets `action`, and those after it, `most` in all (0: all)."""
        self._arm(call, action, nth, 1, most, 0.0, 0, milliseconds)

    def some(self, call: Call, action: int, rate: float, seed: int, milliseconds: int = 1) -> None:
        """Every call meets `action` with probability `rate`."""
        self._arm(call, action, 1, 0, 0, rate, seed, milliseconds)

    def calls(self, call: Call) -> int:
        """Calls since the last reset, with a fault or without."""
        return int(self._library.faultio_calls(int(call)))

    def count(self, calls: Sequence[Call] = tuple(Call)) -> int:
        """Faults since the last reset."""
        return sum(int(self._library.faultio_faults(int(call))) for call in calls)

    def count_by_name(self) -> dict[str, int]:
        """The same by call and action: `{"WRITE EIO": 2}`."""
        found: dict[str, int] = {}
        for number, name in enumerate(self._rules):
            found[name] = found.get(name, 0) + int(self._library.faultio_fired(number))
        return found

    def disarm(self) -> None:
        """Ends all rules; the counters stay."""
        self._library.faultio_disarm()

    def reset(self) -> None:
        """Ends all rules and sets the counters to zero."""
        self._library.faultio_reset()
        self._rules.clear()

    def _arm(self, call: Call, action: int, *numbers: float) -> None:
        if not self._library.faultio_arm(int(call), int(action), *numbers):
            raise RuntimeError("more rules than faultio.c has room for")
        self._rules.append(f"{call.name} {action_name(action)}")


if __name__ == "__main__":
    print(library())
