"""flex_attention has no backward on a CPU. What its CUDA code is like with ssd_fx: tests/cuda_codegen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.compatibility import Result, record
from tests.cuda_codegen.models import Flex


def refusal(model: nn.Module, **how: Any) -> str:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="does not support backward on CPU") as raised:
        torch.compile(model, **how)(torch.randn(2, 128, 64))
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_backward_on_a_cpu_is_refused_as_stock_does(tmp_path: Path, inner: str) -> None:
    ours = {"backend": "ssd_fx", "options": {"dirs": [str(tmp_path)], "inner": inner}}
    assert refusal(Flex(), **ours) == refusal(Flex(), backend=inner)
    record(Result("ways of working", "flex_attention on a CPU", inner, reason="PyTorch has no backward of it there"))
