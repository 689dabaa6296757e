"""Builds guard.cpp, and starts the process that generates code with it preloaded."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from tests.cuda_codegen.code import Counts

SOURCE = Path(__file__).with_name("guard.cpp")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Generated:
    """What came of one case under one backend; `audited`: graphs whose code the audit read."""

    case: str
    backend: str
    audited: int
    forward: Counts
    backward: Counts

    @staticmethod
    def read(line: str) -> Generated:
        found: dict[str, Any] = json.loads(line)
        halves = {half: Counts(**found[half]) for half in ("forward", "backward")}
        return Generated(**(found | halves))


def library() -> Path:
    """The library, compiled at first use into the user's cache under a name that depends on its source and on torch.

    It is linked to the torch of one environment, which may be removed while another one goes on.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd_fx"
    of_torch = Path(torch.__file__).parent / "lib"
    version = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {of_torch}".encode()).hexdigest()[:16]
    path = cache / f"cuda-codegen-{version}.so"
    if not path.exists():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [os.environ.get("CXX", "g++"), "-O1", "-std=c++20", "-shared", "-fPIC", "-Wall"]
        command += [f"-isystem{path}" for path in include_paths()]
        link = [f"-L{of_torch}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{of_torch}"]
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / path.name
            subprocess.run([*command, "-o", str(built), str(SOURCE), *link], check=True)
            built.replace(path)  # whole or not at all, whoever else compiles it now
    return path


def pretending(module: str, arguments: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """The lines that the module prints as a program, in a process that may pretend a device.

    Raises: RuntimeError with what the process wrote, when it failed.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    own = {"LD_PRELOAD": str(library()), "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**environment, **own}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def generated(cases: Iterable[str], code: Path | None = None) -> list[Generated]:
    """Every case under both backends, in a process of its own; the code goes to the directory `code`.

    Raises: as `pretending`.
    """
    into = [] if code is None else ["--code", str(code)]
    return [Generated.read(line) for line in pretending("tests.cuda_codegen.generate", [*into, *cases], os.environ)]
