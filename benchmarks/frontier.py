"""Whether ssd_fx is never worse than its rivals: what is predicted of both at equal peaks, as tables and as pictures.

A case is one model on one machine with one drive. Ours is planned at every rival's peak, and at some others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import svg  # neighbours of this file
from forecasts import Figure
from rivals import KEEP

from ssd_fx.rivals import BUDGETED, CHECKPOINT

GIB = 2**30
ROUNDING = 1.005  # times the rival's time: more is worse than it
GOAL, FROM_GBPS = 0.95, 5.0  # of a checkpoint per layer, where the drive has so many GB/s each way
OFFLOAD = "offload only"
HIGHEST = 2.0  # times the step that keeps all: slower ones are not in the picture
LINES = (BUDGETED, OFFLOAD)  # rivals of several budgets, whose name they begin with


@dataclass(frozen=True)
class At:
    """Ours under a limit of `limit_bytes`; None if no plan meets it."""

    limit_bytes: float
    ours: Figure | None

    @property
    def step_s(self) -> float:
        return self.ours.step_s if self.ours else math.inf


@dataclass(frozen=True)
class Case:
    """`about`: what is planned, in words; `label`: of a panel. `rivals`, `equal`: by the rival's name, `equal` ours at
    the rival's peak. `curve`: ours at other peaks."""

    about: str
    label: str
    gbps: float
    rivals: Mapping[str, Figure]
    equal: Mapping[str, At]
    curve: Sequence[At]

    @staticmethod
    def read(found: Mapping[str, Any]) -> Case:
        """Of JSON, as `asdict` has made it."""
        at = {name: _at(each) for name, each in found["equal"].items()}
        rivals = {name: Figure(**each) for name, each in found["rivals"].items()}
        words = (found["about"], found["label"], found["gbps"])
        return Case(*words, rivals, at, [_at(each) for each in found["curve"]])

    @property
    def all(self) -> list[At]:
        """Ours at all limits, the lowest first."""
        return sorted([*self.curve, *self.equal.values()], key=lambda at: at.limit_bytes)

    def ratio(self, rival: str) -> float:
        """Our time to the rival's at its peak; infinite where we have no plan."""
        return self.equal[rival].step_s / self.rivals[rival].step_s

    @property
    def worst(self) -> tuple[str, float]:
        return max(((name, self.ratio(name)) for name in self.rivals), key=lambda pair: pair[1])

    @property
    def rise(self) -> float:
        """The most by which our time goes up where the peak does, as a factor; 1 if it never does.

        No plan under a limit, and one under a lower limit, is an infinite one.
        """
        most, least_s = 1.0, math.inf
        for at in self.all:
            if least_s < math.inf:
                most = max(most, at.step_s / least_s)
            least_s = min(least_s, at.step_s)
        return most

    @property
    def beyond(self) -> int:
        """Bytes by which a peak of ours is above its limit at most; 0 if all are equal to it, or below."""
        found = [(at.ours, at.limit_bytes) for at in self.all if at.ours]
        return math.ceil(max((own.peak_bytes - limit for own, limit in found if not own.fits(limit)), default=0))

    @property
    def holds(self) -> bool:
        return self.worst[1] <= ROUNDING and self.rise <= ROUNDING and not self.beyond


def _at(found: Mapping[str, Any]) -> At:
    return At(found["limit_bytes"], Figure(**found["ours"]) if found["ours"] else None)


def limits(rivals: Mapping[str, Figure], count: int) -> list[float]:
    """`count` peaks in equal steps, from the least that a rival or offloading could need, to everything kept."""
    keep = rivals[KEEP]
    low = min(1.1 * keep.floor_bytes, *(each.peak_bytes for each in rivals.values()))
    return [low + (keep.peak_bytes - low) * i / (count - 1) for i in range(count)]


def verdict(case: Case) -> str:
    """One line."""
    name, worst = case.worst
    beats = f"worst {_times(worst)} (of {name})"
    checkpoint = f"checkpoint per layer {_times(case.ratio(CHECKPOINT))}"
    if case.gbps >= FROM_GBPS and case.ratio(CHECKPOINT) > GOAL:
        checkpoint += f", above {GOAL}"
    curve = "monotone" if case.rise <= ROUNDING else f"NOT MONOTONE: {_times(case.rise)} of a smaller peak's time"
    peaks = f"; A PEAK IS {case.beyond} B ABOVE ITS LIMIT" if case.beyond else ""
    return f"{'holds' if case.holds else 'FAILS'}: {beats}; {checkpoint}; {curve}{peaks}"


def table(case: Case) -> str:
    """Markdown: ours beside each rival at its peak, then ours at other peaks, then the verdict."""
    head = "| rival | peak, GiB | ms | writes, GiB | ours: ms | to the rival | ours: peak, GiB | ours: writes, GiB |"
    lines = [f"### {case.about}", "", head, "|---|" + "---|" * 7]
    for name, rival in sorted(case.rivals.items(), key=lambda pair: pair[1].peak_bytes):
        at, ratio = case.equal[name], case.ratio(name)
        cells = [name, _gib(rival.peak_bytes), _ms(rival.step_s), _gib(rival.written_bytes)]
        cells += [_ms(at.step_s), f"**{_times(ratio)}**" if ratio > ROUNDING else _times(ratio), *_own(at)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| ours within, GiB | ms | peak, GiB | writes, GiB |", "|---|---|---|---|"]
    lines += [f"| {' | '.join((_gib(at.limit_bytes), _ms(at.step_s), *_own(at)))} |" for at in case.curve]
    return "\n".join([*lines, "", verdict(case)])


def _own(at: At) -> tuple[str, str]:
    return (_gib(at.ours.peak_bytes), _gib(at.ours.written_bytes)) if at.ours else ("no plan", "")


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f}"


def _ms(seconds: float) -> str:
    return "no plan" if math.isinf(seconds) else f"{seconds * 1e3:.1f}"


def _times(ratio: float) -> str:
    return "no plan" if math.isinf(ratio) else f"{ratio:.3f}"


def picture(cases: Sequence[Case]) -> str:
    """A panel for each case: step over peak, ours and the rivals'. Steps beyond `HIGHEST` are left out."""
    return svg.panels([_panel(case) for case in cases], columns=2)


def _panel(case: Case) -> str:
    series: dict[str, list[svg.Point]] = {"ssd_fx": [_point("ssd_fx", at.ours) for at in case.all if at.ours]}
    for name, rival in sorted(case.rivals.items(), key=lambda pair: pair[1].peak_bytes):
        line = next((each for each in LINES if name.startswith(each)), name)
        series.setdefault(line, []).append(_point(name, rival))
    top = HIGHEST * case.rivals[KEEP].step_s * 1e3
    shown = {name: [p for p in points if p.y <= top] for name, points in series.items()}
    return svg.plot(shown, title=case.label, x="peak, GiB", y="forward and backward, ms (predicted)")


def _point(name: str, figure: Figure) -> svg.Point:
    ms = figure.step_s * 1e3
    text = f"{name}: {_gib(figure.peak_bytes)} GiB, {ms:.1f} ms, writes {_gib(figure.written_bytes)} GiB"
    return svg.Point(figure.peak_bytes / GIB, ms, ms, ms, text)


def worst_of(cases: Sequence[Case]) -> str:
    """What is said last, of all cases."""
    failed = [case for case in cases if not case.holds]
    worst = max(cases, key=lambda case: case.worst[1])
    text = f"{len(cases) - len(failed)} of {len(cases)} cases hold; worst {_times(worst.worst[1])}"
    return f"{text} of {worst.worst[0]} ({worst.about})"


def renamed(figures: Sequence[Figure | None], shares: Sequence[float]) -> dict[str, Figure]:
    """Offload only under several shares, as rivals. They have the names of their shares."""
    pairs = zip(shares, figures, strict=True)
    return {f"{OFFLOAD} {share:g}": each for share, each in pairs if each is not None}
