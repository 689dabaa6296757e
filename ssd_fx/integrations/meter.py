"""What ssd_fx did in a training step, under the names that the callbacks log."""

from __future__ import annotations

from ssd_fx.runtime.stats import stats

PER_STEP = ("saved_bytes", "offloaded_bytes", "written_bytes", "read_bytes", "forwarded_bytes", "stall_s")
NOW = ("disk_bytes",)
KNOWN_LATER = ("drive_tb_per_day", "drive_life_days")  # 0 until then: a plot would show worn-out drives


class Meter:
    """Reads `ssd_fx.stats()` at training steps."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, step: int) -> None:
        """Counts from here on. `step`: how many training steps ended before, as those before a resume did."""
        found = stats().as_dict()
        self._step, self._totals = step, {name: found[name] for name in PER_STEP}

    def read(self, step: int) -> dict[str, float]:
        """The means over the training steps since the last call (`PER_STEP`), and the present state (`NOW`).

        Also the figures of `KNOWN_LATER` that are known by now. `step`: how many training steps have ended so far.
        Names begin with "ssd_fx/".
        """
        found = stats().as_dict()
        steps = max(1, step - self._step)
        before = self._totals if all(found[name] >= self._totals[name] for name in PER_STEP) else {}  # else a reset
        means = {name: (found[name] - before.get(name, 0.0)) / steps for name in PER_STEP}
        self._step, self._totals = step, {name: found[name] for name in PER_STEP}
        now = {name: found[name] for name in NOW} | {name: found[name] for name in KNOWN_LATER if found[name]}
        return {f"ssd_fx/{name}": value for name, value in (means | now).items()}
