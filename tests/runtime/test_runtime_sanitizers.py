"""The native pool under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ssd_fx.runtime.native import loader

HERE = Path(__file__).parent
SANITIZERS = ["thread", "address,undefined"]


def run(sanitizer, directory, source):
    """The stress program, built from the pool's `source` directory: (exit status, output)."""
    program, trivial = directory / "stress", directory / "trivial.c"
    command = [
        "cc",
        "-std=gnu11",
        "-g",
        "-O1",
        "-pthread",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=undefined",
    ]
    trivial.write_text("int main(void) { return 0; }\n")
    for step in ([*command, trivial, "-o", program], [program]):
        checked = subprocess.run(step, capture_output=True, text=True)
        if checked.returncode:
            pytest.skip(f"-fsanitize={sanitizer} does not work here: {checked.stderr.strip()[-300:]}")
    files = [HERE / "stress_iopool.c", HERE / "fake_cuda.c"]
    subprocess.run([*command, "-Wall", "-Werror", f"-I{source}", *files, "-o", program], check=True)
    done = subprocess.run(
        [program, directory, "1000", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_stress(sanitizer, tmp_path):
    """Every request ends as OK or cancelled, with the right bytes, and no sanitizer has anything to say."""
    status, output = run(sanitizer, tmp_path, loader.SOURCE.parent)
    found = re.fullmatch(r"ok (\d+) cancelled (\d+) wrong (\d+)\n", output)
    assert found, output
    ok, cancelled, wrong = map(int, found.groups())
    assert (status, wrong) == (0, 0)
    assert ok >= 50
    assert cancelled >= 10


FAULTS = {  # what each sanitizer must see, so that its silence means something
    "thread": (
        "    atomic_store(&r->state, state);",
        "    atomic_store(&r->state, state); r->ended = now();",
    ),
    "address,undefined": (
        "    if (part->running || part->queued || part->over) return;",
        "    if (part->queued || part->over) return;",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_planted_faults_are_seen(sanitizer, tmp_path):
    """An access after the last one; a request that is final while a piece of it runs."""
    source = tmp_path / "native"
    shutil.copytree(loader.SOURCE.parent, source)
    right, wrong = FAULTS[sanitizer]
    text = (source / "iopool.c").read_text()
    assert text.count(right) == 1
    (source / "iopool.c").write_text(text.replace(right, wrong))
    status, output = run(sanitizer, tmp_path, source)
    assert status != 0
    assert re.search(r"data race|heap-use-after-free", output), output
