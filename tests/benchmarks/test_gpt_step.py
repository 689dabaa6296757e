"""The demo: what it installs, and that it says what it does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import gpt_step
import pytest
import workers
from training import Step

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_installs_nothing_for_tests(tmp_path: Path) -> None:
    def installs(target: str) -> str:
        words = ["make", "-n", target, f"VENV={tmp_path}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return next((line for line in done.stdout.splitlines() if "pip install" in line), "")

    assert installs("demo").endswith("-e '.'")
    assert installs("test").endswith("-e '.[test]'")
    assert not any("--quiet" in installs(target) for target in ("demo", "test")), "PyTorch takes minutes"
    (tmp_path / ".ssd_fx-installed").touch()
    assert not installs("demo"), "the tests need what it needs"


def test_it_says_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Quick(workers.Workers):
        def rounds(self, count: int) -> Iterator[dict[str, Step]]:
            step = Step(**dict.fromkeys(Step.__dataclass_fields__, 0.25))  # type: ignore[arg-type]
            return iter([dict.fromkeys(gpt_step.BACKENDS, step)] * count)

    class Idle:
        def __init__(self, *_: object) -> None: ...

        def step(self) -> Step:
            assert "compiling, which may take a minute" in capsys.readouterr().err, "ahead of it"
            return Step(**dict.fromkeys(Step.__dataclass_fields__, 0.25))  # type: ignore[arg-type]

        def stop(self) -> None: ...

    monkeypatch.setattr(workers, "Worker", Idle)
    monkeypatch.setattr(gpt_step, "Workers", Quick)
    gpt_step.measure(gpt_step.parse_flags(["--pairs", "2", "--warmup", "1"]))
    said = capsys.readouterr().err.splitlines()
    assert said[-3:] == [f"pair {i} of 3: inductor 250 ms, ssd_fx 250 ms" for i in (1, 2, 3)]
