"""Everything here needs a CUDA device: `make gpu`.

cuFile is configured once per process, so engine kvikio-forced, which needs another configuration than kvikio, needs a
process of its own: GPU_ENGINES=kvikio-forced.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ssd_fx.options import Options
from ssd_fx.runtime.engines import cufile, registry
from ssd_fx.runtime.engines.posix import PosixEngine

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS then adds up in one order; read when CUDA starts
HERE = Path(__file__).parent
ENGINES = tuple(os.environ.get("GPU_ENGINES", "memory,posix,kvikio").split(","))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="torch sees no CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of an engine that reaches CUDA memory on this machine."""
    name = str(request.param)
    if name == "posix" and "cuda" not in PosixEngine.devices:
        pytest.skip("engine posix takes CPU tensors only")
    if name.startswith("kvikio"):
        found = cufile.status(forced=name.endswith("forced"))
        if not found.version or not (found.real or name.endswith("forced")):
            pytest.skip(found.reason)
    return name


@pytest.fixture
def config(engine: str, tmp_path: Path) -> str:
    """The config of the ops for that engine, in a directory of its own."""
    options = {"dirs": [str(tmp_path)], "engine": engine, "allow_tmpfs": True}
    try:
        registry.make_engine(Options(dirs=(str(tmp_path),), engine=engine, allow_tmpfs=True)).close()
    except OSError as error:
        if not engine.endswith("forced"):
            raise
        pytest.skip(f"cuFile does not go through host memory here either: {error}")
    return json.dumps(options)
