"""The examples run as their docstrings say, and have the same losses whatever stays in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

SMALL = ("--steps", "3", "--layers", "2", "--width", "64", "--batch", "2", "--seq", "64")


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("example", "flags"), [("train_ddp", ("--accumulate", "2")), ("train_fsdp2", ("--bf16",))])
def test_example(example: str, flags: tuple[str, ...], inner: str, tmp_path: Path) -> None:
    said = {"SSD_FX_MIN_BYTES": "0", "SSD_FX_INNER": inner}
    directories = [tmp_path / "nvme0", tmp_path / "nvme1"]
    for directory in directories:
        directory.mkdir()
    where = [word for directory in directories for word in ("--dir", str(directory))]
    offloaded, kept = (
        torchrun(f"examples/{example}.py", *where, *SMALL, *flags, "--budget", budget, **said)
        for budget in ("0", "1.0")
    )
    assert (offloaded[0], kept[0]) == (0, 0), offloaded[1] + kept[1]
    losses = re.findall(r"step (\d) loss ([\d.]+)", offloaded[1])
    assert [step for step, _ in losses] == ["1", "2", "3"]
    assert losses == re.findall(r"step (\d) loss ([\d.]+)", kept[1])
    written = [float(mib) for _, text in (offloaded, kept) for mib in re.findall(r"^written +([\d.]+) MiB", text, re.M)]
    assert written[0] > written[1] == 0.0
    assert [list(directory.iterdir()) for directory in directories] == [[], []]
