"""What a part of the page is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paper.measure import Result, Setup


@dataclass(frozen=True, kw_only=True)
class Part:
    """One experiment.

    share: of the time that the runner has. paper: what the paper has of it. not_shown: what ours does not show.
    measure: makes a result. section: the result as Markdown. plot: the same as an SVG document, if it has one.
    """

    name: str
    title: str
    share: float
    paper: str
    not_shown: str
    measure: Callable[[Setup], Result]
    section: Callable[[Result], str]
    plot: Callable[[Result], str] | None = None
