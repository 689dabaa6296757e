"""The allowance under a limit of memory: no step is above the limit, and no more could stay."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_fx.runtime import allowance
from ssd_fx.runtime.allowance import MARGIN, NOTHING, REMEMBERED, SETTLED, SIZES, Allowance

MIB = 1 << 20
LIMIT = 1000 * MIB
ROOM = int((1 - MARGIN) * LIMIT)  # of the limit


@dataclass(frozen=True)
class Batch:
    """A step as it is: base above its level and bytes outstanding at each node, and the graphs that it runs."""

    points: tuple[tuple[int, int], ...] = ((100 * MIB, 0), (150 * MIB, 300 * MIB), (120 * MIB, 600 * MIB))
    runs: tuple[tuple[str, int], ...] = (("a", 600),)


GPT = Batch()


class Training:
    def __init__(self, limit: int = LIMIT) -> None:
        self.allowance = Allowance(limit)
        self.level = 200 * MIB

    def step(self, batch: Batch = GPT, optimized: bool = True) -> int:
        """The peak of a step, in which everything stays that may."""
        highest = 0
        for i, (graph, saved) in enumerate(batch.runs):
            self.allowance.begins(graph, saved, self.level, optimized, outstanding=int(i > 0))
        for rise, outstanding in batch.points:
            held = min(self.allowance.allowed(outstanding), outstanding)
            highest = max(highest, self.level + rise + held)
            self.allowance.note(self.level + rise + held, held, outstanding)
        self.allowance.turns()
        return highest


def test_the_first_step_keeps_nothing_and_the_second_all_that_fits() -> None:
    training = Training()
    assert training.step() == 350 * MIB
    assert training.step() == training.step() == 920 * MIB  # everything fits
    assert training.allowance.most == sys.maxsize
    training.level += 200 * MIB
    assert training.step() == ROOM
    assert training.allowance.most == ROOM - 520 * MIB


@pytest.mark.parametrize(("capacity", "wasted"), [(LIMIT, 100), (LIMIT + 60 * MIB, 40), (LIMIT + 100 * MIB, 0)])
def test_what_a_device_cannot_use_counts_where_it_has_no_room_for_that(capacity: int, wasted: int) -> None:
    """The more rests, the more is wasted; by the last step alone the allowance would go up and down."""
    training, found = Training(), []
    training.level, training.allowance.capacity = 400 * MIB, capacity
    for _ in range(2 * REMEMBERED):
        training.step()
        found.append(training.allowance.most)
        training.allowance.wasted(100 * MIB if found[-1] > 400 * MIB else 50 * MIB)
    assert found[3:] == [int((1 - MARGIN) * (LIMIT - wasted * MIB)) - 520 * MIB] * len(found[3:])


def test_steps_are_steady_when_all_were_known() -> None:
    """The room is what the worst of them leaves with nothing held. It is told once, then of as many further steps."""
    training, found = Training(), []
    for _ in range(3 * SETTLED):
        training.step()
        training.allowance.finish()
        found.append(training.allowance.steady())
        training.level = 300 * MIB if len(found) == SETTLED - 1 else 200 * MIB
    rooms = [each and (each.limit, each.room, each.runs) for each in found]
    told = [LIMIT, ROOM - 450 * MIB, {"a": 1}], [LIMIT, ROOM - 350 * MIB, {"a": 1}]
    expected = {SETTLED: tuple(told[0]), 2 * SETTLED: tuple(told[1])}  # the first step was not known
    assert rooms == [expected.get(i) for i in range(3 * SETTLED)]


def test_a_step_that_was_not_known_unsettles() -> None:
    training = Training()
    for _ in range(SETTLED):
        training.step()
    training.step(Batch(runs=(("a", 600), ("b", 300))))  # a graph that the steps before did not have
    for _ in range(SETTLED - 1):
        training.step()
        training.allowance.finish()
        assert training.allowance.steady() is None
    training.step()
    training.allowance.finish()
    assert training.allowance.steady() is not None


def test_a_peak_where_little_is_outstanding_does_not_count() -> None:
    """The gradients at the end of the backward are there when nothing stays any more."""
    training = Training()
    training.level = 50 * MIB
    batch = replace(GPT, points=((100 * MIB, 900 * MIB), (800 * MIB, 100 * MIB)))
    training.step(batch)
    assert training.step(batch) == ROOM
    assert training.allowance.most == ROOM - 150 * MIB


def test_another_batch_keeps_nothing_until_it_was_measured() -> None:
    training = Training()
    training.level = 400 * MIB
    larger = Batch(tuple((2 * rise, 2 * out) for rise, out in GPT.points), (("a", 1200),))
    peaks = [training.step(batch) for batch in (GPT, GPT, larger, larger, GPT)]
    assert peaks == [550 * MIB, ROOM, 700 * MIB, ROOM, ROOM]


def test_sequences_of_any_length() -> None:
    """A shorter one takes no more than a longer one, so only a length beyond all others is not known."""
    training = Training()
    lengths = [5, 3, 4, 8, 2, 7, 1, 8]
    batches = [Batch(tuple((rise // 8 * n, out // 8 * n) for rise, out in GPT.points), (("a", n),)) for n in lengths]
    for batch in batches:
        training.step(batch)
        known = training.allowance.most > 0
        assert known == (batch.runs[0][1] not in (5, 8) or batch is batches[-1])


def test_no_more_than_some_sizes_are_remembered() -> None:
    training = Training()
    for size in range(1, SIZES + 10):
        training.step(replace(GPT, runs=(("a", size),)))
    assert {len(each) for each in training.allowance._known.values()} == {SIZES}
    training.step(replace(GPT, runs=(("a", 1),)))
    assert training.allowance.most > 0


def test_forwards_without_a_backward_are_no_step() -> None:
    """Of a thousand nothing is noted down."""
    training = Training()
    training.step()
    for _ in range(1000):
        training.allowance.begins("a", 600, training.level, False, outstanding=0)
        training.allowance.note(training.level, 0, 10)
    step = training.allowance._step
    assert step is not None
    assert len(step.points) == 1
    assert training.step() == 920 * MIB


def test_another_graph_within_a_step() -> None:
    """Known steps run one graph. What comes with the second is not known, so nothing stays from there on."""
    training = Training()
    training.step()
    training.step()
    two = replace(GPT, runs=(*GPT.runs, ("b", 1)))
    assert training.step(two) == 350 * MIB
    assert training.step(two) == 920 * MIB
    assert training.step() == 920 * MIB, "a step of one graph is known too"


def test_more_before_the_step_counts_at_once_and_less_once_it_was_measured() -> None:
    training = Training()
    training.level = 300 * MIB
    training.step()
    training.step()
    training.level = 400 * MIB
    assert training.step() == ROOM
    training.level = 300 * MIB
    for _ in range(REMEMBERED):
        assert training.step() <= ROOM - 100 * MIB
    training.step()
    assert training.step() == ROOM


def test_gradients_that_are_there_make_another_step() -> None:
    """The second micro-batch has the gradients before it, and not on top; the first makes them."""
    training = Training()
    first = replace(GPT, points=((100 * MIB, 600 * MIB), (400 * MIB, 10 * MIB)))
    for _ in range(3):
        training.level = 200 * MIB
        training.step(first)
        first_of_all = training.allowance.most
        training.level = 500 * MIB
        training.step(optimized=False)
    assert first_of_all == sys.maxsize
    assert training.allowance.most == ROOM - 620 * MIB


def test_what_never_fits_is_said_once() -> None:
    training = Training(limit=300 * MIB)
    with pytest.warns(RuntimeWarning, match="memory=300 MiB cannot be kept: a step needs 50 MiB more") as said:
        assert [training.step() for _ in range(5)] == [350 * MIB] * 5
    assert len(said) == 1
    assert training.allowance.most == 0


def test_what_is_missing_is_counted_without_what_stayed() -> None:
    """A node before had a higher peak, of which a part stayed and could have gone."""
    made = Allowance(300 * MIB)
    made.begins("a", 600, 200 * MIB, True, outstanding=0)
    made.note(peak=350 * MIB, held=100 * MIB, outstanding=100 * MIB)
    made.note(peak=320 * MIB, held=0, outstanding=0)
    with pytest.warns(RuntimeWarning, match="a step needs 20 MiB more"):
        made.finish()


def test_a_step_without_an_end_takes_no_more_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that lives on has something outstanding, so forwards without backwards never end the step."""
    monkeypatch.setattr(allowance, "POINTS", 10)
    training, plain = Training(), Training()
    long = replace(GPT, points=tuple(((i % 7) * MIB, (1 + i % 5) * 100 * MIB) for i in range(100)))
    training.step(long)
    step = training.allowance._step
    assert step is not None
    assert len(step.points) <= 11
    monkeypatch.setattr(allowance, "POINTS", 1000)
    plain.step(long)
    for each in (training, plain):
        each.step(long)
    assert training.allowance.bounds == plain.allowance.bounds != (NOTHING,)


def test_what_the_last_step_took() -> None:
    training = Training()
    training.step()
    assert training.allowance.seen is None
    training.step()
    seen = training.allowance.seen
    assert seen is not None
    assert (seen.limit, seen.peak, seen.stayed) == (LIMIT, 350 * MIB, 0)
    training.step()
    assert training.allowance.seen is not None
    assert training.allowance.seen.stayed == 600 * MIB


def test_it_says_what_may_stay(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    training.level = 400 * MIB
    with caplog.at_level(logging.INFO, "ssd_fx"):
        for _ in range(4):
            training.step()
        training.level = 200 * MIB
        for _ in range(REMEMBERED + 1):
            training.step()
    assert caplog.messages == [
        "within memory=1000 MiB 470 MiB may now stay in memory",
        "within memory=1000 MiB all saved tensors may now stay in memory",
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """What does not fit may be said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


points = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 900)), min_size=1, max_size=6).map(tuple)
batches = st.lists(points, min_size=1, max_size=3)
steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.booleans()), max_size=12)


@given(batches, steps)
def test_no_step_is_above_the_limit(
    batches: list[tuple[tuple[int, int], ...]], steps: list[tuple[int, int, bool]]
) -> None:
    """Whatever comes before or between: unless the step does not fit with nothing that stays."""
    training = Training(limit=1000)
    for number, level, optimized in steps:
        chosen = batches[number % len(batches)]
        training.level = level
        with _quiet():
            peak = training.step(Batch(chosen, ((str(number % len(batches)), 1),)), optimized)
        least = level + max(rise for rise, _ in chosen)
        assert peak <= max(990, least)


tensors = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(tensors, st.data())
def test_the_backward_asks_in_any_order(tensors: list[int], data: st.DataObject) -> None:
    """What is held follows what is outstanding: the oldest tensors leave when less may be held."""
    asked = data.draw(st.permutations(range(len(tensors))))
    nodes = [(i, True) for i in range(len(tensors))] + [(i, False) for i in asked]
    bases = data.draw(st.lists(st.integers(0, 600), min_size=len(nodes), max_size=len(nodes)))
    training = Training(limit=1000)
    with _quiet():
        for level in data.draw(st.lists(st.integers(0, 300), min_size=2, max_size=4)):
            training.allowance.begins("a", sum(tensors), level, optimized=True, outstanding=0)
            held, outstanding, peak = [], 0, 0
            for (i, stored), base in zip(nodes, bases, strict=True):
                outstanding += tensors[i] if stored else -tensors[i]
                held = [*held, i] if stored else [each for each in held if each != i]
                while sum(tensors[each] for each in held) > training.allowance.allowed(outstanding):
                    del held[0]
                nbytes = sum(tensors[each] for each in held)
                peak = max(peak, level + base + nbytes)
                training.allowance.note(level + base + nbytes, nbytes, outstanding)
            training.allowance.turns()
            assert peak <= max(990, level + max(bases))


@given(points, st.integers(0, 300))
def test_no_more_could_stay(points: tuple[tuple[int, int], ...], level: int) -> None:
    training = Training(limit=1000)
    training.level = level
    batch = Batch(points)
    with _quiet():
        training.step(batch)
        peak = training.step(batch)
    everything = max(level + rise + out for rise, out in points)
    assert peak == everything or peak >= 990


def test_more_stays_before_gradients_grow() -> None:
    """The backward asks for the latest first, so what is held is less by then. Blocks compiled one by one left a sixth
    of the limit unused, because the bound of the end held at the peak too."""
    growing = Batch(((100 * MIB, 0), (100 * MIB, 600 * MIB), (200 * MIB, 500 * MIB), (500 * MIB, 400 * MIB)))
    training = Training()
    training.level = 100 * MIB
    training.step(growing)
    assert training.step(growing) == ROOM
    least = ROOM - 600 * MIB
    assert [training.allowance.allowed(each * MIB) for each in (0, 400, 500, 600)] == [
        *(least, least, least + 100 * MIB, least + 200 * MIB)
    ]
    assert (
        training.allowance.allowed(700 * MIB) == training.allowance.most == least + 200 * MIB
    )  # no such step was measured


def test_what_another_graph_has_outstanding_makes_no_room() -> None:
    """A graph that is kept, now and then: its tensors are on the drive, and asked for in no step that was measured."""
    allowance = Allowance(LIMIT)
    peaks = []
    for kept in (0, 0, 0, 300 * MIB, 300 * MIB, 0):
        allowance.begins("a", 600, 100 * MIB, True, kept)
        highest = 0
        for rise, out in ((100, 600), (200, 500), (500, 400), (650, 300), (500, 100)):
            held = min(allowance.allowed(out * MIB + kept), out * MIB)
            highest = max(highest, (100 + rise) * MIB + held)
            allowance.note((100 + rise) * MIB + held, held, out * MIB + kept)
        allowance.turns()
        peaks.append(highest)
    assert peaks == [750 * MIB] + [ROOM] * 5


def test_a_forward_within_a_step_is_no_unknown_step() -> None:
    """For an unknown step all of Python's objects are looked at: a tenth of a second, for each block of a model."""
    training = Training()
    allowance = training.allowance
    assert not allowance.is_known("a", 600, True, outstanding=0)
    allowance.begins("a", 600, training.level, True, outstanding=0)
    assert allowance.is_known("b", 600, False, outstanding=1)
    assert not allowance.is_known("b", 600, False, outstanding=0)  # nothing waits, so it would begin a step
