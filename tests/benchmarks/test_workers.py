"""Turns, and what travels to a worker."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import budget_curve
import pytest
import torch
from torch import nn
from training import Model, Step, Task, train_gpt
from ways import Checkpointed
from workers import order

BENCHMARKS = Path(budget_curve.__file__).parent
MODEL = Model(layers=1, width=64, heads=1, batch=2, seq=64, dropout=0.1, amp=False, seed=0, lr=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_everyone_has_every_place_equally_often(count: int) -> None:
    names = [str(i) for i in range(count)]
    rounds = [order(names, number) for number in range(2 * count)]
    assert all(sorted(each) == sorted(names) for each in rounds)
    for place in range(count):
        assert Counter(each[place] for each in rounds) == dict.fromkeys(names, 2)


def test_pairs_alternate() -> None:
    assert [order(["a", "b"], number) for number in range(4)] == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]


def test_a_task_survives_the_command_line() -> None:
    task = Task(MODEL, "ssd_fx", 0.4, {"budget": 0.4, "dirs": ["/mnt"]})
    assert Task.read(json.dumps(asdict(task))) == task


def test_tasks_of_a_curve() -> None:
    """`keep` is there although nobody asked, budgets multiply only what has one, and shares stay floats."""
    flags = budget_curve.parse_flags(["--modes", "recompute", "checkpoint", "offload", "--budgets", "1", "0"])
    tasks = budget_curve.tasks(flags)
    assert [(budget_curve.label(*name), task.way) for name, task in tasks.items()] == [
        ("keep", "inductor"),
        ("recompute 1", "recompute"),
        ("recompute 0", "recompute"),
        ("checkpoint", "checkpoint"),
        ("offload 1", "ssd_fx"),
        ("offload 0", "ssd_fx"),
    ]
    assert [task.budget for task in tasks.values()] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    budget = tasks["offload", 0.0].options["budget"]
    assert (budget, type(budget)) == (0.0, float)
    assert (tasks["keep", None].model.layers, tasks["keep", None].model.width) == (4, 256)


def test_equal_losses_stand_together() -> None:
    taken = {"keep": 2.5, "recompute 0": 2.625, "joint 0": 2.5}
    steps = {name: Step(1, 1, 1, None, 1, loss) for name, loss in taken.items()}
    assert budget_curve.losses(steps) == "2.500000 (keep, joint 0); 2.625000 (recompute 0)"


def test_a_share_beyond_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        budget_curve.parse_flags(["--budgets", "1.5"])
    assert "1.5 is no share from 0 to 1" in capsys.readouterr().err


def test_a_checkpointed_block_is_the_same_block() -> None:
    """In eager mode, with dropout: loss and gradients bitwise; the parameters keep their order."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = train_gpt.GPT(train_gpt.Shape(layers=2, width=32, heads=2, seq=16, dropout=0.5))
        if wrap:
            model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
        loss = model(*next(train_gpt.batches(2, 16, 0)))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_a_small_curve(tmp_path: Path) -> None:
    """Two modes of a tiny model: every step of every round is in the result, losses agree, the plot has both."""
    out, picture = tmp_path / "curve.json", tmp_path / "curve.svg"
    small = ["--layers", "1", "--width", "64", "--heads", "1", "--batch", "2", "--seq", "64"]
    what = ["--modes", "offload", "--budgets", "0", "--rounds", "3", "--warmup", "1", "--dir", str(tmp_path)]
    places = ["--json", str(out), "--plot", str(picture)]
    done = run("budget_curve.py", *small, *what, *places)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [[sorted(each) for each in result["rounds"]]] == [[["keep", "offload 0"]] * 3]
    keep, offload = (point["peak_bytes"] for point in result["points"])
    for steps in result["rounds"]:
        assert steps["keep"]["loss"] == steps["offload 0"]["loss"]
        assert steps["keep"]["peak_bytes"] <= keep
        assert steps["offload 0"]["peak_bytes"] <= offload
    assert "offload" in picture.read_text()


def run(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARKS / script), *flags], capture_output=True, text=True)
