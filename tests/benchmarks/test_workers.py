"""Turns, and what travels to a worker."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import turns
from torch import nn
from training import Model, Task, train_gpt
from ways import Checkpointed
from workers import order

from ssd_fx.runtime import deaths
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
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


def test_who_waits_for_a_turn_gives_no_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its next steps would touch all of it anew."""
    given_back = mock.Mock()
    monkeypatch.setattr(CPU_ALLOCATOR, "_library", SimpleNamespace(tick=given_back))
    monkeypatch.setattr(deaths, "when_idle", idle := list(deaths.when_idle))
    for work in idle:
        work()
    given_back.assert_called_once()
    turns.hold_memory()
    for work in idle:
        work()
    given_back.assert_called_once()


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
