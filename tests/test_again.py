"""With `memory` the plan is made once more: bitwise the same, within the limit, and with less computed again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ssd_fx
from ssd_fx import again
from ssd_fx.runtime.allowance import SETTLED
from tests.bitwise import Compile, eager, kept, ours, prove_bitwise, run
from tests.passes.recomputing import SLOW
from tests.test_memory import MIB, Trained

ENOUGH = SETTLED + 3  # steps: the first is not known before it runs, and the plan is made again behind the last


@pytest.fixture(autouse=True)
def no_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SSD_FX_BUDGET")
    yield
    again._functions.clear()


class Residual(nn.Module):
    """On a slow drive most of what is within a layer is computed again."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x)).tanh()
        return x.sum()


class Blocks(nn.Module):
    """Each is compiled by itself, and all share one graph."""

    def __init__(self, compile: Compile, width: int = 32, count: int = 3) -> None:
        super().__init__()
        parts = [nn.Linear, nn.Tanh] * 2
        made = [nn.Sequential(*(p(width, width) if p is nn.Linear else p() for p in parts)) for _ in range(count)]
        self.layers = nn.ModuleList(made)
        self.compiled = [compile(layer) for layer in made]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()  # as what the other blocks get
        for layer in self.compiled:
            x = layer(x)
        return x.sum()


class Recomputing(Trained):
    """Steps of layers with tensors of 2 MiB."""

    more: ClassVar[dict[str, Any]] = {}

    def made(self) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
        self.options |= {"machine": SLOW, "recompute": True} | self.more
        model = Residual(256, 6)
        compiled = torch.compile(model, backend=ssd_fx.backend, options=self.options, dynamic=False)
        return compiled, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def losses(self, rows: int = 2048, micro: int = 1) -> list[float]:
        return super().losses(rows, micro)

    def step(self, rows: int = 2048, micro: int = 1) -> int:
        return super().step(rows, micro)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recomputing]:
    def make(memory: int | str, **options: Any) -> Recomputing:
        monkeypatch.setattr(Recomputing, "more", options)
        return Recomputing(memory, tmp_path, monkeypatch)

    return make


def compiled() -> int:
    """How often the backend was called."""
    return ssd_fx.stats().compiled_graphs


def computed_again() -> list[int]:
    """How many tensors each graph that ran computes again, beyond PyTorch's own partition."""
    return [len(graph.recomputed) for graph in ssd_fx.report().graphs]


def test_once_more_when_steps_are_steady(
    training: Callable[..., Recomputing], caplog: pytest.LogCaptureFixture
) -> None:
    """Everything fits, so nothing is computed again any more. No later step compiles."""
    trained, before = training("1TiB"), compiled()
    for _ in range(SETTLED + 1):
        trained.step()
    assert compiled() == before + 1
    assert computed_again()[0] > 0
    with caplog.at_level(logging.WARNING, "ssd_fx"):
        trained.step()
    assert "functions are compiled once more when they are called next" in caplog.text
    for _ in range(2 * ENOUGH):
        trained.step()
    assert compiled() == before + 2
    assert computed_again()[-1] == 0


def test_not_where_compiling_takes_longer_than_it_gains(
    training: Callable[..., Recomputing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gain of some milliseconds a step never pays for a minute."""
    monkeypatch.setattr(again.Room, "took", lambda room, seconds: setattr(room.function, "seconds", 3600.0))
    trained, before = training("1TiB"), compiled()
    for _ in range(ENOUGH):
        trained.step()
    assert compiled() == before + 1


@pytest.fixture
def peaks(training: Callable[..., Recomputing]) -> tuple[int, int]:
    """Of a step in which nothing stays, and of one in which everything does and nothing is computed again."""
    tight = training(MIB)
    with pytest.warns(RuntimeWarning, match=r"memory=.* cannot be kept: a step needs "):
        least = max(tight.step() for _ in range(3))
    del tight
    loose = training("1TiB", recompute=False)
    return least, max(loose.step() for _ in range(3))


@pytest.mark.parametrize("share", [0.5, pytest.param(1.3, marks=pytest.mark.slow)])
def test_within_the_limit_before_and_behind_it(
    training: Callable[..., Recomputing], peaks: tuple[int, int], share: float
) -> None:
    least, most = peaks
    limit = int(1.1 * least + share * (most - least))
    trained, before = training(limit), compiled()
    found = [trained.step() for _ in range(ENOUGH + 4)]
    assert compiled() == before + 2
    assert max(found) <= limit


@pytest.mark.slow
def test_steps_of_other_kinds_behind_it(training: Callable[..., Recomputing], peaks: tuple[int, int]) -> None:
    """A larger batch, micro-batches, evaluation, a second model: each step is within the limit."""
    least, most = peaks
    limit = 2 * (least + most) // 3 + 8 * MIB
    trained = training(limit)
    found = [trained.step() for _ in range(ENOUGH)]
    found += [trained.step(rows=2560) for _ in range(3)]
    found += [trained.step(micro=2) for _ in range(2)]
    with torch.no_grad():
        trained.models[0][0](torch.randn(2048, 256))
    trained.models.append(trained.made())
    found += [trained.step() for _ in range(4)]
    assert max(found) <= limit


def test_what_waits_for_its_backward_when_the_plan_changes(training: Callable[..., Recomputing]) -> None:
    """The backward of the old code runs behind one of the new plan."""
    trained, before = training("1TiB"), compiled()
    x = torch.randn(2048, 256)
    (model, _), gradients = trained.models[0], []
    for _ in range(SETTLED + 1):
        trained.step()
    assert compiled() == before + 1
    old, new = model(x), model(x)
    assert compiled() == before + 2
    for loss in (new, old):
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def force(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Whenever steps are steady there is room for the next of these shares, and it is worth it."""
    rooms = iter(shares)
    monkeypatch.setattr(again, "_worth", lambda parts, room: (next(rooms, shares[-1]), 1.0, math.inf))


GIVEN: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 0, "allow_tmpfs": True}


def limited(directory: Path, **more: Any) -> Compile:
    return ours(GIVEN, dirs=[str(directory)], memory="1TiB", machine=SLOW, recompute=True, **more)


def trained(
    count: int = ENOUGH + 1, *, blocks: bool = False, lr: float = 1e-2
) -> Callable[[Compile], list[torch.Tensor]]:
    """A program (`tests/bitwise.py`): loss and gradients of every step."""

    def program(compile: Compile) -> list[torch.Tensor]:
        model, found = Blocks(compile) if blocks else Residual(256, 6), []
        forward = model if blocks else compile(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        x = torch.randn(128, 32) if blocks else torch.randn(1024, 256)
        for _ in range(count):
            loss = forward(x)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    return program


@pytest.mark.parametrize(
    ("share", "partitions"), [pytest.param(0.5, 1, marks=pytest.mark.slow), (1.0, 2)], ids=["the same", "another"]
)
def test_bitwise_across_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, partitions: int) -> None:
    force(monkeypatch, share)
    before = compiled()
    prove_bitwise(trained(), [kept(GIVEN), limited(tmp_path)])
    assert compiled() == before + 3
    assert len(ssd_fx.stats().graphs) == partitions


@pytest.mark.slow
def test_inductor_across_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels may come out, so results differ by rounding, which training would make larger."""
    force(monkeypatch, 1.0)
    plain, before = run(trained(lr=0.0), eager), compiled()
    found = run(trained(lr=0.0), limited(tmp_path, inner="inductor"))
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
    assert compiled() == before + 2


def test_blocks_share_what_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 1.0)
    before = compiled()
    prove_bitwise(trained(blocks=True), [kept(GIVEN), limited(tmp_path)])
    assert compiled() == before + 3


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"dump": True}, {}),
        ({"adapt": False}, {}),
        pytest.param({}, {"error_on_recompile": True}, marks=pytest.mark.slow),
        pytest.param({}, {"recompile_limit": 3}, marks=pytest.mark.slow),  # more than half would be used up
    ],
    ids=["dump", "adapt", "an error", "few left"],
)
def test_not_where_it_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    force(monkeypatch, 1.0)
    options = {name: value if name == "adapt" else str(tmp_path / "dump") for name, value in options.items()}
    before = compiled()
    with torch._dynamo.config.patch(settings):
        run(trained(), limited(tmp_path, **options))
    assert compiled() == before + 1


@pytest.mark.slow
def test_not_under_a_stance_that_forbids_it(
    training: Callable[..., Recomputing], monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, 1.0)
    trained, before = training("1TiB"), compiled()
    trained.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(ENOUGH):
            trained.step()
    assert compiled() == before + 1


@pytest.mark.slow
def test_twice_at_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 0.3, 0.3, 0.6, 0.9, 1.0)  # the second time there is no more room than before
    before = compiled()
    run(trained(6 * ENOUGH), limited(tmp_path))
    assert compiled() == before + 1 + again.MOST
