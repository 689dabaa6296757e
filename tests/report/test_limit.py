"""What a step is predicted to need under the option `memory`."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from ssd_fx.report.limit import Optimizers, Parts, optimizers_of

META = torch.device("meta")  # no other test has optimizers there
MIB = 1 << 20


def test_state_and_gradients_that_optimizers_have_and_will_have() -> None:
    """Momentum is one copy of what is trained, Adam's state two. What is there already is not made once more."""
    dead = weakref.proxy(nn.Identity())  # who asks it for its class gets an error
    assert optimizers_of(META) is None
    first, second = (nn.Parameter(torch.empty(MIB, device=META)) for _ in range(2))
    frozen = nn.Parameter(torch.empty(MIB, device=META), requires_grad=False)
    plain = torch.optim.SGD([first, frozen])
    assert optimizers_of(META) == Optimizers("SGD", 0, 0)
    adam = torch.optim.AdamW([second])
    assert optimizers_of(META) == Optimizers("AdamW and SGD", 8 * MIB, 0)
    wrapping = torch.optim.AdamW([second])
    assert optimizers_of(META) == Optimizers("AdamW and SGD", 8 * MIB, 0)
    del wrapping
    first.grad, second.grad = torch.empty_like(first), torch.empty_like(second)
    adam.step()
    assert optimizers_of(META) == Optimizers("AdamW and SGD", 0, 8 * MIB)
    del plain, adam
    momentum = torch.optim.SGD([first], momentum=0.9)
    assert optimizers_of(META) == Optimizers("SGD", 4 * MIB, 4 * MIB)
    del momentum, dead


def test_what_is_there_and_what_comes() -> None:
    """200 MiB are trained, and 300 are needed above the level, with 200 of new gradients."""

    def parts(there: int, optimizers: Optimizers | None) -> Parts:
        return Parts(210 * MIB, 200 * MIB, 200 * MIB, there * MIB, 300 * MIB, "", optimizers)

    unknown = parts(220, None)
    assert unknown.total_bytes == (210 + 400 + 300) * MIB
    assert str(unknown) == (
        "220 MiB that are there already, 390 MiB of the state of an optimizer such as Adam, 200 MiB of gradients, "
        "100 MiB of activations and workspaces at the peak"
    )
    assert parts(700, None).total_bytes == 1000 * MIB, "it may be the state"
    plain = parts(0, Optimizers("SGD", 0, 0))
    assert plain.total_bytes == 510 * MIB
    assert str(plain).startswith("210 MiB of parameters, buffers and inputs, 200 MiB of gradients")
    kept = parts(410, Optimizers("SGD", 200 * MIB, 200 * MIB))
    assert kept.total_bytes == (410 + 200 + 300) * MIB
    assert str(kept).startswith(
        "410 MiB that are there already (200 MiB are gradients, which stay beside new ones), 200 MiB of the state of "
        "SGD, 200 MiB of gradients"
    )
