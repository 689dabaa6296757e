"""Counters as text."""

from __future__ import annotations

from ssd_fx.runtime.stats import GraphStats, Stats

MIB = 2**20


def test_what_happened_in_a_step() -> None:
    found = Stats(
        steps=2,
        saved_bytes=3 * MIB,
        offloaded_bytes=2 * MIB,
        written_bytes=MIB,
        stall_s=0.003,
        staging_peak_bytes=MIB // 4,
        graphs={"ab12": GraphStats(steps=2)},
    )
    assert str(found).splitlines() == [
        "2 steps, 1 graphs, 1.5 ms of stall per step; bytes per step:",
        "saved               1.50 MiB",
        "offloaded           1.00 MiB",
        "written             0.50 MiB",
        "at the moment: staging 0.00 MiB, staging peak 0.25 MiB, disk 0.00 MiB",
    ]


def test_nothing_happened() -> None:
    head, foot = str(Stats()).splitlines()
    assert head == "0 steps, 0 graphs, 0.0 ms of stall per step; bytes per step:"
    assert foot.startswith("at the moment: staging 0.00 MiB")
