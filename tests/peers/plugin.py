"""A pytest plugin for runs of PyTorch's own test files: installs a partitioner, logs what becomes of every test.

    pytest -p tests.peers.plugin --partitioner ours --directory DIR --log FILE test_aotdispatch.py

The log has one line of JSON when a test starts and one when it ends; tests that have a line in it already are not run
again, so that a run that was stopped, by a crash too, goes on where it was.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ssd_fx
from tests.peers.install import COUNT, PARTITIONERS, install


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peers")
    group.addoption("--partitioner", choices=PARTITIONERS, required=True)
    group.addoption("--engine", default="posix", help="of ssd_fx: posix or memory")
    group.addoption("--directory", required=True, help="where ssd_fx has its files")
    group.addoption("--log", type=Path, required=True)
    group.addoption("--seconds", type=float, default=float("inf"), help="stop before the next test after so long")


def pytest_configure(config: pytest.Config) -> None:
    options = {"engine": config.getoption("--engine"), "dirs": [config.getoption("--directory")]}
    install(config.getoption("--partitioner"), options)
    _test_devices_on_cpu()
    _without_a_torchvision_that_does_not_load()
    config.pluginmanager.register(Log(config.getoption("--log"), config.getoption("--seconds")))


def _without_a_torchvision_that_does_not_load() -> None:
    """The tests leave out what needs torchvision where it is not installed; beside a CPU torch it may not load."""
    try:
        import torchvision  # noqa: F401  (installed by the extra zoo)
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # to import it is an ImportError now


def _test_devices_on_cpu() -> None:
    """Classes that are made for every device but the CPU are made for the CPU: what they test runs there as well."""
    from torch.testing._internal import common_device_type

    make = common_device_type.instantiate_device_type_tests

    def made(generic: type, scope: dict[str, Any], **_: object) -> None:
        make(generic, scope, only_for=("cpu",))

    common_device_type.instantiate_device_type_tests = made


class Log:
    """One run, appended to the log of its suite and partitioner."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._until = path, time.monotonic() + seconds
        self._reports: list[pytest.TestReport] = []

    def _write(self, **values: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        done = names(self._path)
        self._write(collected=len(items))
        config.hook.pytest_deselected(items=[item for item in items if name_of(item.nodeid) in done])
        items[:] = [item for item in items if name_of(item.nodeid) not in done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.monotonic() > self._until:
            item.session.shouldstop = "the time is up"
            return (yield)
        name, before, started = name_of(item.nodeid), (COUNT.calls, COUNT.groups), time.monotonic()
        self._write(started=name)
        self._reports = []
        result = yield
        spent = {"calls": COUNT.calls - before[0], "groups": COUNT.groups - before[1]}
        spent |= {"seconds": round(time.monotonic() - started, 2)}
        self._write(name=name, **_outcome(self._reports), **spent)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        found = ssd_fx.stats()
        moved = {n: getattr(found, n) for n in ("stores", "loads", "written_bytes", "read_bytes", "forwarded_bytes")}
        self._write(moved=moved)


def names(path: Path) -> set[str]:
    """Of the tests that a log knows, those that never ended too."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["started"] for line in lines if "started" in line}


def name_of(nodeid: str) -> str:
    """Class::test, without the file, which is not in the same place everywhere."""
    return nodeid.split("::", 1)[1]


def _outcome(reports: list[pytest.TestReport]) -> dict[str, Any]:
    """passed, failed, skipped or xfailed, as unittest would say, and why where it did not pass."""
    for report in reports:
        if report.failed:
            return {"outcome": "failed", "why": report.longreprtext[-3000:]}
    for report in reports:
        if report.skipped:
            kind = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-300:]
            return {"outcome": kind, "why": reason}
    return {"outcome": "passed", "why": ""}
