"""flex_attention: in eager kernels its tensors leave as others do; Inductor has no backward of it on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.loops.loops import Compile, Loop, assert_no_bit_changes, backward, gradients

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    """Two products around attention whose scores depend on the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        def nearer(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score - (row - column).abs() * 0.1

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y: Any = flex_attention(q, k, v, score_mod=nearer)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()  # type: ignore[no-any-return]


def trained() -> Loop:
    def loop(compile: Compile) -> list[Tensor]:
        torch.manual_seed(0)
        model = Attention()
        loss = compile(model)(torch.randn(2, 128, 32))
        backward(loss)
        return [loss.detach(), *gradients(model)]

    return loop


def test_flex_attention(tmp_path: Path) -> None:
    assert_no_bit_changes(trained(), tmp_path, section="ways of working", plain="aot_eager")


def test_the_backward_on_a_cpu_is_refused_as_by_inductor(tmp_path: Path) -> None:
    said = []
    for how in ({"backend": "inductor"}, {"backend": "ssd_fx", "options": {"dirs": [str(tmp_path)]}}):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="CPU") as raised:
            trained()(lambda model, how=how: torch.compile(model, **how))
        said.append(str(raised.value).splitlines()[0])
    assert said[0] == said[1]
