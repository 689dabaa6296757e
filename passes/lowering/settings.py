"""The settings under which Inductor compiles a graph of ours."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config, list_mode_options

from ssd_fx.passes.lowering import compiled_autograd


def settings(gm: fx.GraphModule, inputs: Sequence[object], mode: str | None) -> dict[str, Any]:
    """Beside the passes, `pipeline.inductor_passes`. `mode` is one of `torch.compile`'s.

    It takes the annotation for CUDA graphs off `gm`.
    """
    found: dict[str, Any] = dict(list_mode_options(mode)) if mode is not None else {}
    found |= {
        # Reuse keeps a dead buffer for the next one of its size, by an estimate of the peak that knows no stores: on
        # the example GPT up to 8 of 32 MiB more than is alive. The allocators of torch, and glibc's heap, are quick to
        # reuse.
        "allow_buffer_reuse": False,
        "combo_kernels": False,  # made behind our pass, across the planned order
    }
    annotation = gm.meta.pop("cudagraph_annotation", None)  # of torch.compiler's override_cudagraphs
    if found.get("triton.cudagraphs", config.triton.cudagraphs) or getattr(annotation, "fwd", False):
        found["triton.cudagraphs"] = False
        tell_no_cuda_graphs(inputs)
    if compiled_autograd.loads(gm.graph):
        found["reorder_for_locality"] = False  # of inference only: it moves every load to the first use of its tensor
    return found


def tell_no_cuda_graphs(inputs: Sequence[object]) -> None:
    """A replayed graph takes the addresses that were free when it was recorded, whether or not what was put there since
    has been written to the drive; and to have fewer graphs, Inductor moves all releases behind all kernels."""
    if any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs):
        warnings.warn(
            "ssd_fx compiles without CUDA graphs, which know nothing of a write that is going on; "
            "mode='max-autotune-no-cudagraphs' asks for what is left of mode='max-autotune'",
            RuntimeWarning,
            stacklevel=2,
        )
