"""With `memory` the plan is made once more: bitwise the same, within the limit, and with less computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import ssd_fx
from ssd_fx import again
from ssd_fx.runtime.allowance import SETTLED
from tests.bitwise import Compile, kept, ours, prove_bitwise
from tests.models import Shape, gpt
from tests.passes.recomputing import SLOW
from tests.test_memory import MIB, Layers, Trained

ENOUGH = SETTLED + 3  # steps: the first is not known before it runs, and the plan is made again behind the last


@pytest.fixture(autouse=True)
def no_budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SSD_FX_BUDGET")
    yield
    again._functions.clear()


class Recomputing(Trained):
    """On a drive so slow that the lowest peak computes most layers again."""

    more: ClassVar[dict[str, Any]] = {}

    def made(self) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
        self.options |= {"machine": SLOW, "recompute": True} | self.more
        return super().made()


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
    """Nothing is computed again any more, where everything fits; and no step is compiled after that one."""
    trained, before = training("1TiB"), compiled()
    for _ in range(SETTLED + 1):
        trained.step()
    assert compiled() == before + 1
    with caplog.at_level(logging.WARNING, "ssd_fx"):
        trained.step()
    assert "functions are compiled once more when they are called next" in caplog.text
    assert compiled() == before + 1
    (first,) = computed_again()
    assert first > 0
    ssd_fx.reset_stats()
    for _ in range(ENOUGH):
        trained.step()
    assert compiled() == before + 2
    assert computed_again()[-1] == 0


@pytest.fixture
def peaks(training: Callable[..., Recomputing]) -> tuple[int, int]:
    """Of a step in which nothing stays, and of one in which everything does and nothing is computed again."""
    tight = training(MIB)
    with pytest.warns(RuntimeWarning, match=r"memory=.* cannot be kept: a step needs "):
        least = max(tight.step() for _ in range(3))
    del tight
    loose = training("1TiB", recompute=False)
    return least, max(loose.step() for _ in range(3))


@pytest.mark.parametrize("share", [0.3, 0.7, 1.2])
def test_within_the_limit_before_and_behind_it(
    training: Callable[..., Recomputing], peaks: tuple[int, int], share: float
) -> None:
    least, most = peaks
    limit = int(1.05 * least + share * (most - least))
    trained, before = training(limit), compiled()
    found = [trained.step() for _ in range(ENOUGH + 4)]
    assert compiled() == before + 2
    assert max(found) <= limit


def test_a_batch_that_grows_behind_it(training: Callable[..., Recomputing], peaks: tuple[int, int]) -> None:
    least, most = peaks
    limit = (least + most) // 2 + 16 * MIB
    trained = training(limit)
    found = [trained.step() for _ in range(ENOUGH)]
    found += [trained.step(rows=10240) for _ in range(3)]
    found += [trained.step(micro=2) for _ in range(2)]
    with torch.no_grad():
        trained.models[0][0](torch.randn(8192, 256))
    trained.models.append(trained.made())
    found += [trained.step() for _ in range(4)]
    assert max(found) <= limit


def force(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Whenever steps are steady there is room for the next of these shares, and it is worth it."""
    rooms = iter(shares)
    monkeypatch.setattr(again, "_worth", lambda parts, room: (next(rooms, shares[-1]), 1.0))


GIVEN: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 0, "allow_tmpfs": True}


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_bitwise_across_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    force(monkeypatch, share)
    limited = ours(GIVEN, dirs=[str(tmp_path)], memory="1TiB", machine=SLOW, recompute=True)
    shape = Shape(layers=2, width=64, heads=2, seq=64, dropout=0.0)
    before = compiled()
    prove_bitwise(gpt(ENOUGH + 1, shape), [kept(GIVEN), limited])
    assert compiled() == before + 3


def test_what_waits_for_its_backward_when_the_plan_changes(training: Callable[..., Recomputing]) -> None:
    """The old forward's backward runs behind one of the new plan, twice."""
    trained, before = training("1TiB"), compiled()
    x = torch.randn(8192, 256)
    (model, _), gradients = trained.models[0], []
    for _ in range(SETTLED + 1):
        trained.step()
    old = model(x)
    assert compiled() == before + 1
    new = model(x)
    assert compiled() == before + 2
    for loss in (new, old, old):
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0], strict=True))


def steps(compile: Compile, count: int = ENOUGH) -> None:
    torch.manual_seed(0)
    gpt(count)(compile)


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
        steps(ours(GIVEN, dirs=[str(tmp_path)], memory="1TiB", machine=SLOW, recompute=True, **options))
    assert compiled() == before + 1


def test_not_under_a_stance_that_forbids_it(training: Callable[..., Recomputing]) -> None:
    trained, before = training("1TiB"), compiled()
    trained.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(ENOUGH):
            trained.step()
    assert compiled() == before + 1


def test_twice_at_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 0.3, 0.3, 0.6, 0.9, 1.0)  # the second time there is no more room than before
    before = compiled()
    steps(ours(GIVEN, dirs=[str(tmp_path)], memory="1TiB", machine=SLOW, recompute=True), 6 * ENOUGH)
    assert compiled() == before + 1 + again.MOST


def test_blocks_share_what_is_compiled_again(training: Callable[..., Recomputing]) -> None:
    """Each layer is compiled by itself, and all share one graph."""

    class Blocks(Layers):
        def __init__(self) -> None:
            super().__init__(count=3)
            for i, layer in enumerate(self.layers):
                self.layers[i] = torch.nn.Sequential(layer, torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.blocks:
                x = layer(x)
            return x.sum()

    trained, before = training("1TiB"), compiled()
    model = Blocks()
    model.blocks = [torch.compile(each, backend=ssd_fx.backend, options=trained.options) for each in model.layers]
    trained.models = [(model, torch.optim.AdamW(model.parameters(), lr=1e-3))]
    losses = [trained.losses() for _ in range(ENOUGH + 2)]
    assert compiled() == before + 2
    assert len(losses) == ENOUGH + 2
