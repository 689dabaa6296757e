"""A step over time: graphs one within another, what is known of a group, and the way through the text of a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ssd_fx.report.model import GraphReport
from ssd_fx.report.report import made
from ssd_fx.report.timeline import UNKNOWN, Span, Timeline, joined, measured
from ssd_fx.runtime.plans import unpack
from ssd_fx.runtime.trace import Event
from tests.report.made_up import MIB, graph, group

TIMES = {
    "store": (0.1, 0.1),
    "release": (0.2, 0.3),
    "wait": (0.4, 0.5),
    "last": (0.6, 0.6),
    "write": (0.1, 0.3),
    "read": (0.4, 0.5),
    "gone": (0.3, 0.4),
}


def step(name: str, seconds: float, stays: int) -> Timeline:
    """A forward and a backward of so many seconds, with twice the bytes that stay at the end of the forward."""
    memory = ((0.0, stays), (seconds / 2, 2 * stays), (seconds, stays), (2 * seconds - 0.5, 0))
    return Timeline((name,), (Span("wait", name, 0, 0, seconds, seconds),), memory, seconds, 2 * seconds, stays)


def test_a_graph_runs_between_forward_and_backward_of_the_one_before() -> None:
    found = joined([step("a", 1, 10), step("b", 2, 100)])
    assert (found.order, found.turn_s, found.end_s, found.stays) == (("a", "b"), 3, 6, 110)
    assert found.memory == ((0, 10), (0.5, 20), (1, 110), (2, 210), (3, 110), (4.5, 10), (5, 10), (5.5, 0))
    assert [(span.graph, span.run, span.begin) for span in found.spans] == [("a", 0, 5), ("b", 1, 3)]


def test_a_step_of_steps_is_that_of_their_graphs() -> None:
    a, b, c = step("a", 1, 1), step("b", 2, 2), step("c", 4, 4)
    assert joined([joined([a, b]), c]).memory == joined([a, joined([b, c])]).memory == joined([a, b, c]).memory
    assert joined([a]) == a
    assert joined([]) == Timeline()


def test_a_backward_runs_beside_the_gradients_of_later_graphs() -> None:
    found = joined([replace(step("a", 1, 10), gradients=3), replace(step("b", 1, 100), gradients=7)])
    assert found.memory[-4:] == ((2, 110), (2.5, 10), (3, 10 + 7), (3.5, 7))
    assert found.gradients == 3 + 7


def test_memory_is_free_from_the_forward_to_the_backward() -> None:
    plan = graph("a", [group(0, MIB, times=TIMES)])
    found = made([plan], ["a", "a"]).planned.of("gone")
    assert [(span.begin, span.end) for span in found] == [(0.3, 0.4 + 1), (pytest.approx(0.3 + 1 / 3), 0.4 + 1 / 3)]


def test_transfers_of_graphs_that_follow_each_other_are_not_at_once() -> None:
    """Twice the bytes in twice the time: a rate that counted both graphs from zero would be twice as high."""
    plans = [graph(name, [group(0, MIB, times=TIMES)]) for name in "ab"]
    alone, both = made(plans[:1], ["a"]), made(plans, ["a", "b"])
    assert alone.planned.transfer_rate() == pytest.approx(2 * MIB / 0.3)
    assert both.planned.transfer_rate() == pytest.approx(alone.planned.transfer_rate())


def test_what_was_recorded_is_told_as_what_was_predicted() -> None:
    """A failed write moves nothing, and a short wait is the price of the call."""
    events = [
        Event("begin", "a", -1, -1, 5.0, 5.0, 0, "none", "", 100, step=1),
        Event("store", "a", 0, 0, 5.0, 5.1, MIB, "disk", "m", 150, waited=1e-6),
        Event("write", "a", 0, 0, 5.0, 5.2, MIB, "failed", "m"),
        Event("wait", "a", 0, 1, 5.5, 6.0, MIB, "disk", "m", 130, waited=0.25),
    ]
    found = measured(events)
    assert found is not None
    assert (found.order, found.turn_s, found.end_s) == (("a",), 0.5, 1.0)
    assert found.memory == ((0, 0), (pytest.approx(0.1), 50), (1, 30))
    assert [(span.kind, span.begin, span.end) for span in found.waits] == [("wait", 0.75, 1.0)]
    assert found.transfer_rate() == 0
    assert found.times()["a", 0, UNKNOWN].keys() == {"store", "write", "wait"}


def test_a_graph_carries_every_field_by_its_name() -> None:
    plan = graph("a", [group(0, MIB, times=TIMES), group(1, MIB, "keep", reason="scalar")])
    carried = unpack(plan.packed())
    assert carried["rows"][0]["times"]["gone"] == [0.3, 0.4]
    again = GraphReport.unpacked(plan.packed())
    assert unpack(again.packed()) == carried
    assert made([again], ["a"]).rows() == made([plan], ["a"]).rows()
    assert str(made([again], ["a"])) == str(made([plan], ["a"]))
