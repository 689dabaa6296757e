"""The option `memory`: training stays within it, uses it, and is bitwise what it is without."""

from __future__ import annotations

import gc
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ssd_fx
from ssd_fx.report.text import lines
from ssd_fx.runtime import account
from ssd_fx.runtime.allowance import MARGIN, REMEMBERED, Allowance, Bound
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.memory.gauge import CpuGauge
from tests import sources
from tests.bitwise import Compile, kept, ours, prove_bitwise
from tests.models import gpt
from tests.passes import toys
from tests.test_every_source import TOYS

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_FX_BUDGET")


class Layers(nn.Module):
    """Each saves 8 MiB, and has 1/4 MiB of parameters."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


class Trained:
    """Steps of layers, with what lived at the most in each, as the runtime's gauge says.

    All bytes are above those of other tests.
    """

    def __init__(self, memory: int | str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        ssd_fx.close()
        gc.collect()
        torch.manual_seed(0)
        CPU_ALLOCATOR.install()
        self.gauge, self.highest = CpuGauge(), 0
        self.others = self.gauge.live_bytes()
        monkeypatch.setattr(account, "gauge", lambda device: self)
        memory = memory if isinstance(memory, str) else self.others + memory
        self.options = {"inner": "aot_eager", "dirs": [str(directory)], "allow_tmpfs": True, "memory": memory}
        self.models = [self.made()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gauge, name)

    def begin(self) -> int:
        self.peak_bytes()
        return self.gauge.begin()

    def peak_bytes(self) -> int:
        found = self.gauge.peak_bytes()
        self.highest = max(self.highest, found)
        return found

    def made(self) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
        model = Layers()
        compiled = torch.compile(model, backend=ssd_fx.backend, options=self.options, dynamic=False)
        return compiled, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def losses(self, rows: int = 8192, micro: int = 1) -> list[float]:
        found = []
        for compiled, optimizer in self.models:
            for i in range(micro):
                x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(i))
                loss = compiled(x)
                loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return found

    def step(self, rows: int = 8192, micro: int = 1) -> int:
        """The peak of a step."""
        self.gauge.peak_bytes()
        self.highest = 0
        self.losses(rows, micro)
        return max(self.highest, self.gauge.peak_bytes()) - self.others


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    def make(memory: int | str) -> Trained:
        return Trained(memory, tmp_path, monkeypatch)

    return make


_peaks: list[int] = []


@pytest.fixture
def range_of(training: Callable[..., Trained]) -> tuple[int, int]:
    """The peaks of a step in which nothing stays, and of one in which everything does, with Adam's state; measured
    once in a process."""
    if not _peaks:
        tight = training(MIB)
        with pytest.warns(RuntimeWarning, match=r"memory=.* cannot be kept: a step needs "):
            _peaks.append(max(tight.step() for _ in range(3)))
        del tight
        loose = training("1TiB")
        _peaks.append(max(loose.step() for _ in range(3)))
    least, most = _peaks
    return least, most


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_within_the_limit_and_near_it(
    training: Callable[..., Trained], range_of: tuple[int, int], share: float
) -> None:
    least, most = range_of
    assert most - least > 20 * MIB
    limit = int(1.03 * least + share * (most - 1.03 * least))
    trained = training(limit)
    peaks = [trained.step() for _ in range(REMEMBERED + 3)]
    assert max(peaks) <= limit
    assert max(peaks[2:]) >= limit - MARGIN * (limit + trained.others) - 8 * MIB  # all or nothing of a tensor


def test_a_step_changes(training: Callable[..., Trained], range_of: tuple[int, int]) -> None:
    """A larger batch, evaluation, several micro-batches, another model: each step is within the limit."""
    least, most = range_of
    limit = (least + most) // 2 + 16 * MIB
    trained = training(limit)
    peaks = [trained.step() for _ in range(3)]
    peaks += [trained.step(rows=10240) for _ in range(3)]
    peaks += [trained.step() for _ in range(2)]
    with torch.no_grad():
        trained.models[0][0](torch.randn(8192, 256))
    peaks += [trained.step(micro=3) for _ in range(3)]
    trained.models.append(trained.made())
    peaks += [trained.step() for _ in range(4)]
    assert max(peaks) <= limit


def test_bitwise(training: Callable[..., Trained], range_of: tuple[int, int]) -> None:
    least, most = range_of
    found = []
    for memory in (MIB, (least + most) // 2, "auto"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            trained = training(memory)
            found.append([trained.losses() for _ in range(4)])
    assert found[1:] == found[:1] * 2


def test_what_stays_has_the_limit_for_its_reason(training: Callable[..., Trained]) -> None:
    """No write and no read is to blame, and no tensor that stays is said to be offloaded."""
    trained = training("1TiB")
    for _ in range(4):
        trained.step()
    assert ssd_fx.stats().memory_limit_bytes == 1 << 40
    found = ssd_fx.report()
    said = dict(lines(found))
    assert re.match(r"fits 1 TiB: [\d.]+ MiB measured, 5\d(\.\d+)? MiB of activations stay; ", said["memory"])
    assert "above the plan: 56 MiB stay, for `memory` has room; planned" in said["memory"]
    assert "inflight" not in said["memory"]
    assert said["plan"] == "0 of 7 groups (0 B) are offloaded; 7 (56 MiB) stay as long as `memory` has room"
    table = str(found).split("module  ")[1]
    assert "stays: `memory` has room" in table
    assert "offload" not in table
    assert "NOT FREED" not in str(found)


def test_one_excess(training: Callable[..., Trained], caplog: pytest.LogCaptureFixture) -> None:
    """What all tensors took above the limit, with the optimizer's state: as predicted, as warned, as in the report."""
    trained = training(20 * MIB)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trained.step()
        assert not any("cannot be kept" in str(each.message) for each in warned), "Adam has not made its state"
        for _ in range(3):
            trained.step()
    (runtime,) = [str(each.message) for each in warned if "cannot be kept" in str(each.message)]
    (compiled,) = [each.getMessage() for each in caplog.records if "too much" in each.getMessage()]
    report = dict(lines(ssd_fx.report()))
    told = [
        re.search(rf"([\d.]+) MiB {said}", text)
        for text, said in ((compiled, "too much"), (runtime, "more"), (report["memory"], "too much"))
    ]
    excess = [float(each[1]) for each in told if each is not None]
    assert len(excess) == 3
    assert abs(excess[1] - excess[2]) <= 0.1, "the report is of the last step, and the warning of an earlier one"
    assert abs(excess[1] - excess[0]) <= 12, "a tensor of 8 MiB, and what other tests have left, die later than planned"


def test_nothing_counts_the_tensors(training: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = training("1TiB")
    monkeypatch.setattr(account, "gauge", lambda device: None)
    with pytest.warns(RuntimeWarning, match="nothing counts the tensors of cpu, so with memory=1099511627776 none"):
        trained.losses()
    ssd_fx.reset_stats()
    trained.losses()
    assert ssd_fx.stats().written_bytes + ssd_fx.stats().forwarded_bytes >= 20 * MIB


@contextmanager
def any_allowance(*nbytes: int) -> Iterator[None]:
    """One of so many bytes for every step, at random, whatever lives: nobody looks at all objects of the process."""
    chosen = random.Random(0)
    begins = Allowance.begins

    def choose(self: Allowance, *args: Any, **more: Any) -> None:
        begins(self, *args, **more)
        self.bounds = (Bound(chosen.choice(nbytes), sys.maxsize, 0),)

    look = mock.patch.object(CpuGauge, "_look_for_tensors", return_value=None)
    with mock.patch.object(Allowance, "begins", choose), look:
        yield


OPTIONS = {name: value for name, value in sources.OPTIONS.items() if name != "budget"}


SOME = [pytest.param(toy, marks=[pytest.mark.slow] if i % 5 else [], id=toys.name(toy)) for i, toy in enumerate(TOYS)]


@pytest.mark.filterwarnings("ignore:memory=1 MiB cannot be kept")
@pytest.mark.parametrize("toy", SOME)
def test_toys_under_any_allowance(toy: toys.Toy) -> None:
    def six_times(compile: Compile) -> list[torch.Tensor]:
        return [x for _ in range(6) for x in again(compile)]

    again = toys.trained(toy)
    with any_allowance(0, 100, 300, 600, 1 << 40):
        prove_bitwise(six_times, [kept(sources.OPTIONS), ours(OPTIONS, engine="memory", memory=MIB)])


def test_a_gpt_under_any_allowance(tmp_path: Path) -> None:
    given = {"inner": "aot_eager", "dirs": [str(tmp_path)], "allow_tmpfs": True, "min_bytes": 0}
    with any_allowance(0, 1 << 16, 1 << 18, 1 << 20, 1 << 40):
        prove_bitwise(gpt(), [kept(given), ours(given, memory="1TiB")])
