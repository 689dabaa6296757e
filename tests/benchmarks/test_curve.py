"""Points of memory and time: spreads, the interval of a median, who beats whom."""

from __future__ import annotations

import random
import statistics

import expecttest
import pytest
from curve import Comparison, Point, Spread, dominance, marks, median_interval, table, verdict

MIB = 2**20


def point(mode: str, budget: float | None, mib: float, times: list[float]) -> Point:
    return Point(mode, budget, int(mib * MIB), tuple(times), tuple(t / 2 for t in times))


def test_spread_of_one_value_and_of_five() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 3.0, 3.0)
    assert Spread.of([5, 1, 4, 2, 3]) == Spread(1, 2, 3, 4, 5)


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (2, 0), (5, 0), (6, 0), (8, 0), (9, 1), (10, 1), (15, 3), (20, 5)])
def test_the_interval_is_that_of_the_sign_test(count: int, cut: int) -> None:
    """`cut` values are left out at either end: as in tables of the sign test for 95%."""
    values = list(range(count))
    random.Random(0).shuffle(values)
    assert median_interval(values) == (cut, count - 1 - cut)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    """15 values of a skewed distribution, 2,000 times: 96.5% by the binomial distribution."""
    draw = random.Random(1)
    intervals = [median_interval([draw.lognormvariate(0, 1) for _ in range(15)]) for _ in range(2000)]
    held = sum(low <= 1 <= high for low, high in intervals) / 2000
    assert held == pytest.approx(0.965, abs=0.012)


def test_slower_with_more_memory_is_beyond_the_spread() -> None:
    """Both slow down alike from round to round, by far more than they differ: the pairs tell, the medians would not."""
    noise = [1.0, 1.3, 0.8, 1.6, 1.1, 0.9, 1.2]
    joint = point("joint", 0.4, 100, [1.05 * n for n in noise])
    other = point("recompute", 0.2, 90, noise)
    assert dominance([joint], [other]) == [
        Comparison("joint 0.4", "recompute 0.2", 100 * MIB, 90 * MIB, *(pytest.approx(1.05),) * 3)
    ]
    assert dominance([joint], [other])[0].is_beyond_spread


def test_slower_in_the_median_within_the_spread() -> None:
    joint = point("joint", 0.4, 100, [1.02, 0.9, 1.1, 1.03, 0.95, 1.04, 1.01])
    found = dominance([joint], [point("keep", None, 100, [1.0] * 7)])
    assert found == [Comparison("joint 0.4", "keep", 100 * MIB, 100 * MIB, 1.02, 0.9, 1.1)]
    assert not found[0].is_beyond_spread


def test_who_needs_more_memory_or_more_time_beats_nobody() -> None:
    joint = point("joint", 0.4, 100, [1.0] * 7)
    assert dominance([joint], [point("keep", None, 102.1, [0.5] * 7), point("checkpoint", None, 50, [1.0] * 7)]) == []
    assert [c.other for c in dominance([joint], [point("keep", None, 101.9, [0.5] * 7)])] == ["keep"]


def test_the_worst_comes_first() -> None:
    joint = [point("joint", 1.0, 100, [1.1] * 7), point("joint", 0.0, 50, [1.3] * 6 + [0.9])]
    found = dominance(joint, [point("keep", None, 100, [1.0] * 7), point("recompute", 0, 40, [1.0] * 7)])
    assert [(c.ours, c.other, c.is_beyond_spread) for c in found] == [
        ("joint 1", "keep", True),
        ("joint 1", "recompute 0", True),
        ("joint 0", "recompute 0", False),
    ]


def test_rounds_that_do_not_match_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        dominance([point("joint", 0, 1, [1.0] * 3)], [point("keep", None, 1, [1.0] * 2)])


class TestText(expecttest.TestCase):
    points = (
        point("keep", None, 412.2, [2.0, 2.2, 1.8, 2.1, 1.9]),
        point("joint", 0.4, 200.5, [2.2, 2.4, 1.9, 2.3, 2.0]),
    )

    def test_table(self) -> None:
        self.assertExpectedInline(
            table(self.points),
            """\
mode   budget  peak MiB  step ms  (quartiles; extremes)   to keep  (quartiles; extremes)
keep        -     412.2     2000  (1900-2100; 1800-2200)    1.000  (0.950-1.050; 0.900-1.100)
joint     0.4     200.5     2200  (2000-2300; 1900-2400)    1.100  (1.000-1.150; 0.950-1.200)""",
        )

    def test_verdict(self) -> None:
        found = [
            Comparison("joint 0.4", "recompute 0.2", 112 * MIB, 100 * MIB, 1.051, 1.02, 1.08),
            Comparison("joint 0.2", "keep", 60 * MIB, 60 * MIB, 1.01, 0.99, 1.03),
        ]
        self.assertExpectedInline(
            verdict(found, 6, 15),
            """\
joint 0.4, 112.0 MiB: recompute 0.2 needs 100.0 MiB and is 1.051 times as fast (1.020 to 1.080): BEYOND the spread
joint 0.2, 60.0 MiB: keep needs 60.0 MiB and is 1.010 times as fast (0.990 to 1.030): within the spread
1 of 6 joint points lie above another mode at the same memory, beyond the spread of 15 rounds""",
        )

    def test_verdict_of_nothing(self) -> None:
        self.assertExpectedInline(
            verdict([], 6, 15),
            """0 of 6 joint points lie above another mode at the same memory, beyond the spread of 15 rounds""",
        )


def test_marks_go_by_memory_within_a_mode() -> None:
    found = marks([*TestText.points, point("joint", 0.0, 100, [2.6] * 5)])
    assert list(found) == ["keep", "joint"]
    assert [mark.x for mark in found["joint"]] == [100, 200.5]
    assert found["joint"][1].y == statistics.median([1.1, 1.2, 0.95, 1.15, 1.0])
    assert (found["joint"][1].low, found["joint"][1].high) == (1.0, 1.15)
    assert found["joint"][0].label == "joint 0: 100.0 MiB, 1.300"
