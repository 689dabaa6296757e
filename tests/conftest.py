from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ssd_fx
from ssd_fx.runtime import entries, trace
from ssd_fx.runtime import stats as counts
from ssd_fx.runtime.device import device_trace
from ssd_fx.runtime.stores import close_stores
from tests import sources
from tests.alone import turn
from tests.inductor import kernels_on_demand, start_at_once
from tests.runtime.engines import forget

for name in [name for name in os.environ if name.startswith("SSD_FX_")]:
    del os.environ[name]  # what a developer trains with is nothing to the tests
# Tests of the I/O want their tensors on disk. Those of recomputing and of budgets say so.
os.environ["SSD_FX_RECOMPUTE"] = "0"
os.environ["SSD_FX_BUDGET"] = "0"
os.environ["SSD_FX_SPARE"] = "0"  # also where they do not lower the peak
os.environ["SSD_FX_MACHINE"] = "default"  # plans do not depend on the machine, and nothing is measured
start_at_once()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Before any fixture of the test is made, and until the last has ended."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    shared = Path(item.config.workerinput["shared"])
    with turn(shared, alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_finish() -> None:
    """What is imported stays: no collection looks at it again, which takes most of the time of one."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist: tells a worker where the turns of all are taken."""
    node.workerinput["shared"] = str(node.config._tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test starts with no counters, and leaves no file and no compiled code behind."""
    trace.clear()
    device_trace.clear()
    ssd_fx.reset_stats()
    counts._totals.whole_graphs, counts._totals.whole_why = 0, ""  # which a reset leaves
    yield
    torch._dynamo.reset()
    close_stores()
    forget()
    entries.forget()  # of handles that a failed test has left in a traceback


@pytest.fixture(autouse=True, scope="session")
def compiler() -> Iterator[None]:
    with kernels_on_demand():
        yield


@pytest.fixture(params=sources.ALL, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> sources.Source:
    """Each source of a loaded value in turn: `with source.forced() as options`."""
    found: sources.Source = request.param
    return found
