"""`ssd-fx bench`: what it makes of the steps of two processes."""

from __future__ import annotations

import json
import signal
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline

from ssd_fx import cli
from ssd_fx.command import bench, toy
from ssd_fx.command.toy import Shape, Step, ask, worker
from tests.command import workers

MOVED = {
    "stall_s": 0.01,
    "saved_bytes": 8 << 20,
    "offloaded_bytes": 6 << 20,
    "written_bytes": 5 << 20,
    "read_bytes": 4 << 20,
}
PAIRS = [
    (Step(1.0, 200 << 20, 5.0), Step(1.1, 120 << 20, 5.0, MOVED)),
    (Step(2.0, 210 << 20, 4.0), Step(2.4, 150 << 20, 4.5, MOVED)),
    (Step(1.0, 190 << 20, 3.0), Step(1.3, 130 << 20, 3.0, MOVED)),
]


def test_times_are_compared_within_pairs() -> None:
    """A neighbour slowed the second pair, both steps of it."""
    found = bench.figures(PAIRS)
    assert found["ratio"] == pytest.approx(1.2)
    assert (found["inductor_s"], found["ssd_fx_s"]) == (1.0, 1.3)
    assert (found["inductor_resident_bytes"], found["ssd_fx_resident_bytes"]) == (210 << 20, 150 << 20)
    assert found["losses_differ_by"] == 0.5


def test_the_table() -> None:
    assert_expected_inline(
        bench.table(PAIRS),
        """\
                                      inductor  ssd_fx
step, ms                                1000.0  1300.0
  ratio within pairs                         1  1.200 (quartiles 1.150 to 1.250)
  of it waiting for the drive, ms            -  10.0
most memory of the process, MiB            210  150
saved in a step, MiB                         -  8.0
offloaded in a step, MiB                     -  6.0
written in a step, MiB                       -  5.0
read in a step, MiB                          -  4.0
losses differ by at most                        5.0e-01

On this drive a step takes 1.20 of Inductor's, and the process takes 0.71 of its memory.""",
    )


def test_noise_is_no_result() -> None:
    """Quartiles far on both sides of 1."""
    found = bench.figures(PAIRS) | {"ratio": 0.69, "ratio_low": 0.6, "ratio_high": 2.33}
    assert bench.verdict(found).startswith("The times vary too much")
    assert bench.verdict(found | {"ratio_low": 0.95, "ratio_high": 1.05}).startswith("On this drive a step takes 0.69")


def test_nothing_was_offloaded() -> None:
    assert bench.verdict(bench.figures(PAIRS) | {"offloaded_bytes": 0}).startswith("Nothing was offloaded")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "0"], "--layers=0 is not possible; right would be 1 or more"),
        (["--width", "10"], "--width=10 is no multiple of --heads=4; right would be e.g. 256 and 4"),
        (["--steps", "1"], "--steps=1 is not possible; right would be 2 or more"),
        (["--budget", "100"], "option budget='100' has no unit"),
    ],
)
def test_a_wrong_word(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(tmp_path), *words]) == 2
    assert capsys.readouterr().err.startswith(f"ssd-fx: {said}")


def test_no_such_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", str(tmp_path / "missing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_training_process_that_was_killed() -> None:
    """No BrokenPipeError, which the command would take for a reader that has gone."""
    ours, theirs = Pipe()
    theirs.close()
    with ours, pytest.raises(RuntimeError, match="the training process ended"):
        ask(ours)


ANY: Any = None


def test_an_interrupt_does_not_wait_for_a_busy_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for up to a minute."""
    monkeypatch.setattr(toy, "_work", workers.busy)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), worker(ANY, None):
        raise KeyboardInterrupt
    assert time.perf_counter() - began < 30


def test_ctrl_c_is_for_the_command_and_not_for_its_training_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to all of them, and each wrote a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(toy, "_work", workers.interrupted)
    with worker(ANY, None) as training, pytest.raises(RuntimeError, match="goes on"):
        training()
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_two_processes_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "1", "--width", "128", "--heads", "2", "--steps", "2", "--json"]
    assert cli.main(["bench", str(tmp_path), *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["steps"]) == 2
    assert 0 < found["offloaded_bytes"] <= found["saved_bytes"]
    assert found["losses_differ_by"] < 1e-2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_training_that_fails(tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path / "missing")]}
    with worker(Shape(1, 8, 2, 1, 4), options) as failing, pytest.raises(RuntimeError, match="does not exist"):
        failing()
