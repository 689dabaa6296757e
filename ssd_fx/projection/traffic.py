"""Rates of writing and reading that a step needs, and how far drives meet them. docs/projection.md, section 3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ssd_fx.projection.scenario import Drive, Drives
from ssd_fx.runtime.wear import DAY_S

Hides = Literal["forward", "half", "no"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one GPU writes in the step of one micro-batch, and reads again.

    nbytes: activations. forward_s, step_s: seconds of the forward, and of forward and backward.
    """

    nbytes: float
    forward_s: float
    step_s: float

    @property
    def write_bytes_s(self) -> float:
        """To write all within half the step, as the paper counts (arXiv 2408.10013)."""
        return self.nbytes / (self.step_s / 2)

    @property
    def forward_write_bytes_s(self) -> float:
        """To write all within the forward."""
        return self.nbytes / self.forward_s

    @property
    def read_bytes_s(self) -> float:
        """To read all within the backward."""
        return self.nbytes / (self.step_s - self.forward_s)

    @property
    def bytes_per_day(self) -> float:
        return self.nbytes / self.step_s * DAY_S

    def hides(self, drives: Drives) -> Hides:
        """Where the writes hide: within the forward, or half the step. "no": not, or reads are too slow."""
        if self.share(drives) < 1:
            return "no"
        if drives.write_bytes_s >= self.forward_write_bytes_s:
            return "forward"
        return "half"

    def drives_needed(self, drive: Drive) -> tuple[int, int]:
        """How many drives take the writes within half the step, and within the forward, and give back in time."""
        read = self.read_bytes_s / (drive.read_gbps * 1e9)
        rates = (self.write_bytes_s, self.forward_write_bytes_s)
        half, forward = (math.ceil(max(rate / (drive.write_gbps * 1e9), read)) for rate in rates)
        return half, forward

    def share(self, drives: Drives) -> float:
        """The part of the activations that drives take within half the step, and give back within the backward.

        Half a step reaches into the backward. Drives are taken to write and read at their full rates at once there.
        """
        return min(1.0, drives.write_bytes_s / self.write_bytes_s, drives.read_bytes_s / self.read_bytes_s)
