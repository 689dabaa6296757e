"""Operators' gradients with everything on disk, by PyTorch's own samples; all of them are `make peers`.

pytest -m peers tests/peers/test_op_info.py -k "linalg"     a part of them
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from ssd_fx.passes.partitioner import Partitioner
from tests.peers.install import flip_loads
from tests.peers.op_info import Case, Program, Verdict, cases, judge, partitioner
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
)


class Flipped:
    """Our partitioner with a planted fault: loaded numbers come back with the other sign."""

    def __init__(self, ours: Partitioner) -> None:
        self._ours = ours

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = self._ours(gm, inputs, **kwargs)
        flip_loads(backward)
        return forward, backward


def verdicts(case: Case, ours: Any) -> list[Verdict]:
    return [judge(Program(case, sample), ours) for sample in case.samples()]


@pytest.mark.parametrize("name", HAZARDS)
def test_hazard(name: str, tmp_path: Path) -> None:
    found = verdicts(CASES[name], partitioner(tmp_path))
    assert [(v.stock, v.ours) for v in found] == [("", "")] * len(found)
    assert any(v.groups for v in found)


def test_planted_fault(tmp_path: Path) -> None:
    """The harness sees a wrong sign of what is loaded."""
    flipped = Flipped(partitioner(tmp_path))
    named = ("sin_-float32", "matmul-float32", "mul-complex64", "nn.functional.layer_norm-float32")
    assert all(any(v.ours for v in verdicts(CASES[name], flipped)) for name in named)


def _joined(reasons: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, reasons)))


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_every_operator(name: str, tmp_path: Path) -> None:
    ours = partitioner(tmp_path)
    found = verdicts(CASES[name], ours)
    if not found:
        pytest.skip("no sample wants a gradient")
    seen = any(v.groups for v in found) and any(v.ours for v in verdicts(CASES[name], Flipped(ours)))
    stock, wrong = _joined(v.stock for v in found), _joined(v.ours for v in found)
    record(OpRecord(name, stock, wrong, sum(v.groups for v in found), seen))
    assert not wrong
