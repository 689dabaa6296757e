"""The engines that the steps run through: each a context that yields the config which replaces that of the graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from ssd_fx.runtime.engines import registry
from tests.cuda_values.late_gpu import LateGpu
from tests.cuda_values.staged import make_engine
from tests.runtime import stub_kvikio

PLAIN = {"prefetch": 0, "adapt": False}
Engine = Callable[[LateGpu, str], AbstractContextManager[str]]


@contextmanager
def kept(gpu: LateGpu, directory: str) -> Iterator[str]:
    """Nothing leaves the device's memory."""
    yield json.dumps({"engine": "memory", "budget": 1 << 40, **PLAIN})


@contextmanager
def memory(gpu: LateGpu, directory: str) -> Iterator[str]:
    yield json.dumps({"engine": "memory", **PLAIN})


@contextmanager
def tiered(gpu: LateGpu, directory: str) -> Iterator[str]:
    """As `staged`, behind a tier of host memory that tensors leave for the drive."""
    with staged(gpu, directory) as config:
        yield json.dumps(json.loads(config) | {"host_budget": 1024})


@contextmanager
def narrow(gpu: LateGpu, directory: str) -> Iterator[str]:
    """Every store waits for the write before it."""
    yield json.dumps({"engine": "memory", "inflight": 1, **PLAIN})


@contextmanager
def unhurried(gpu: LateGpu, directory: str) -> Iterator[str]:
    """As by default: the host runs ahead of the writes, so much is forwarded; reads begin early, and habits form."""
    yield json.dumps({"engine": "memory"})


@contextmanager
def kvikio(gpu: LateGpu, directory: str) -> Iterator[str]:
    """GPUDirect Storage, with the library played by `stub_kvikio` and real files."""
    with pytest.MonkeyPatch.context() as patch:
        stub_kvikio.install(patch, gpu)
        yield json.dumps({"engine": "kvikio", "dirs": [directory], "allow_tmpfs": True, **PLAIN})


@contextmanager
def staged(gpu: LateGpu, directory: str) -> Iterator[str]:
    """Engine posix: the real pool of I/O threads and real files, with the driver played by `staged.LateDriver`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "PosixEngine", make_engine(gpu))  # by which the registry calls it
        yield json.dumps({"engine": "posix", "dirs": [directory], "allow_tmpfs": True, **PLAIN})


ENGINES: dict[str, Engine] = {each.__name__: each for each in (memory, kvikio, staged, tiered, narrow, unhurried)}
SETTLED = (
    "memory",
    "kvikio",
    "staged",
    "tiered",
)  # between forward and backward the host waits for all writes, so all is read
