"""Optimizers that keep less than AdamW does. GaLore is in tests/loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.bitwise import Compile
from tests.loops.loops import Net, assert_no_bit_changes, backward, batch, parameters
from tests.ways.ways import installed

pytestmark = pytest.mark.slow


def apollo(model: nn.Module) -> Any:
    library = installed("apollo_torch")
    how = {"rank": 4, "proj": "random", "scale_type": "channel", "scale": 1.0, "update_proj_gap": 200}
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": [p for p in model.parameters() if p.ndim != 2]}]
    return library.APOLLOAdamW([*groups, {"params": matrices, "proj_type": "std", **how}], lr=1e-2)


def adamw8bit(model: nn.Module) -> Any:
    return installed("torchao.optim").AdamW8bit(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("optimizer", [apollo, adamw8bit], ids=["APOLLO", "AdamW of 8 bits"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_three_steps(tmp_path: Path, inner: str, optimizer: Any) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        model = Net()
        stepping, compiled, seen = optimizer(model), compile(model), []
        for step in range(3):
            loss = compiled(batch(step))
            backward(loss)
            seen.append(loss.detach())
            stepping.step()
            stepping.zero_grad()
        return seen + parameters(model)

    # The first steps go by the signs of gradients, so what plain Inductor rounds otherwise shows in the parameters.
    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", apart=0.05, plain=inner)
