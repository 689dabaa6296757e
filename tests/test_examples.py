"""An example trains the same with ssd_fx and without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import fresh

SMALL = ("--tokens", "256", "--layers", "2", "--width", "64", "--vocabulary", "300", "--steps", "3")


@pytest.mark.slow
def test_train_long(tmp_path: Path) -> None:
    plain = fresh.ended("examples/train_long.py", *SMALL, "--backend", "inductor")
    ours = fresh.ended("examples/train_long.py", *SMALL, "--dir", tmp_path, "--memory", "8GiB", SSD_FX_MIN_BYTES="0")
    assert (plain.returncode, ours.returncode) == (0, 0), plain.stderr + ours.stderr
    losses = [re.findall(r"^\d/3 loss ([\d.]+)", done.stdout, re.M) for done in (plain, ours)]
    assert len(losses[0]) == 3
    assert [float(loss) for loss in losses[1]] == pytest.approx([float(loss) for loss in losses[0]], abs=2e-3)
    assert "\nmemory  fits 8 GiB: " in ours.stdout
