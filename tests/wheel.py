"""Looks at a wheel, and installs it where there is no compiler: what works there, and what says that it needs one.

python -m tests.wheel dist/*.whl      # make wheel

The environment is new. Its torch is that of the Python that runs this, and nothing else of ssd_fx is in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import venv
import zipfile
from pathlib import Path

import torch

TAG = re.compile(r"ssd_fx-[\d.]+-py3-none-(manylinux_2_\d+|linux)_(x86_64|aarch64)\.whl")

TRAINS = """
import os, sys, warnings, torch, ssd_fx
from ssd_fx.runtime.native.loader import SOURCE, library

assert sys.prefix in ssd_fx.__file__, ssd_fx.__file__
where, options = sys.argv[1], {"dirs": [sys.argv[1]], "min_bytes": 0, "allow_tmpfs": True, "machine": "default"}
library()
assert not os.listdir(os.environ["XDG_CACHE_HOME"]), "the pool is that of the wheel"

def trained(**more):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    step = torch.compile(model, backend="ssd_fx", options=options | {"budget": 0} | more)
    step(torch.randn(512, 64)).square().mean().backward()
    return ssd_fx.stats()

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert trained(inner="aot_eager").written_bytes > 0
assert ["A C++ compiler as 'g++' is needed" in str(each.message) for each in said].count(True) == 1, said
print(ssd_fx.report())
region = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
ssd_fx.checkpoint(region, torch.randn(512, 64) * 1, options=options).sum().backward()
assert "checkpoint 0" in ssd_fx.stats().graphs
print("trained")
try:
    trained()
except Exception as error:
    print("inductor:", type(error).__name__, str(error).splitlines()[0])
"""

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
options = {"dirs": ["."], "machine": "default", "min_bytes": 0, "allow_tmpfs": True}
torch.compile(model, backend="ssd_fx", options=options)(torch.randn(512, 64)).square().mean().backward()
"""


def check(wheel: Path) -> str:
    """What the checks printed.

    Raises:
        AssertionError: the wheel is of one Python, has no pool, or something does not work that needs no compiler.
    """
    assert TAG.fullmatch(wheel.name), f"{wheel.name} is not for every Python 3"
    names = zipfile.ZipFile(wheel).namelist()
    assert "ssd_fx/runtime/native/_iopool.so" in names, "the pool was not built"
    with tempfile.TemporaryDirectory() as scratch:
        return _installed(wheel, Path(scratch))


def _installed(wheel: Path, scratch: Path) -> str:
    venv.create(scratch / "venv", with_pip=True)
    python = scratch / "venv" / "bin" / "python"
    (site,) = (scratch / "venv" / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))  # behind what is installed
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True)
    for name in ("path", "cache", "drive"):
        (scratch / name).mkdir()
    new = {"PATH": "path", "XDG_CACHE_HOME": "cache", "TORCHINDUCTOR_CACHE_DIR": "inductor"}  # with nothing compiled
    (scratch / "train.py").write_text(textwrap.dedent(SCRIPT))
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ}
    environment = kept | {name: str(scratch / folder) for name, folder in new.items()}
    command = str(scratch / "venv" / "bin" / "ssd-fx")
    said = ""
    for words in (
        [python, "-c", TRAINS, scratch / "drive"],
        [command, "fit", "train.py", "--budget", "0"],
        [command, "explain", "train.py"],
        [command, "doctor", scratch / "drive"],
    ):
        done = subprocess.run(words, cwd=scratch, env=environment, capture_output=True, text=True)
        said += f"$ {Path(str(words[0])).name} {' '.join(map(str, words[1:2])).splitlines()[0]}\n{done.stdout}"
        needed = words[1] != "doctor"  # whose status says that something is missing: a compiler
        assert not needed or done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert re.search("inductor: .*InvalidCxxCompiler", said), f"Inductor needs a compiler, and says so: {said}"
    assert "no C++ compiler works" in said, f"doctor says that there is none: {said}"
    return said


def main() -> None:
    (wheel,) = sys.argv[1:]
    print(check(Path(wheel).resolve()))
    print(f"{wheel}: works without a compiler, but for Inductor; Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
