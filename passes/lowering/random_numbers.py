"""Random numbers that the backward draws again are those of the forward.

    forward     seeds = inductor_seeds(n);  mask = inductor_random(shape, seed) > p;  return (..., seeds)
    backward    mask = inductor_random(shape, seed) > p

From torch 2.13 on, Inductor's kernels for CUDA draw four numbers at once if they have one dimension, and else one by
one. From one seed these are different numbers (https://github.com/pytorch/pytorch/issues/198333), and the backward's
kernel may have another shape than the forward's. So if a seed goes from the forward to the backward, all kernels of
both graphs draw one by one. Each graph shows that by itself, because a compile cache may have only one of the two.
"""

from __future__ import annotations

import torch
from torch import fx

from ssd_fx.compat import inductor_config as config
from ssd_fx.compat.inductor import TritonOverrides, V, can_use_4x_random
from ssd_fx.passes.lowering.order import PinOrder

prims = torch.ops.prims
_MADE = (prims.inductor_seed.default, prims.inductor_seeds.default)
_USED = {  # where the seed is among the arguments
    prims.inductor_lookup_seed.default: 0,
    prims.inductor_random.default: 1,
    prims.inductor_randint.default: 3,
}


def register() -> None:
    """Have kernels for CUDA draw alike where a graph of ours needs it; calling it again changes nothing."""
    if can_use_4x_random is not None:
        TritonOverrides._can_use_4x_random = staticmethod(_may_draw_four_at_once)  # type: ignore[method-assign]


def _may_draw_four_at_once() -> bool:
    ours = isinstance(config._post_fusion_custom_pass, PinOrder)
    return bool(can_use_4x_random()) and not (ours and shares_seeds(V.graph.graph))


def shares_seeds(graph: fx.Graph) -> bool:
    """Whether a seed of random numbers leaves the graph, or comes from outside of it."""
    seeds = {n for n in graph.nodes if n.target in (*_MADE, prims.inductor_lookup_seed.default)}
    leave = any(user.target not in _USED for seed in seeds for user in seed.users)
    return leave or any(n.args[_USED[n.target]] not in seeds for n in graph.nodes if n.target in _USED)
