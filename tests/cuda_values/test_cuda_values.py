"""Steps of CUDA code, every transfer as late as CUDA permits: right values, and planted faults are found."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.cuda_values.cases import AGAIN, CASES
from tests.cuda_values.engines import ENGINES, SETTLED
from tests.cuda_values.plants import PLANTS
from tests.cuda_values.process import trained
from tests.cuda_values.results import Trained
from tests.runtime.fake_gpu import ORDERS

FAST = ("shared_view",)
LARGE = ("MLP", "conv net", "GPT", "GPT with dropout", "drawn again")
TOYS = tuple(case for case in CASES if case not in (*FAST, *LARGE))
APART = {"half_precision": 2e-2}  # bfloat16 has 8 bits, and eager rounds after every operator
pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install .[cuda-interpreter]"),
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason="pretends a device to torch 2.13; others ask for other things"
    ),
]


class Found:
    """What was trained, each group of cases by one process, when the first test asks for one of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[Trained]] = {}

    def __call__(self, case: str, engine: str) -> list[Trained]:
        if (case, engine) not in self._found:
            if case in TOYS:
                self._found |= trained(TOYS, ENGINES, ORDERS)
            else:
                self._found |= trained([case], ENGINES, ORDERS[:3], steps=2)
        return self._found[case, engine]


@pytest.fixture(scope="module")
def found() -> Found:
    return Found()


def cases(*left_out: str) -> list[Any]:
    slow = (case for case in (*TOYS, *LARGE) if case not in left_out)
    return [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in slow)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", cases())
def test_steps_in_every_order(found: Found, case: str, engine: str) -> None:
    """As the same code with everything kept, to the bit; and nothing accessed memory that it had no right to."""
    for step in found(case, engine):
        assert not step.error, step
        assert not step.violations, step
        assert step.same_bits, step
        assert step.stores > 0, step
        assert step.kernels > 0, step


@pytest.mark.parametrize("case", cases())
def test_close_to_eager(found: Found, case: str) -> None:
    """Losses, gradients, and what the steps make of parameters and buffers."""
    (kept,) = found(case, "kept")
    assert not kept.error, kept
    assert kept.apart < APART.get(case, 1e-4), kept


@pytest.mark.parametrize("case", cases(*AGAIN))
def test_what_is_stored_is_read_again(found: Found, case: str) -> None:
    """What is forwarded never left, and would show nothing. Inputs that require grad are, for their owner has them."""
    for engine in SETTLED:
        assert all(0 < step.read >= step.forwarded for step in found(case, engine)), found(case, engine)
    assert all(step.read == 0 for step in found(case, "kept"))


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str) -> None:
    """In some order, through every engine; and the code with everything kept does not have it."""
    steps = trained(["MLP"], ENGINES, ORDERS[:3], steps=2, plant=plant)
    (kept,) = steps.pop(("MLP", "kept"))
    assert kept.apart < 1e-4
    assert set(steps) == {("MLP", engine) for engine in ENGINES}
    for of_engine in steps.values():
        assert any(step.error or step.violations or not step.same_bits for step in of_engine), of_engine
