from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import ssd_fx
from ssd_fx.runtime import entries, trace
from ssd_fx.runtime.device import device_trace
from ssd_fx.runtime.store import close_stores
from tests import sources

# Tests of the I/O want their tensors on disk. Those of recomputing turn it on.
os.environ.setdefault("SSD_FX_RECOMPUTE", "0")
os.environ["SSD_FX_MACHINE"] = "default"  # plans do not depend on the machine, and nothing is measured


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test starts with no counters, and leaves no file and no compiled code behind."""
    trace.clear()
    device_trace.clear()
    ssd_fx.reset_stats()
    yield
    torch._dynamo.reset()
    close_stores()
    entries.forget()  # of handles that a failed test has left in a traceback


@pytest.fixture(params=sources.ALL, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> sources.Source:
    """Each source of a loaded value in turn: `with source.forced() as options`."""
    found: sources.Source = request.param
    return found
