"""Plants one fault in a copy of the checkout, and runs tests there until one of them fails.

    copy the checkout -> plant -> the fault's own tests -> all tests of the mirrored directory -> take the fault out
                                  `-- one fails: it must pass without the fault --'

The copy has the built library of I/O threads. Where a fault is in its C files the library no longer fits its source, so
`runtime/native/loader.py` builds one of the faulty source. Caches are apart from the user's, and one for all faults:
what is cached is named after its source.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.planted.fault import ROOT, Fault
from tests.planted.results import NOT_FOUND

NAMED_S = 300.0  # for a fault's own tests; a suite that hangs has found its fault
MIRRORED_S = 1800.0
_LEFT_OUT = (".*", "__pycache__", "build", "dist", "demo-out", "*.egg-info")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", re.MULTILINE)  # a log line may begin so, too
_CACHES = {"XDG_CACHE_HOME": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TMPDIR": "tmp"}


@dataclass(frozen=True)
class Trial:
    """`found_by`: a test, `hangs: ` or `crashes: ` and tests, or `NOT_FOUND`. `seconds`: of all tests until then."""

    found_by: str
    seconds: float


def trial(fault: Fault, scratch: Path) -> Trial:
    """What comes of a fault. `scratch`: a directory for the copy and for the caches, which stay.

    Raises:
        ValueError: the fault cannot be planted, or what found it fails without it too.
        RuntimeError: pytest could not run the tests.
    """
    checkout = scratch / "checkout"
    copy(checkout)
    fault.plant(checkout)
    started = time.monotonic()
    found_by, ran = failure(checkout, fault.paths, NAMED_S), fault.paths
    if found_by == NOT_FOUND:
        found_by, ran = failure(checkout, [fault.mirrored], MIRRORED_S), [fault.mirrored]
    seconds = time.monotonic() - started
    if found_by != NOT_FOUND:
        shutil.copy(ROOT / fault.file, checkout / fault.file)
        again = [found_by] if "::" in found_by and ": " not in found_by else ran
        without = failure(checkout, again, MIRRORED_S)
        if without != NOT_FOUND:
            raise ValueError(f"{fault.name}: {found_by} failed with it, and {without} without it")
    return Trial(found_by, seconds)


def copy(target: Path) -> None:
    """A fresh copy of the checkout, with the built library of the native pool."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))


def failure(checkout: Path, tests: Sequence[str], limit_s: float) -> str:
    """The first test that fails, or how the run ended otherwise; `NOT_FOUND` if all pass."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    for variable, name in _CACHES.items():
        environment[variable] = str(checkout.parent / name)
        Path(environment[variable]).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"hangs: {' '.join(tests)}"
    finally:
        _end(process)
    if process.returncode in (0, 1, 2):
        failed = _FAILED.findall(output)
        return failed[0] if failed else (NOT_FOUND if process.returncode == 0 else f"crashes: {' '.join(tests)}")
    if process.returncode < 0 or process.returncode > 5:
        return f"crashes: {' '.join(tests)}"
    raise RuntimeError(f"pytest could not run {tests}:\n{output}")


def _end(process: subprocess.Popen[str]) -> None:
    """End the tests and what they have started, if they still run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
