"""What the tests of training loops share: a loop run twice, with everything in memory and with everything on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ssd_fx
from ssd_fx.runtime.entries import living
from tests import bitwise, sources
from tests.bitwise import Compile, close, kept, ours, prove_bitwise, stock
from tests.compatibility import Result, Section, record
from tests.faults.toys import settle
from tests.planned_order import assert_in_planned_order

Loop = Callable[[Compile], list[Tensor]]  # a program (tests/bitwise.py) that trains a model of its own

WIDTH, WIDE, BATCH = 32, 64, 64
ACTIVATION_BYTES = BATCH * WIDTH * 4

# Every compilation of a loop is its own, so with EVERY_SOURCE=1 it runs from those that differ most.
SOURCES = ("read_ahead", "given_away", "copied", "host_tier_moved_on", "decoded")


class Net(nn.Module):
    """norm -> up -> gelu -> dropout -> down, with a way around, `blocks` times; then the mean square."""

    def __init__(self, blocks: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDE, WIDTH)
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def batch(seed: int, size: int = BATCH) -> Tensor:
    """The inputs of one micro-batch, float32 [size, WIDTH]."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(loss: Tensor) -> None:
    """Once all that was stored is on disk, so that the backward reads it from there."""
    settle()
    loss.backward()


def seen_in_steps(model: nn.Module, loss: Callable[[int], Tensor], count: int = 2) -> list[Tensor]:
    """Losses and gradients of so many steps. Each draws from a seed of its own."""
    seen = []
    for step in range(count):
        torch.manual_seed(step)
        found = loss(step)
        backward(found)
        seen += [found.detach(), *gradients(model)]
        del found
        model.zero_grad()
    return seen


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def on_disk(directory: Path, inner: str = "aot_eager", **more: Any) -> dict[str, Any]:
    """Options with which everything that can leave leaves; `more` says otherwise."""
    return {"dirs": [str(directory)], "inner": inner, "budget": 0, "min_bytes": 0} | more


def run(loop: Loop, directory: Path, inner: str = "aot_eager", **more: Any) -> list[Tensor]:
    """What `loop` returns with everything on disk."""
    return bitwise.run(loop, ours(on_disk(directory, inner, **more)))


def assert_no_bit_changes(
    loop: Loop,
    directory: Path,
    inner: str = "aot_eager",
    *,
    apart: float = 1e-3,
    section: Section = "training loops",
    plain: str = "",
    share: float = 0.9,
    parts: bool = False,
    **more: Any,
) -> ssd_fx.Stats:
    """What `loop` returns is the same with everything kept; the counters are those of the run with all on disk. It is
    also that of the backend `plain`, but for `apart`: under Inductor of plain Inductor. At least `share` of what is
    saved leaves. `parts`: of some storages a part is written, as the rest is not read."""
    options = on_disk(directory, inner, **more)
    plain = plain or ("inductor" if inner == "inductor" else "")
    expected = bitwise.run(loop, stock(plain)) if plain else []
    found = prove_bitwise(loop, [kept(options), ours(options)])
    assert not plain or [i for i, pair in enumerate(zip(found, expected, strict=True)) if not close(*pair, apart)] == []
    assert living() == []
    stats = ssd_fx.stats()
    record(Result(section, current_test(), inner, stats.saved_bytes, stats.written_bytes))
    assert stats.offloaded_bytes >= share * stats.saved_bytes > 0
    moved = stats.written_bytes + stats.held_bytes + stats.cancelled_bytes
    assert moved == stats.offloaded_bytes or (parts and share * stats.offloaded_bytes <= moved < stats.offloaded_bytes)
    if os.environ.get("EVERY_SOURCE"):  # make loops EVERY_SOURCE=1
        options = sources.OPTIONS | {**more, "inner": inner}
        for name in SOURCES:
            prove_bitwise(loop, [kept(options), ours(options)], [sources.SOURCES[name]])
    return stats


def current_test() -> str:
    """`tests/loops/test_precision.py::test_autocast[bf16] (call)` -> `precision: autocast [bf16]`."""
    path, _, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
    return f"{Path(path).stem[5:]}: {test[5:].replace('[', ' [')}".replace("_", " ")


def assert_all_read_back(stats: ssd_fx.Stats) -> None:
    """Of a loop that settles before every backward: what leaves is written and read, but for leaves, which stay."""
    assert 0 < stats.read_bytes == stats.written_bytes == stats.offloaded_bytes - stats.held_bytes
    assert stats.loads == stats.stores
    assert_in_planned_order()
