"""With `memory` the plan is made once more: bitwise the same, within the limit, and with less computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import ssd_fx
from ssd_fx import again
from ssd_fx.runtime.allowance import SETTLED
from tests.bitwise import Compile, kept, ours, prove_bitwise, run
from tests.passes.recomputing import SLOW
from tests.test_memory import MIB, Trained

ENOUGH = SETTLED + 3  # steps: the first is not known before it runs, and the plan is made again behind the last


@pytest.fixture(autouse=True)
def no_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SSD_FX_BUDGET")
    yield
    again._functions.clear()


class Blocks(nn.Module):
    """Each is compiled by itself, and all share one graph. On a slow drive each computes again what is within it."""

    def __init__(self, compile: Compile, width: int = 256, count: int = 3) -> None:
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
    """Steps of blocks with tensors of 2 MiB."""

    more: ClassVar[dict[str, Any]] = {}

    def made(self) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
        self.options |= {"machine": SLOW, "recompute": True} | self.more
        model = Blocks(self.compile)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compile(self, block: nn.Module) -> Callable[..., torch.Tensor]:
        made: Callable[..., torch.Tensor] = torch.compile(
            block, backend=ssd_fx.backend, options=self.options, dynamic=False
        )
        return made

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


@pytest.fixture
def peaks(training: Callable[..., Recomputing]) -> tuple[int, int]:
    """Of a step in which nothing stays, and of one in which everything does and nothing is computed again."""
    tight = training(MIB)
    with pytest.warns(RuntimeWarning, match=r"memory=.* cannot be kept: a step needs "):
        least = max(tight.step() for _ in range(3))
    del tight
    loose = training("1TiB", recompute=False)
    return least, max(loose.step() for _ in range(3))


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


def force(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Whenever steps are steady there is room for the next of these shares, and it is worth it."""
    rooms = iter(shares)
    monkeypatch.setattr(again, "_worth", lambda parts, room: (next(rooms, shares[-1]), 1.0))


GIVEN: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 0, "allow_tmpfs": True}


def limited(directory: Path, **more: Any) -> Compile:
    return ours(GIVEN, dirs=[str(directory)], memory="1TiB", machine=SLOW, recompute=True, **more)


def trained(count: int = ENOUGH + 1) -> Callable[[Compile], list[torch.Tensor]]:
    """A program (`tests/bitwise.py`): loss and gradients of every step of small blocks."""

    def program(compile: Compile) -> list[torch.Tensor]:
        model, found = Blocks(compile, width=32), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        x = torch.randn(128, 32)
        for _ in range(count):
            loss = model(x)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        return found

    return program


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_bitwise_across_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    force(monkeypatch, share)
    before = compiled()
    prove_bitwise(trained(), [kept(GIVEN), limited(tmp_path)])
    assert compiled() == before + 3


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"dump": True}, {}),
        ({"adapt": False}, {}),
        ({}, {"error_on_recompile": True}),
        ({}, {"recompile_limit": 3}),  # more than half would be used up
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


def test_twice_at_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 0.3, 0.3, 0.6, 0.9, 1.0)  # the second time there is no more room than before
    before = compiled()
    run(trained(6 * ENOUGH), limited(tmp_path))
    assert compiled() == before + 1 + again.MOST
