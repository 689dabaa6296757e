"""Marks in model code: `y = ssd_fx.keep(block(x))`."""

from __future__ import annotations

from typing import Literal

import torch
from torch.fx.traceback import annotate

from ssd_fx.passes.joint.marks import ANNOTATION, KEEP, OFFLOADS


def keep(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, and keep in memory whatever the backward saves of it, whatever the budget.

    The mark is on the memory of `x` as it is here. It holds for every tensor or view of it that autograd saves, and
    makes autograd save nothing more. If nothing of `x` is saved (Inductor recomputes cheap operators from their
    inputs), the logger `ssd_fx` reports that at level INFO. The mark changes neither kernels nor results. Outside a
    graph that ssd_fx compiles it does nothing. A budget in bytes below what one graph keeps is a ValueError when that
    graph is compiled.

    Raises:
        ValueError: `x` is not a tensor.
    """
    return _marked(x, KEEP)


def offload(x: torch.Tensor, *, tier: Literal["host", "ssd"] | None = None) -> torch.Tensor:
    """Return `x`, and offload whatever the backward saves of it, whatever the budget and however small it is.

    The mark is on the memory of `x`, as in `keep`. If that cannot be offloaded, a `RuntimeWarning` gives the reason. It
    is a `ValueError` to mark the same memory both ways, raised when the graph is compiled.

    Args:
        x: the tensor, in code that ssd_fx compiles.
        tier: `"ssd"` is the drive. `"host"` is host memory, ahead of everything that is not marked so, as far as
            `host_budget` has room (by default it has none). None: wherever it is predicted to be better. On the CPU,
            whose memory is the host's, the tier has no effect.

    Raises:
        ValueError: `x` is not a tensor, or `tier` is unknown.
    """
    if tier not in OFFLOADS:
        raise ValueError(f"ssd_fx.offload(tier={tier!r}): right would be 'host', 'ssd' or None")
    return _marked(x, OFFLOADS[tier])


def _marked(x: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} takes a tensor, not a {type(x).__name__}")
    if not torch.compiler.is_compiling():
        return x
    with annotate({ANNOTATION: name}):
        return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return]
