"""Turns, and what travels to a worker."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import workers
from torch import nn
from training import Model, Task, train_gpt
from ways import Checkpointed
from workers import Workers, order

from tests.bitwise import assert_same_bits

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


def test_who_has_waited_for_some_seconds_makes_a_step_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 3 s. The last of a round is the first of the next one, and has not waited."""
    made, clock = [], [0.0]

    class Fake(SimpleNamespace):
        def step(self) -> str:
            made.append(self.name)
            clock[0] += 3
            return f"step {len(made)}"

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    turns = Workers({})
    turns.workers = {name: Fake(name=name) for name in "ab"}  # type: ignore[misc]
    assert list(turns.rounds(2)) == [{"a": "step 1", "b": "step 2"}, {"a": "step 5", "b": "step 3"}]
    assert made == ["a", "b", "b", "a", "a"]


def test_a_task_survives_the_command_line() -> None:
    task = Task(MODEL, "ssd_fx", 0.4, {"budget": 0.4, "dirs": ["/mnt"]})
    assert Task.read(json.dumps(asdict(task))) == task


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
    assert_same_bits(*results)
