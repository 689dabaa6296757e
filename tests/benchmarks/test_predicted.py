"""Predictions: what a dump has, relative errors, when they are flagged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import expecttest
import pytest
from predicted import Predicted, Row, floor_line, read, rows, table
from training import Step

MIB = 2**20
PLAN = Predicted(
    step_s=1.0,
    compute_s=0.9,
    write_stall_s=0.06,
    read_stall_s=0.04,
    peak_bytes=100 * MIB,
    floor_bytes=90 * MIB,
    kept_peak_bytes=400 * MIB,
    limit_bytes=101 * MIB,
)


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content))


def test_a_dump_is_read(tmp_path: Path) -> None:
    write(tmp_path, "ab12.plan.json", {"predicted": dataclasses.asdict(PLAN) | {"later": 1}, "recomputed": []})
    (tmp_path / "ab12.plan.txt").write_text("graph ab12")
    assert read(tmp_path) == PLAN


def test_plans_of_two_graphs_are_no_step(tmp_path: Path) -> None:
    for name in ("a.plan.json", "b.plan.json"):
        write(tmp_path, name, {"predicted": dataclasses.asdict(PLAN)})
    with pytest.raises(ValueError, match=r"2 graphs, a\.plan\.json, b\.plan\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("row", "error", "flag"),
    [
        (Row("t", 1.15, 1.0, 10.0), 0.15, ""),
        (Row("t", 1.2, 1.0, 10.0), 0.2, "beyond 15%"),
        (Row("t", 0.8, 1.0, 10.0), -0.2, "beyond 15%"),
        (Row("t", 1.2, 1.0, 21.0), 0.2, "beyond 15%, but under 1% of the step"),
        (Row("t", 1e-3, 0.0, 1.0), float("inf"), "beyond 15%, but under 1% of the step"),
        (Row("t", 0.0, 0.0, 1.0), 0.0, ""),
        (Row("peak", 120.0, 100.0, 1e6, True), 0.2, "beyond 15%"),
    ],
)
def test_errors_and_flags(row: Row, error: float, flag: str) -> None:
    assert row.error == pytest.approx(error)
    assert row.flag == flag


def step(graph_s: float, peak_mib: int, read_s: float = 0.0, write_s: float = 0.0) -> Step:
    stall = {"read_stall_s": read_s, "write_stall_s": write_s, "stall_s": read_s + write_s}
    rest = {"time_s": 9.0, "cpu_s": 0.0, "io_cpu_s": None, "loss": 0.0}
    return Step(graph_s=graph_s, peak_bytes=peak_mib * MIB, **rest, **stall)  # type: ignore[arg-type]


KEEP = [step(0.8, 390), step(1.0, 410), step(0.9, 400)]
OURS = [step(1.0, 100, 0.04, 0.05), step(1.2, 106, 0.05, 0.08), step(0.9, 104, 0.03, 0.07)]


class TestText(expecttest.TestCase):
    def test_table(self) -> None:
        """Medians of times, the highest of peaks."""
        self.assertExpectedInline(
            table(rows(PLAN, KEEP, OURS)),
            """\
                           predicted    measured    error
compute, ms                    900.0       900.0    +0.0%
stall of writes, ms             60.0        70.0   -14.3%
stall of reads, ms              40.0        40.0    +0.0%
stall, ms                      100.0       100.0    +0.0%
forward and backward, ms      1000.0      1000.0    +0.0%
peak, MiB                      100.0       106.0    -5.7%
peak with all kept, MiB        400.0       410.0    -2.4%""",
        )

    def test_floor(self) -> None:
        self.assertExpectedInline(
            floor_line(PLAN, 98 * MIB), """floor 90.0 MiB, limit 101.0 MiB; the measured peak is +8.9% from the floor"""
        )
        at_floor = dataclasses.replace(PLAN, limit_bytes=90 * MIB, recomputed=2)
        beyond = "the measured peak is +11.1% from the floor, beyond 10%; 2 tensors are computed again"
        assert floor_line(at_floor, 100 * MIB) == f"floor 90.0 MiB, limit 90.0 MiB; {beyond}"

    def test_a_partition_that_recomputes_has_another_peak_with_all_kept(self) -> None:
        names = [row.name for row in rows(dataclasses.replace(PLAN, recomputed=1), KEEP, OURS)]
        assert names == ["compute", "stall of writes", "stall of reads", "stall", "forward and backward", "peak"]
