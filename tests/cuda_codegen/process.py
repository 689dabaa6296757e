"""Builds guard.cpp, and starts the process that generates code with it preloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from tests import built
from tests.cuda_codegen.code import Counts

SOURCE = Path(__file__).with_name("guard.cpp")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Generated:
    """What came of one case under one backend; `audited`: graphs whose code the audit read; `launches`: how many the
    planner expects in both graphs.

    `walked`: the peak of the code in bytes (`walk.py`), 0 where sizes are symbols. `peak`: what the plan says, 0
    without one.
    """

    case: str
    backend: str
    audited: int
    forward: Counts
    backward: Counts
    launches: int = 0
    walked: int = 0
    peak: int = 0

    @staticmethod
    def read(line: str) -> Generated:
        found: dict[str, Any] = json.loads(line)
        halves = {half: Counts(**found[half]) for half in ("forward", "backward")}
        return Generated(**(found | halves))


def library() -> Path:
    """Linked to the torch of one environment, which may be removed while another one goes on: the name says which."""
    of_torch = Path(torch.__file__).parent / "lib"
    command = [os.environ.get("CXX", "g++"), "-O1", "-std=c++20", "-Wall", f"-DTORCH_OF_THE_TESTS={torch.__version__}"]
    command += [f"-isystem{path}" for path in include_paths()]
    return built.library(SOURCE, command, [f"-L{of_torch}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{of_torch}"])


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
