"""Random callers: whatever they do, and wherever a stored value comes from, each line ends as under the stock compiler.

Planted faults show that the search finds what it is there for; counts show that the sources are what they say.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

import ssd_fx
from ssd_fx.runtime import entries
from ssd_fx.runtime.layout import TensorMeta
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.reader import Reader
from ssd_fx.runtime.states import Entry, Load
from ssd_fx.runtime.store import Store
from ssd_fx.runtime.writer import Writer
from tests.callers.caller import Caller
from tests.callers.compare import ANOTHER_GRAPH, EXCUSES
from tests.callers.programs import MODES, Program, programs
from tests.callers.runs import AGAIN, LIMITED, OURS, SHARED, judge, main, many_compiled, run, run_ours
from tests.sources import SOURCES
from tests.test_memory import any_allowance

SETTINGS = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
)
# What eager says of gradients of what is no leaf, what Dynamo says of profiles of its own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with many_compiled():
        yield
    torch.set_num_threads(threads)


class Tally:
    """Distinct programs, how their lines ended, and differences that are none."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.found: Counter[str] = Counter()

    def try_(self, program: Program, sources: Sequence[str], inner: str, most: int) -> None:
        """From `most` of the sources, which the program's text says.

        Raises: AssertionError if a line ends otherwise.
        """
        if repr(program) in self.seen:
            return
        first = zlib.crc32(repr(program).encode()) % len(sources)
        most = most if program.mode in SHARED else 1  # the others compile in every run
        verdict = run(program, [*sources[first:], *sources[:first]][:most], inner)
        assert not verdict.differences, "\n".join([*map(str, verdict.differences), repr(program)])
        assert ANOTHER_GRAPH not in verdict.excused or "checkpoint" in program.source, repr(program)
        self.seen.add(repr(program))
        self.found.update(verdict.excused)
        self.found[program.mode] += 1
        self.found[program.precision] += 1
        self.found.update(f"ends in {o.kind}" for o in verdict.stock if o.kind)
        self.found["lines"] += len(verdict.stock)


def search(
    examples: int,
    sources: Sequence[str] = tuple(SOURCES),
    modes: tuple[str, ...] = MODES,
    inner: str = "aot_eager",
    tally: Tally | None = None,
    most: int = len(SOURCES),
    **changes: object,
) -> Tally:
    """Tries up to `examples` programs, each from `most` of the sources.

    Raises: AssertionError of the first that ends otherwise, as small as hypothesis makes it.
    """
    tally = tally or Tally()

    @settings(SETTINGS, max_examples=examples, **changes)
    @given(programs(modes=modes))
    def attempt(program: Program) -> None:
        tally.try_(program, sources, inner, most)

    attempt()
    return tally


def test_callers_find_what_stock_has() -> None:
    """Some of every mode. What else is drawn changes with our sources, of which Hypothesis draws constants too."""
    tally = Tally()
    for mode in MODES:
        search(10 if mode in SHARED else 3, modes=(mode,), most=4, tally=tally, derandomize=True)
    assert all(tally.found[mode] for mode in MODES)
    assert len(tally.seen) >= 16  # some are alike
    assert sum(tally.found[reason] for reason in EXCUSES) < 0.1 * tally.found["lines"]


def test_callers_under_a_limit_of_memory() -> None:
    """Each forward is allowed other bytes, from none to all, so tensors leave, stay, and leave later in any order."""
    seen: set[str] = set()

    @settings(SETTINGS, max_examples=20, derandomize=True)
    @given(programs(modes=SHARED))
    def attempt(program: Program) -> None:
        with any_allowance(0, 100, 400, 1 << 40):
            verdict = judge(program.function(), program.mode, program.precision, ["read"], ours=LIMITED)
        assert not verdict.differences, "\n".join([*map(str, verdict.differences), repr(program)])
        seen.add(repr(program))

    attempt()
    assert len(seen) >= 10


@pytest.mark.slow
def test_a_thousand_callers() -> None:
    """RANDOM_CALLERS says how many."""
    tally = Tally()
    while len(tally.seen) < int(os.environ.get("RANDOM_CALLERS", "1000")):
        search(250, tally=tally)
        torch._dynamo.reset()  # a thousand programs' code is some GiB
    assert {"float32", "bfloat16", "autocast"} <= tally.found.keys()
    errors = {"modified by an inplace operation", "backward through the graph a second time"}
    assert errors <= {kind.partition(": ")[2] for kind in tally.found}
    print("\n".join(f"{n:7} {kind}" for kind, n in tally.found.most_common()))


# Writes that autograd does not see, and steps between a forward and its backward: where nothing that is saved was
# written into, PyTorch says nothing. What is computed again from a parameter has another value then, or raises.
WRITES = re.compile(r"\.data\b|numpy|sgd")
# What they save is the caller's too. The first, whose context keeps what autograd does not check, comes most often.
SHARING = ("Keeps", "Keeps", "Pair", "Views", "Chunk")


@pytest.mark.slow
def test_callers_of_what_is_computed_again() -> None:
    """From tensors that the caller has had in hand meanwhile, and may have changed."""
    seen: set[str] = set()

    @settings(SETTINGS, max_examples=250)
    @given(programs(modes=SHARED, kinds=SHARING).filter(lambda program: not WRITES.search(program.source)))
    def attempt(program: Program) -> None:
        sources = ["read", "given_away", "resident"]
        verdict = judge(program.function(), program.mode, program.precision, sources, ours=AGAIN)
        assert not verdict.differences, "\n".join([*map(str, verdict.differences), repr(program)])
        seen.add(repr(program))

    attempt()
    assert len(seen) >= 100


@pytest.mark.slow
def test_through_inductor() -> None:
    search(8, ["read", "given_away"], ("static", "dynamic"), "inductor", derandomize=True)


def mlp_twice(t: Caller) -> None:
    b0 = t.block("Mlp")
    x1 = t.hidden(4)
    with t:
        y2 = b0(b0(x1 * 1.0))
    with t:
        t.loss(y2).backward()
    t.end(locals())


@pytest.mark.parametrize("source", SOURCES)
def test_values_come_from_their_source(source: str) -> None:
    found, _ = run_ours(mlp_twice, "static", "float32", OURS, SOURCES[source])
    assert not [outcome.kind for outcome in found.outcomes if outcome.kind]
    SOURCES[source].check(ssd_fx.stats())


def test_a_program_prints_as_a_script_that_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ('b0 = t.block("Mlp")', "x1 = t.leaf(4)", "with t: y2 = b0(x1)", "with t: t.loss(y2, y3).backward()")
    script = repr(Program("static", "float32", lines))
    with PLANTED["handles that do not die"][0]():
        exec(script, {"main": main})
    out = capsys.readouterr().out
    assert "line 0: no error\nline 1: NameError\n" in out
    assert "DIFFERS  read: line -1: a graph lives still, and has stored" in out


# ---- planted faults


def given_away_though_the_graph_is_kept() -> AbstractContextManager[object]:
    begin = Reader.begin

    def broken(reader: Reader, entry: Entry, asked: TensorMeta, seq: int, *, consume: bool, relies_on: str) -> Load:
        return begin(reader, entry, asked, seq, consume=True, relies_on=relies_on)

    return mock.patch.object(Reader, "begin", broken)


def no_version_check() -> AbstractContextManager[object]:
    hold = Writer._hold

    def broken(writer: Writer, entry: Entry, x: Tensor) -> str:
        codec_first = hold(writer, entry, x)
        entry.version = x._version
        entry.counter = None
        return codec_first

    return mock.patch.object(Writer, "_hold", broken)


def another_slot_s_bytes() -> AbstractContextManager[object]:
    """A load finds what was stored last in the same layout."""
    begin = Reader.begin

    def broken(reader: Reader, entry: Entry, *args: object, **more: object) -> Load:
        load = begin(reader, entry, *args, **more)  # type: ignore[arg-type]
        others = [e for e in entries._entries.values() if e.layout == entry.layout and e.held is not None]
        if others and others[-1].held is not None and others[-1] is not entry:
            tensors.copy_bytes(load.out, others[-1].held)
        return load

    return mock.patch.object(Reader, "begin", broken)


def handles_that_do_not_die() -> AbstractContextManager[object]:
    store, kept = Store.store, []

    def broken(self: Store, x: Tensor, handle: Tensor, *args: object) -> None:
        kept.append(handle)
        store(self, x, handle, *args)  # type: ignore[arg-type]

    return mock.patch.object(Store, "store", broken)


PLANTED: dict[str, tuple[Callable[[], AbstractContextManager[object]], str, str]] = {
    "given away though kept": (
        given_away_though_the_graph_is_kept,
        "given_away",
        "given away to a backward",
    ),
    "no version check": (no_version_check, "read", "'no error' instead of 'RuntimeError: modified by an inplace"),
    "another slot's bytes": (another_slot_s_bytes, "resident", r"line \d+: .* is .* instead of"),
    "handles that do not die": (handles_that_do_not_die, "read", "a graph lives still, and has stored"),
}


LATE = ("no version check", "another slot's bytes")  # the search takes seconds to find these


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] if f in LATE else []) for f in PLANTED])
def test_a_planted_fault_is_found(fault: str) -> None:
    plant, source, found = PLANTED[fault]
    with plant(), pytest.raises(AssertionError, match=found):
        search(40, [source], ("static",), derandomize=True, phases=[Phase.generate])
