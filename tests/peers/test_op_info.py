"""Operators' gradients from the drive and from memory, by PyTorch's own samples; all of them are `make peers`.

pytest -m peers tests/peers/test_op_info.py -k "linalg"     a part of them
pytest -m peers tests/peers/test_op_info.py -k "bfloat16"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import fx

from ssd_fx.passes.partitioner import Partitioner
from tests.peers.install import flip_loads
from tests.peers.op_info import Program, cases, judge, partitioner
from tests.peers.results import OpRecord, record

CASES = {case.name: case for case in cases()}
# Views, in-place, several outputs, complex, lazy conjugates, random numbers, integers beside, data-dependent strides.
HAZARDS = (
    *("add_-float32", "sin_-float32", "cumprod_-float32", "mul-complex64", "conj-complex64", "view_as_complex-float32"),
    *(
        "split-float32",
        "unbind-float32",
        "expand-float32",
        "as_strided-float32",
        "transpose-float32",
        "diagonal-float32",
    ),
    *("matmul-float32", "index_put-float32", "gather-float32", "fft.rfft-float32", "linalg.svd-float32"),
    *("nn.functional.dropout-float32", "nn.functional.max_pool2d-float32", "nn.functional.layer_norm-float32"),
    *("linalg.cond-float32", "linalg.cond-float64", "sort-bfloat16", "nn.functional.layer_norm-bfloat16"),
    *("matmul-float32-dynamic", "nn.functional.layer_norm-float32-dynamic"),
    "nn.functional.scaled_dot_product_attention-float32-dynamic",  # a size is read off an input
    "nn.functional.embedding_bag-bfloat16",  # the kernel returns other sizes than the FakeTensor says
)


class Flipped:
    """Our partitioner with a planted fault: loaded numbers come back with the other sign."""

    def __init__(self, ours: Partitioner) -> None:
        self._ours = ours

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = self._ours(gm, inputs, **kwargs)
        flip_loads(backward)
        return forward, backward


def program(name: str) -> Program:
    sample = CASES[name].sample()
    if sample is None:
        pytest.skip("no sample wants a gradient")
    return Program(CASES[name], sample)


@pytest.mark.parametrize("name", HAZARDS)
def test_hazard(name: str, tmp_path: Path) -> None:
    found = judge(program(name), partitioner(tmp_path))
    assert (found.stock, found.ours) == ("", "")
    assert found.groups


@pytest.mark.parametrize(
    "name", ["sin_-float32", "matmul-float32", "mul-complex64", "nn.functional.layer_norm-float32"]
)
def test_planted_fault(name: str, tmp_path: Path) -> None:
    """The harness sees a wrong sign of what is loaded."""
    ours = partitioner(tmp_path)
    found = judge(program(name), Flipped(ours)).ours
    assert found == "read: has other bits than stock; given away: has other bits than stock"
    assert judge(program(name), ours, Flipped(ours)).seen


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_every_operator(name: str, tmp_path: Path) -> None:
    ours = partitioner(tmp_path)
    found = judge(program(name), ours, Flipped(ours))
    record(OpRecord(name, found.stock, found.ours, found.groups, found.seen))
    assert not found.ours
