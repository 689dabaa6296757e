"""What `ssd_fx.stats()` says of the life of the drives, of steps that really write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssd_fx
from tests.faults.toys import settle


def train(steps: int, directory: Path, **options: Any) -> None:
    given = {"inner": "aot_eager", "engine": "posix", "min_bytes": 0, "dirs": [directory], "allow_tmpfs": True}
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    compiled = torch.compile(model, backend=ssd_fx.backend, options=given | options)
    for _ in range(steps):
        loss = compiled(torch.randn(1024, 64)).sum()
        settle()  # what the backward asks for before it is written is not written
        loss.backward()
        print(ssd_fx.stats())


def last_lines(printed: str) -> list[str]:
    """Of each print, without graphs of other tests that nothing is counted of."""
    ours = re.sub(r"^not counted: .*\n", "", printed, flags=re.MULTILINE)
    return [text.splitlines()[-1] for text in re.split(r"^(?=\d+ steps)", ours, flags=re.MULTILINE)[1:]]


def test_the_life_is_said_from_the_third_step_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(4, tmp_path, drive_tbw=600)
    lines = last_lines(capsys.readouterr().out)
    assert [line.startswith("on disk at the moment") for line in lines] == [True, True, False, False]
    assert re.fullmatch(
        r"at this speed \S+ TB are written in a day; new drives rated for 600 TB last \S+ (years|days|hours)", lines[2]
    )
    found = ssd_fx.stats()
    assert found.drive_life_days == pytest.approx(600e12 / found.drive_bytes_s / 86400)


def test_without_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(3, tmp_path)
    assert last_lines(capsys.readouterr().out)[2].endswith("; the option drive_tbw says how long drives last")


def test_the_rating_of_one_training_is_not_that_of_the_next(tmp_path: Path) -> None:
    train(1, tmp_path, drive_tbw=600)
    assert ssd_fx.stats().drive_tbw == 600
    train(1, tmp_path)
    assert ssd_fx.stats().drive_tbw == 0


def test_host_memory_does_not_wear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(3, tmp_path, engine="memory", drive_tbw=600)
    assert "in a day" not in capsys.readouterr().out
    found = ssd_fx.stats()
    assert (found.written_bytes + found.cancelled_bytes, found.drive_bytes) == (found.offloaded_bytes, 0)
    assert found.drive_life_days == 0
