"""One planted fault: a line of code, what a tired engineer could make of it, and what would come of that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """`old` occurs exactly once in `file` and becomes `new`. `hazard`: what users would suffer, in one line.

    `tests`: the test paths that should find it, separated by blanks; those of the mirrored directory first.
    """

    name: str
    file: str
    old: str
    new: str
    hazard: str
    tests: str

    @property
    def paths(self) -> list[str]:
        return self.tests.split()

    @property
    def mirrored(self) -> str:
        """The directory of tests that mirrors the code."""
        return f"tests/{Path(self.file).parts[0]}"

    def plant(self, checkout: Path) -> None:
        """Put the fault into a checkout.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        path = checkout / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))
