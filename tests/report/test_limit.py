"""What a step is predicted to need under the option `memory`."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ssd_fx
from ssd_fx.compat import FakeTensorMode
from ssd_fx.report import limit
from ssd_fx.report.limit import Before, Optimizers, Parts, optimizers_here, optimizers_of
from ssd_fx.runtime.stats import Stats

MIB = 1 << 20


def parameter(grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.empty(MIB), requires_grad=grad)


def test_state_and_gradients_that_optimizers_have_and_will_have() -> None:
    """Momentum is one copy of what is trained, Adam's state two. What is there already is not made once more."""
    assert optimizers_of([]) is None
    first, second = parameter(), parameter()
    plain = torch.optim.SGD([first, parameter(grad=False)])
    assert optimizers_of([plain]) == Optimizers("SGD", 0, 0)
    assert optimizers_of([plain], torch.device("meta")) is None
    adam, scalar = torch.optim.AdamW([second]), 4
    both = Optimizers("AdamW and SGD", 8 * MIB + scalar, 0)
    assert optimizers_of([plain, adam]) == both
    assert optimizers_of([plain, adam, torch.optim.AdamW([second])]) == both, "one may wrap the other"
    first.grad, second.grad = torch.empty_like(first), torch.empty_like(second)
    adam.step()
    assert optimizers_of([plain, adam]) == Optimizers("AdamW and SGD", 0, 8 * MIB)
    momentum = torch.optim.SGD([first], momentum=0.9)
    assert optimizers_of([momentum]) == Optimizers("SGD", 4 * MIB, 4 * MIB)
    assert not momentum.state
    two = [{"params": [first], "momentum": 0.9}, {"params": [second, parameter()]}]
    assert optimizers_of([torch.optim.SGD(two)]) == Optimizers("SGD", 4 * MIB, 8 * MIB)


class Halves(torch.optim.Optimizer):
    """Keeps half a byte for each of Adam's."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["average"] = torch.zeros_like(p)


def test_other_people_s_optimizers_step_only_without_data() -> None:
    """They may launch a kernel with an address of memory that is not there."""
    (name, why), *_ = (optimizers_of([Halves([parameter()])]) or pytest.fail("none")).guessed.items()
    assert (name, why) == ("Halves", "it is none of torch's own")
    with FakeTensorMode():
        without = parameter()
    assert optimizers_of([Halves([without])]) == Optimizers("Halves", 4 * MIB, 0)
    assert optimizers_of([Halves([without])], torch.device("cpu")) is None


def test_no_hook_of_a_step_is_called() -> None:
    """Those of a library may count steps: ours does."""
    optimizer, called = torch.optim.AdamW([parameter()]), list[object]()
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    hook = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        assert optimizers_of([optimizer]) == Optimizers("AdamW", 8 * MIB + 4, 0)
    finally:
        hook.remove()
    assert not called


META = torch.device("meta")  # no other test has optimizers there


def test_the_optimizers_of_a_process() -> None:
    """One without any gets one. If it has trained, it trains with another."""
    dead = weakref.proxy(nn.Identity())  # who asks it for its class gets an error
    ssd_fx.reset_stats()
    assert optimizers_here(META) is None
    with mock.patch.object(limit, "stats", return_value=Stats(steps=2)):
        assert optimizers_here(META) == Optimizers("", 0, 0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(MIB, device=META))], momentum=0.9)
    assert optimizers_here(META) == Optimizers("SGD", 4 * MIB, 0)
    del optimizer, dead


def test_what_is_there_and_what_comes() -> None:
    """200 MiB are trained, and 300 are needed above the level, with 200 of new gradients."""

    def before(there: int, optimizers: Optimizers | None) -> Before:
        return Before(210 * MIB, 200 * MIB, there * MIB, optimizers)

    unknown = before(220, None)
    assert unknown.total_bytes == (220 + 400) * MIB
    assert str(unknown) == "220 MiB that are there already, 400 MiB of the state of an optimizer such as Adam"
    plain = before(0, Optimizers("SGD", 0, 0))
    assert plain.total_bytes == 210 * MIB
    assert str(plain) == "210 MiB of parameters, buffers and inputs"
    kept = before(410, Optimizers("SGD", 200 * MIB, 200 * MIB))
    assert kept.total_bytes == (410 + 200) * MIB
    assert str(kept) == (
        "410 MiB that are there already (200 MiB are gradients, which stay beside new ones), "
        "200 MiB of the state of SGD"
    )
    guessed = str(before(410, Optimizers("Lion and SGD", 200 * MIB, 0, {"Lion": "it is none of torch's own"})))
    assert guessed.endswith(", 200 MiB of the state of Lion and SGD (of Lion as much as of Adam)")
    said = "200 MiB of gradients, 100 MiB of activations and workspaces at the peak"
    assert str(Parts(210 * MIB, 200 * MIB, 200 * MIB, 300 * MIB, "")) == said
