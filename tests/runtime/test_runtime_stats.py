"""Counters as text."""

from __future__ import annotations

import dataclasses

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


def test_nothing_ran() -> None:
    """Zeros would look like a step that saved nothing."""
    head, foot = str(Stats()).splitlines()
    assert head.startswith(
        "nothing ran: torch.compile has not called ssd_fx in this process, so whatever trains does so"
    )
    assert foot == "on disk at the moment: 0.00 MiB"
    head, _ = str(Stats(compiled_graphs=3)).splitlines()
    assert head.startswith(
        "nothing ran since the start or the last reset_stats(): of the 3 graphs that ssd_fx was asked"
    )


def test_every_count_of_bytes_is_explained() -> None:
    summed = {f.name.removesuffix("_bytes") for f in dataclasses.fields(GraphStats) if f.name.endswith("_bytes")}
    assert set(stats._MEANING) == summed
