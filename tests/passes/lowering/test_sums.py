"""Inductor adds each term of a long sum when it is there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config, custom_graph_pass

import ssd_fx
from ssd_fx.compat import TAKES_SEVERAL_PASSES
from ssd_fx.passes.cost.sums import LEAST, SHORT
from tests.passes.lowered import Lowered, lower

TERMS = SHORT + 4
ROWS = LEAST // 4 // 256


def sorted_terms(x: Tensor, w: Tensor) -> Tensor:
    """Each term is a library call; the sum is read by a loop."""
    out = (x * w[0]).sort().values
    for row in w[1:]:
        out = out + (x * row).sort().values
    return out.sigmoid().sum()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, 256, requires_grad=True), torch.randn(TERMS, 256, requires_grad=True)


def most_read(lowered: Lowered) -> int:
    return max(len({dep.name for dep in n.read_writes.reads}) for n in lowered.kernels if not n.is_extern())


def test_no_kernel_waits_for_all_terms() -> None:
    plain, _ = lower(sorted_terms, *inputs())
    ours, _ = lower(sorted_terms, *inputs(), options={"budget": 1 << 40})
    assert most_read(plain) > SHORT
    assert most_read(ours) <= 4


@pytest.mark.skipif(not hasattr(config, "fallback_by_default"), reason="this torch has no lite mode")
def test_in_lite_mode_nothing_is_called_for_it() -> None:
    """There every operator is called, so ours would copy each sum."""
    for graph in lower(sorted_terms, *inputs(), options={"budget": 1 << 40}, fallback_by_default=True):
        assert "written" not in graph.code


def test_the_values_are_those_of_eager() -> None:
    (x, w), (a, b) = inputs(), inputs()
    loss = torch.compile(sorted_terms, backend=ssd_fx.backend, options={"engine": "memory", "budget": 1 << 40})(x, w)
    expected = sorted_terms(a, b)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close((x.grad, w.grad), (a.grad, b.grad))


@pytest.mark.parametrize("number", [1, 2])
def test_the_passes_of_the_user_run_as_well(number: int) -> None:
    """Inductor takes several from torch 2.12 on."""
    if number > 1 and not TAKES_SEVERAL_PASSES:
        pytest.skip("this torch takes one pass")
    seen: list[int] = []
    passes = [lambda graph, k=k: seen.append(k) for k in range(number)]
    with config.patch(post_grad_custom_pre_pass=passes if number > 1 else passes[0]):
        lower(sorted_terms, *inputs(), options={"budget": 1 << 40})
    assert seen == list(range(number)) * 2


@pytest.mark.skipif(not TAKES_SEVERAL_PASSES, reason="this torch has no passes that ask")
def test_a_pass_of_the_user_may_ask_whether_this_is_inference() -> None:
    seen: list[bool] = []

    class Asks(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            seen.append(is_inference)

        def uuid(self) -> str:
            return "asks"

    with config.patch(post_grad_custom_pre_pass=Asks()):
        lower(sorted_terms, *inputs(), options={"budget": 1 << 40})
    assert seen == [False, False]
