"""Training while the disk fails: the library that plants faults, the N-th-call loop, the soak.

Each runs in a process of its own, with faultio.c preloaded. docs/runtime.md, "Failures", is what they check.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.faults import faultio

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build faultio.c with")


def test_the_library_plants_what_its_rules_say(tmp_path: Path) -> None:
    """Every action of every call, on unlinked files of one directory only, at the calls that the rule names."""
    done = faultio.run("tests.faults.selftest", tmp_path)
    assert (done.returncode, done.stdout) == (0, "every fault came as it was planted\n"), done.stderr


def test_the_nth_call_of_a_step_fails(tmp_path: Path) -> None:
    """The faults that differ most, at every call: writes, reads, the growth of the file, its opening."""
    done = faultio.run("tests.faults.nth_call", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_all_hit(done.stdout, 20)


@pytest.mark.slow
def test_the_second_directory_cannot_be_opened(tmp_path: Path) -> None:
    """No descriptor is left of the first one, which would keep its space until the process ends."""
    done = faultio.run("tests.faults.nth_call", tmp_path, "--two")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_nth_call_of_a_step_fails_in_every_way(tmp_path: Path) -> None:
    done = faultio.run("tests.faults.nth_call", tmp_path, "--all", timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_all_hit(done.stdout, 66)


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """100 faults of all kinds but damaged bytes."""
    done = faultio.run("tests.faults.soak", tmp_path, "--faults", 100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_met(done.stdout, 100, ["right", "dropped"])


@pytest.mark.slow
def test_a_soak(tmp_path: Path) -> None:
    done = faultio.run("tests.faults.soak", tmp_path, "--faults", 5000, "--corrupt", "--seed", 1, timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_met(done.stdout, 5000, ["right", "dropped", "named error"])


@pytest.mark.slow
def test_the_soak_finds_wrong_gradients(tmp_path: Path) -> None:
    """Its own test: damaged bytes that no checksum stops come out as wrong gradients, and end it."""
    done = faultio.run("tests.faults.soak", tmp_path, "--faults", 5000, "--corrupt", "--without-checksums")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("WRONG GRADIENTS after")


def assert_all_hit(report: str, cases: int) -> None:
    """Every case made attempts; as many for every way in which a write or a read can fail."""
    *lines, last = report.splitlines()
    counts = {name: int(count) for name, count in (line.split(": ") for line in lines)}
    assert len(counts) == cases
    assert last == f"{sum(counts.values())} attempts, every one right"
    assert min(counts.values()) >= 1
    for call in ("WRITE", "READ"):
        assert len({count for name, count in counts.items() if name.startswith(call) and "at the" in name}) == 1


def assert_met(report: str, faults: int, outcomes: list[str]) -> None:
    """The soak's report speaks of that many faults, and of those outcomes."""
    met = re.search(r"(\d+) episodes, (\d+) faults, (\d+) delays", report)
    assert met, report
    assert int(met[2]) >= faults
    for outcome in outcomes:
        assert re.search(rf"[1-9]\d* {outcome}", report), report
