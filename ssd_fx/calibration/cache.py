"""The file of measured rates, which all processes of a user share.

    ~/.cache/ssd_fx/machine.json        {"version": 10, "measured": {"compute {...}": entry, "disk {...}": entry}}

A key has the hardware and software that was measured, an entry the fields of `Entry`. One process of a machine
measures at a time, under the lock of a file that has the machine's name, or of the temporary directory where no such
file can be locked. Machines that share the file write to it in turn, under another lock. It is read without one.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ssd_fx import mounts
from ssd_fx.options import Options
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.runtime.build import cache_home, replace_text

_VERSION = 10  # rises when something is measured otherwise, so that figures of before are not used
_TRIED_S = 600.0  # what could not be measured is not tried again for so long, by any process


class NotKept(RuntimeWarning):
    """What was measured is in no file, so other processes measure it again."""


@dataclass(frozen=True)
class Entry:
    """The rates of a key, as `Machine.with_rates` takes them; or none, and when and why they could not be measured."""

    rates: Mapping[str, object] = field(default_factory=dict)
    at: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        Machine.default(torch.device("cpu"), 1).with_rates(self.rates)

    @property
    def holds(self) -> bool:
        """Whether nobody needs to measure now."""
        return bool(self.rates) or 0 <= time.time() - self.at < _TRIED_S


def path() -> Path:
    """The file.

    Raises:
        FileNotFoundError: there is no home directory.
    """
    return cache_home() / "ssd_fx" / "machine.json"


def read() -> dict[str, Entry]:
    """The entries by key; none if there is no file yet.

    Raises:
        OSError, ValueError: the file is of no use.
    """
    try:
        text = path().read_text()
    except FileNotFoundError:
        return {}
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise ValueError(f"not version {_VERSION} of the machine's rates")
    try:
        return {str(key): Entry(**entry) for key, entry in found["measured"].items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no rates: {error}") from None


@contextmanager
def exclusive() -> Iterator[dict[str, Entry]]:
    """The entries, locked against other processes of this machine. What the caller adds is written at the end.

    Empty, after a `NotKept`, where nothing can be kept. The same warning comes where the end cannot be written.
    """
    with ExitStack() as turn:
        file = None
        try:
            file = path()
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            turn.enter_context(_in_turn(file.with_name(f"{platform.node()}.lock"), os.O_RDWR | os.O_CREAT))
        except OSError as error:
            file = None
            _warn_unkept(error)
            with suppress(OSError):  # all ranks measure, but not each other
                turn.enter_context(_in_turn(Path(tempfile.gettempdir()), os.O_RDONLY))
        entries = _usable(file) if file else {}
        before = dict(entries)
        yield entries
        new = {key: entry for key, entry in entries.items() if before.get(key) != entry}
        if file and new:
            try:
                with _in_turn(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT):
                    _add(file, new)
            except OSError as error:
                _warn_unkept(error)


def _add(file: Path, new: Mapping[str, Entry]) -> None:
    """Adds entries to the file, to which another machine may have added some meanwhile. Raises: OSError."""
    entries: dict[str, Entry] = {}
    with suppress(OSError, ValueError):  # of no use, and `exclusive` has said so
        entries = read()
    measured = {key: asdict(entry) for key, entry in (entries | dict(new)).items()}
    replace_text(file, json.dumps({"version": _VERSION, "measured": measured}, indent=1, sort_keys=True))


def compute_key(device: torch.device) -> str:
    """The key of what computes: "compute", and the hardware and software as JSON."""
    return f"compute {json.dumps(_hardware(device), sort_keys=True)}"


def disk_key(config: Options, device: torch.device) -> str:
    """The key of what moves bytes: "disk", and as JSON what computes, the drives under the directories, engine and
    checksums.

    Drives have names that hold on every machine, since machines may share a home directory.
    """
    drives = [] if config.engine == "memory" else sorted({mounts.name_of(path) for path in config.dirs})
    what = _hardware(device) | {"drives": drives, "engine": config.engine, "checksums": config.checksums}
    return f"disk {json.dumps(what, sort_keys=True)}"


def _hardware(device: torch.device) -> dict[str, object]:
    what: dict[str, object] = {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return what | {"torch": torch.__version__, "device": name}


def _cpu() -> str:
    """The name of the CPU model, from /proc/cpuinfo where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _usable(file: Path) -> dict[str, Entry]:
    """The entries; none after a RuntimeWarning if the file is of no use."""
    try:
        return read()
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} is of no use ({error}), so ssd_fx measures again", RuntimeWarning, stacklevel=2)
        return {}


@contextmanager
def _in_turn(file: Path, flags: int) -> Iterator[None]:
    """Hold the lock of a file that is opened with `flags`.

    Raises:
        OSError: it cannot be opened or locked.
    """
    lock = os.open(file, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too
    finally:
        os.close(lock)


def _warn_unkept(error: OSError) -> None:
    text = f"ssd_fx cannot keep the machine's rates ({error}), and measures them in every process"
    warnings.warn(text, NotKept, stacklevel=2)
