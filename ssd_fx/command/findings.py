"""What `ssd-fx doctor` found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    `status`: "ok"; "warn" for what works and could be better; "bad" for what does not work. `do`: what to do about it.
    `figures`: the same as numbers, with units in their names.
    """

    subject: str
    says: str
    status: Status = "ok"
    do: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        mark = "" if self.status == "ok" else f"{self.status.upper()}: "
        advice = f"\n{'':12}-> {self.do}" if self.do else ""
        return f"{self.subject:12}{mark}{self.says}{advice}"


def summary(findings: Iterable[Finding]) -> str:
    """How many of `findings` are bad, and how many warn."""
    marks = [each.status for each in findings]
    bad, warnings = marks.count("bad"), marks.count("warn")
    parts = [f"{bad} bad"] if bad else []
    if warnings:
        parts.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    return ", ".join(parts) or "all is well"


def worst(findings: Iterable[Finding]) -> Status:
    """The most serious status among `findings`."""
    found = {each.status for each in findings}
    return "bad" if "bad" in found else "warn" if "warn" in found else "ok"
