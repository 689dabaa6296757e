"""Counters as text."""

from __future__ import annotations

import dataclasses

import pytest

from ssd_fx.runtime import stats
from ssd_fx.runtime.stats import GraphStats, Stats

MIB = 2**20


def test_what_happened_in_a_step() -> None:
    found = Stats(
        steps=2,
        saved_bytes=3 * MIB,
        offloaded_bytes=2 * MIB,
        written_bytes=MIB,
        wasted_bytes=MIB // 2,
        stall_s=0.003,
        disk_bytes=MIB // 4,
        graphs={"ab12": GraphStats(steps=2)},
    )
    assert str(found).splitlines() == [
        "2 steps, 1 graphs, 1.5 ms of stall per step; bytes per step:",
        "saved               1.50 MiB   by the forward for the backward",
        "offloaded           1.00 MiB   of these, planned for the drive or host memory",
        "written             0.50 MiB   to the drive or host memory",
        "read                0.00 MiB   back from there",
        "forwarded           0.00 MiB   not read: still in memory when the backward asked",
        "freed               0.00 MiB   stored, and no longer in memory when the backward asked",
        "wasted              0.25 MiB   written in vain: somebody else held the tensor",
        "on disk at the moment: 0.25 MiB",
    ]


def test_the_life_of_the_drives() -> None:
    found = Stats(steps=3, disk_bytes=MIB, drive_bytes_s=1e9, graphs={"ab12": GraphStats(steps=3)})
    assert found.drive_tb_per_day == pytest.approx(86.4)
    assert str(found).endswith(
        "at this speed 86.4 TB are written in a day; the option drive_tbw says how long drives last"
    )
    rated = dataclasses.replace(found, drive_tbw=1200)
    assert rated.drive_life_days == pytest.approx(1200 / 86.4)
    assert str(rated).endswith("86.4 TB are written in a day; new drives rated for 1200 TB last 13.9 days")
    assert str(dataclasses.replace(rated, drive_bytes_s=1e3)).endswith("new drives rated for 1200 TB last 38100 years")


def test_nothing_is_said_of_drives_without_a_speed() -> None:
    assert "in a day" not in str(Stats(disk_bytes=MIB))
    assert (Stats(drive_tbw=600).drive_life_days, Stats().drive_tb_per_day) == (0, 0)


def test_host_memory_does_not_count_as_a_drive() -> None:
    found = Stats(steps=1, written_bytes=3 * MIB, drive_bytes=MIB, graphs={"a": GraphStats(steps=1)})
    assert "drive               1.00 MiB   of these, to the drive at once" in str(found).splitlines()
    every = dataclasses.replace(found, drive_bytes=3 * MIB)
    assert "at once" not in str(every)


def test_the_present_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three forwards of one graph, then their backwards, are one step. The first compiles, and the last 16 count."""
    now = [100.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    counters = stats.counters("a")

    def step(seconds: float, written: int) -> None:
        for _ in range(3):
            counters.begin(1, 1)
            now[0] += seconds / 4
        counters.drive_bytes += written // 2
        stats.moved(written - written // 2)
        stats.turn()
        now[0] += seconds / 4

    step(1000.0, 10)
    step(2.0, 10)
    assert stats.stats().drive_bytes_s == 0
    step(2.0, 30)
    assert stats.stats().drive_bytes_s == 5
    for _ in range(16):
        step(4.0, 100)
    counters.begin(1, 1)
    assert stats.stats().drive_bytes_s == 25
    stats.compiled()  # ahead of a forward, and what it took is in the step that ends there
    step(60.0, 0)
    step(4.0, 100)
    assert (stats.stats().drive_bytes_s, stats.stats().step_s) == (25, 4)
    stats.reset_stats()
    assert stats.stats().drive_bytes_s == 0


def test_nothing_ran() -> None:
    """Zeros would look like a step that saved nothing."""
    head, foot = str(Stats()).splitlines()
    assert head.startswith(
        "nothing ran: torch.compile has not called ssd_fx in this process, so whatever trains does so"
    )
    assert foot == "on disk at the moment: 0.00 MiB"
    head, _ = str(Stats(compiled_graphs=4, compiled_since_reset=3)).splitlines()
    assert head.startswith(
        "nothing ran since the start or the last reset_stats(): of the 3 graphs that ssd_fx was asked"
    )
    head, _ = str(Stats(compiled_graphs=4)).splitlines()
    assert head.startswith("nothing ran: torch.compile has not called ssd_fx since the last reset_stats(), and none of")
    head, _ = str(Stats(compiled_graphs=4, whole_graphs=4, whole_why="of a checkpoint")).splitlines()
    whole = "4 compiled graphs run as without ssd_fx, and keep everything in memory: of a checkpoint"
    assert head == f"nothing is counted: 4 of {whole}"
    head, _ = str(Stats(compiled_graphs=4, whole_graphs=1, whole_why="of a checkpoint")).splitlines()
    assert head.startswith("nothing ran: ")
    assert head.endswith(f"; or what runs is not counted: 1 of {whole}")


def test_every_count_of_bytes_is_explained() -> None:
    summed = {f.name.removesuffix("_bytes") for f in dataclasses.fields(GraphStats) if f.name.endswith("_bytes")}
    assert set(stats._MEANING) == summed


def test_numbers_for_loggers() -> None:
    """Flat, and with the same keys whatever has run."""
    nothing = stats.stats().as_dict()
    stats.counters("a").begin(300, 200)
    stats.counters("b").written_bytes = 7
    found = stats.stats().as_dict()
    assert set(found) == set(nothing)
    assert all(type(value) in (int, float) for value in found.values())
    assert (found["steps"], found["saved_bytes"], found["written_bytes"], found["running_graphs"]) == (1, 300, 7, 2)
    assert set(found) >= {f.name for f in dataclasses.fields(GraphStats)} | {"disk_bytes", "drive_tb_per_day"}
