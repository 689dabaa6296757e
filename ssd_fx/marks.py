"""Marks in model code: `y = ssd_fx.keep(block(x))`."""

from __future__ import annotations

from typing import Literal

import torch
from torch.fx.traceback import annotate

from ssd_fx.passes.joint.marks import ANNOTATION, KEEP, OFFLOADS


def keep(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, and have what is saved of it for backward stay in memory, whatever the budget.

    The mark is one of the memory of `x` as it is here: it holds for whichever tensor or view of it autograd saves. It
    saves nothing that would not be saved without it; where nothing of it is (Inductor recomputes cheap operators from
    their inputs), the logger `ssd_fx` says so at level INFO. It changes neither kernels nor results. Outside of a
    graph that ssd_fx compiles it is the identity. A budget in bytes that is less than what is kept in one graph is a
    ValueError when that is compiled.

    Raises:
        ValueError: `x` is no tensor.
    """
    return _marked(x, KEEP)


def offload(x: torch.Tensor, *, tier: Literal["host", "ssd"] | None = None) -> torch.Tensor:
    """Return `x`, and have what is saved of it for backward leave memory, whatever the budget and however small it is.

    What `keep` says of the memory of `x` holds here too. Where it cannot leave, a `RuntimeWarning` says why. To mark
    the same memory both ways is a `ValueError` when the graph is compiled.

    tier: `"ssd"` is the drive. `"host"` is host memory, before all that is not marked so, as far as `host_budget` has
        room (by default it has none). None: wherever it is predicted to be better. On the CPU, whose memory is the
        host's, the tier says nothing.

    Raises:
        ValueError: `x` is no tensor, or `tier` is none.
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
