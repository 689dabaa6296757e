"""What the lines and the table of a report say, of plans whose figures the tests choose."""

from __future__ import annotations

import pytest

from ssd_fx.report.figures import figures
from ssd_fx.report.model import WITHIN
from ssd_fx.report.report import Report, made
from ssd_fx.report.text import lines
from ssd_fx.report.timeline import Timeline
from ssd_fx.runtime.stats import GraphStats, SlotStats, Stats
from ssd_fx.sizes import parse_budget
from tests.report.made_up import MIB, graph, group

TIMES = {
    "store": (0, 0),
    "release": (0, 0.4),
    "wait": (-0.4, 0),
    "last": (0, 0),
    "write": (0, 0.001),
    "read": (0.002, 0.003),
}


def advised(budget: float, *, tbw: float = 0.0, **predicted: float) -> str:
    """The budget that a report of a graph that offloads everything advises."""
    seen = Stats(steps=1, drive_tbw=tbw, drive_bytes=10**12, step_s=1.0, graphs={"a": GraphStats(steps=1)})
    plan = graph("a", [group(0, 100 * MIB, times=TIMES)], budget, **predicted)
    said = dict(lines(made([plan], ["a"], stats=seen if tbw else None)))["next"]
    return next(word for word in said.split() if word.startswith("budget=")).removeprefix("budget=")


def test_the_advice_to_keep_everything_is_a_budget_that_the_option_takes() -> None:
    """A bare 1 may mean a byte, so the option refuses it."""
    assert advised(0.5, write_stall_s=0.5, read_stall_s=0.4) == "1.0"
    assert advised(0.8, tbw=1.0) == "1.0"
    assert parse_budget("budget", 1.0) == 1.0


def test_a_budget_above_all_that_is_saved_is_named() -> None:
    """As by somebody who gives the size of the card."""
    groups = [group(0, 100 * MIB, times=TIMES), group(1, 20 * MIB, "keep", reason="within the budget")]
    plan = graph("a", groups, 24 * 10**9, shared_budget_bytes=24 * 10**9)
    said = dict(lines(made([plan], ["a"])))["next"]
    assert said.startswith("the budget of 22.35 GiB is above the 120 MiB that can leave memory, so all of it stays: ")
    plan = graph("a", groups, 119 * MIB)
    assert "is above" not in dict(lines(made([plan], ["a"])))["next"]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (0.5, "nothing waits, so a smaller budget costs little: budget=0.25 keeps up to 20 MiB less"),
        (0, "nothing: the 20 MiB that stay lower no peak, so the drive is spared; spare=False offloads them too"),
        ("auto", "nothing: 20 MiB stay within the budget, and the step hardly waits"),
    ],
)
def test_what_stays_within_the_budget(budget: float | str, said: str) -> None:
    """Under budget 0 there is no smaller one."""
    groups = [group(0, 100 * MIB, times=TIMES), group(1, 20 * MIB, "keep", reason="within the budget")]
    assert dict(lines(made([graph("a", groups, budget)], ["a"])))["next"] == said


@pytest.mark.parametrize("budget", [0, 0.25, "auto"])
def test_what_lowers_no_peak_is_not_said_to_leave_under_another_budget(budget: float | str) -> None:
    """Under each of them the drive is spared."""
    plan = graph("a", [group(0, 20 * MIB, "keep", reason="within the budget")], budget)
    assert dict(lines(made([plan], ["a"])))["next"] == (
        "nothing: the 20 MiB that stay lower no peak, so the drive is spared; spare=False offloads them too"
    )
    plan = graph("a", [group(0, 20 * MIB, "keep", reason="within the budget")], 0.25, floor_bytes=10 * MIB)
    assert "budget=0 offloads all" in dict(lines(made([plan], ["a"])))["next"]


def test_little_below_min_bytes_is_no_advice() -> None:
    """Neither of all that is saved, nor of the peak."""

    def said(small: int) -> str:
        sizes = {"below min_bytes": small, "within the budget": 37 * MIB}
        groups = [group(i, nbytes, "keep", reason=why) for i, (why, nbytes) in enumerate(sizes.items())]
        return str(made([graph("a", groups, 0.9)], ["a"]))

    assert "min_bytes" not in said(102400).split("module")[0].split("next")[1]
    assert "NOT FREED" not in said(102400)
    assert "NOT FREED: 4 MiB" in said(4 * MIB)


def test_host_memory_beside_a_slow_drive_is_advised() -> None:
    """Where a GPU computes, and the step waits for the drive, or is too short for it."""

    def said(decision: str, host_speedup: float, **predicted: float) -> str:
        groups = [group(i, 700 * MIB, decision, reason="within the budget", times=TIMES) for i in range(2)]
        return dict(lines(made([graph("a", groups, "auto", host_speedup, **predicted)], ["a"])))["next"]

    rest = "host_budget='2GiB' sends tensors to host memory, which is 18 times as fast as the drives"
    assert said("keep", 18.4) == f"nothing is offloaded, for the step is too short for the drives: {rest}"
    assert said("offload", 18.4, write_stall_s=0.5) == f"the step waits for the drives: {rest}"
    for little in (0.0, 1.4):
        assert "host_budget" not in said("keep", little) + said("offload", little, write_stall_s=0.5)


def test_what_the_last_graph_writes_later_is_in_memory_when_its_backward_begins() -> None:
    """No other forward comes. The graph before it is another matter."""
    rests = {"store": (0, 0), "release": (0, 0), "wait": (0.5, 0.5), "last": (0.6, 0.6)}
    plans = [graph(name, [group(0, 100 * MIB, times=rests), group(1, 30 * MIB, times=TIMES)]) for name in "ab"]
    assert figures(made(plans, ["a", "b"])).stay_bytes == 100 * MIB


def test_the_table_leaves_out_the_smallest_rows_though_many_are_as_large() -> None:
    """The 24th largest row is one of seven of its size, which stand before all others."""
    small = [group(i, MIB, "keep", reason="scalar", module=f"small{i}") for i in range(7)]
    large = [group(7 + i, (100 + i) * MIB, module=f"large{i}") for i in range(23)]
    said = str(made([graph("a", [*small, *large])], ["a"])).splitlines()
    shown = [line.split()[0] for line in said if line.startswith(("small", "large"))]
    assert shown == ["small0", *(f"large{i}" for i in range(23))]
    assert "and 6 more rows of 6 MiB together: report.rows() has all" in said


def test_the_floor_counts_what_the_graphs_before_must_keep() -> None:
    """Two graphs of which nothing can leave memory: the peak is no higher than the floor."""
    stuck = [graph(name, [group(0, 100 * MIB, "keep", reason="a collective")]) for name in "ab"]
    found = figures(made(stuck, ["a", "b"]))
    assert found.floor_bytes == found.peak_bytes == 200 * MIB


def test_what_the_budget_alone_keeps_is_not_of_the_floor() -> None:
    first = [group(0, 100 * MIB, "keep", reason="within the budget"), group(1, 7 * MIB, "keep", reason="scalar")]
    second = [group(0, 50 * MIB, "keep", reason="a collective")]
    parts = [graph("a", first, floor_bytes=8 * MIB), graph("b", second, floor_bytes=50 * MIB)]
    assert figures(made(parts, ["a", "b"])).floor_bytes == 57 * MIB


def test_drives_that_last_for_years_are_said_to() -> None:
    seen = Stats(steps=3, drive_tbw=600.0, drive_bytes=3 * MIB, step_s=1.0, graphs={"a": GraphStats(steps=3)})
    said = dict(lines(made([graph("a", [group(0, 100 * MIB)])], ["a"], stats=seen)))["drive"]
    assert said.endswith(", 0.0906 TB a day at 1 s a step; new drives rated for 600 TB last 18.1 years")


def test_floor_and_limit_stand_beside_each_other() -> None:
    """Of budget 0 the limit was chosen, and the line says how. Each limit is above what the forwards before leave."""
    groups = [group(0, 8 * MIB, "keep", reason=WITHIN), group(1, 50 * MIB)]
    parts = [graph(name, groups, 0, limit_bytes=20 * MIB) for name in ("a", "b")]
    assert figures(made(parts, ["a", "b"])).limit_bytes == 28 * MIB
    said = "floor 8 MiB, limit 28 MiB (the lowest that can be met, or 5% more for a step a tenth shorter);"
    assert said in dict(lines(made(parts, ["a", "b"])))["memory"]
    assert (
        "floor 8 MiB, limit 20 MiB;" in dict(lines(made([graph("a", groups, limit_bytes=20 * MIB)], ["a"])))["memory"]
    )


def test_what_a_budget_in_bytes_leaves_in_memory_is_not_offloaded() -> None:
    groups = [group(0, 100 * MIB, times=TIMES), group(1, 20 * MIB, times=TIMES)]
    seen = Stats(steps=3, graphs={"a": GraphStats(steps=3)})
    step = Timeline(("a",), stayed=(("a", 0),))
    found = made([graph("a", groups, 100 * MIB)], ["a"], stats=seen, step=step)
    said = "1 of 2 groups (20 MiB) are offloaded; 1 (100 MiB) stay as long as `budget` has room"
    assert dict(lines(found))["plan"] == said
    assert "100 MiB  stays: `budget` has room" in str(found)
    found = made([graph("a", groups, 0)], ["a"], stats=seen, step=step)  # a read that came too early
    assert dict(lines(found))["plan"] == "2 of 2 groups (120 MiB) are offloaded"


def test_what_may_stay_is_a_share_of_what_would_be_written() -> None:
    """25 of 100 MiB may stay. The written bytes are fewer, by compression; what no write is planned for is no part."""
    rests = {name: span for name, span in TIMES.items() if name not in ("write", "read")}
    groups = [group(0, 100 * MIB, times=TIMES), group(1, 50 * MIB, times=rests)]
    plan = graph("a", groups, 25 * MIB, shared_budget_bytes=25 * MIB, written_bytes=20 * MIB)
    assert figures(made([plan], ["a"])).written_bytes == 15 * MIB


def test_what_a_limit_of_memory_has_come_to() -> None:
    """Before all else; nothing is said without one, and before a step has ended."""
    plan = graph("a", [group(0, 100 * MIB, times=TIMES)], 0)
    for peak, said in (
        (23 << 30, "fits 24 GiB: 23 GiB measured, 3 GiB of activations stay; "),
        (25 << 30, "does not "),
    ):
        seen = Stats(steps=3, memory_limit_bytes=24 << 30, memory_peak_bytes=peak, memory_stay_bytes=3 << 30)
        found = dict(lines(made([plan], ["a"], stats=seen)))
        assert found["memory"].startswith(said)
        over = peak > 24 << 30
        assert found["next"].startswith("the last step took 1 GiB more than the limit" if over else "nothing: as much")
    assert dict(lines(made([plan], ["a"], stats=Stats(steps=3))))["memory"].startswith("peak ")


def test_no_budget_is_advised_beside_a_limit_of_memory() -> None:
    """Both are an error. Nor is one when the plans are gone."""
    waits = Stats(steps=1, step_s=1.0, stall_s=0.5, memory_limit_bytes=1 << 30, graphs={"a": GraphStats(steps=1)})
    plan = graph("a", [group(0, 100 * MIB, times=TIMES)], 0)
    for found in (made([plan], ["a"], stats=waits), made((), (), stats=waits, missing="the graphs are gone")):
        said = "the step waits 500 ms for the drives: more memory or a faster drive would end that"
        assert dict(lines(found))["next"] == said


def test_for_which_modules_the_step_waits() -> None:
    """Layers together. Measured over all steps, with what was predicted beside it; before any step as predicted."""
    waits = {"store": (0, 0), "release": (0, 0.002), "wait": (0.001, 0.004), "last": (0.004, 0.004)}
    groups = [
        group(0, MIB, module="blocks.0.up", source="gpt.py:1", times=waits),
        group(1, MIB, module="blocks.1.up", source="gpt.py:1", times=waits),
        group(2, MIB, module="head", source="gpt.py:9"),
    ]
    plan = graph("a", groups)
    assert _waits(made([plan], ["a"])) == [
        "the step waits for  source    writes  reads",
        "blocks.{0..1}.up    gpt.py:1    4 ms   6 ms",
    ]
    assert _waits(made([plan], ["a", "a"]))[1].split()[-4:] == ["8", "ms", "12", "ms"]
    slots = {"a": {1: SlotStats(write_stall_s=0.01, read_stall_s=0.02), 2: SlotStats(read_stall_s=0.1)}}
    measured = made([plan], ["a"], stats=Stats(steps=2), slots=slots)
    assert _waits(measured) == [
        "the step waits for  source    writes  reads  predicted",
        "head                gpt.py:9    0 ms  50 ms       0 ms",
        "blocks.{0..1}.up    gpt.py:1    5 ms  10 ms      10 ms",
    ]
    assert measured.to_dict()["stalls"][0] == {"module": "head", "write_s": 0, "read_s": 0.05, "predicted_s": 0}
    assert _waits(made([graph("a", groups[2:])], ["a"])) == []


def _waits(report: Report) -> list[str]:
    found = str(report).split("\n\n")
    return next((part.splitlines() for part in found if part.startswith("the step waits for")), [])
