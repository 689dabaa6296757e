import pytest

from ssd_fx.runtime import entries, stats, trace
from ssd_fx.runtime.device import device_trace
from ssd_fx.runtime.store import close_stores
from tests.runtime.harness import config_json


@pytest.fixture(autouse=True)
def fresh_counters():
    trace.clear()
    device_trace.clear()
    stats.reset_stats()
    yield
    close_stores()
    entries.forget()  # of handles that a failed test has left in a traceback


@pytest.fixture
def config(tmp_path):
    """The posix engine in a directory of its own."""
    return config_json(tmp_path)


@pytest.fixture(params=["posix", "memory"])
def any_config(request, tmp_path):
    return config_json(tmp_path, request.param)
