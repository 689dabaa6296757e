"""The settings of Inductor for graphs with our nodes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ssd_fx.compat import HigherOrderOperator, list_mode_options
from ssd_fx.compat import inductor_config as config
from ssd_fx.passes.lowering import compiled_autograd


def settings(gm: fx.GraphModule, inputs: Sequence[object], mode: str | None) -> dict[str, Any]:
    """The settings, without those for passes (`pipeline.inductor_passes`). `mode` is an argument of `torch.compile`.

    Removes the annotation for CUDA graphs from `gm`.
    """
    found: dict[str, Any] = dict(list_mode_options(mode)) if mode is not None else {}
    found |= {
        # Inductor's reuse keeps a dead buffer for the next buffer of its size, and estimates the peak without our
        # stores: on the example GPT it holds up to 8 MiB more than the 32 MiB that are alive. Torch's allocators and
        # glibc's heap reuse memory quickly themselves.
        "allow_buffer_reuse": False,
        "combo_kernels": False,  # they are made after our pass, and do not respect the planned order
    }
    if _calls_graphs(gm):
        # Inductor lists by index the inputs that the backward may write over (its "donated" inputs). Inductor 2.13
        # applies these indices to the inputs of a called graph too. So a branch of `torch.cond` writes over an operand
        # that is read again. All our handles are in that list, at indices that plain Inductor would not list. And a
        # nested region may return one tensor twice, or an argument. Inductor does not know that these share memory, and
        # writes over one of them while the other is still read.
        found["inplace_buffers"] = False
    annotation = gm.meta.pop("cudagraph_annotation", None)  # set by torch.compiler's override_cudagraphs
    if found.get("triton.cudagraphs", config.triton.cudagraphs) or getattr(annotation, "fwd", False):
        found["triton.cudagraphs"] = False
        warn_no_cuda_graphs(inputs)
    if config.aten_distributed_optimizations.enable_overlap_scheduling:
        found["aten_distributed_optimizations.enable_overlap_scheduling"] = False
        warnings.warn(
            "ssd_fx compiles without Inductor's overlap scheduling, which moves every wait for a load behind the "
            "kernels that read the tensor",
            RuntimeWarning,
            stacklevel=2,
        )
    if compiled_autograd.loads(gm.graph):
        # Inductor has this pass for inference only, and compiles the graphs of compiled autograd as inference. The pass
        # would move loads to the first use of the tensor.
        found["reorder_for_locality"] = False
    return found


_INLINED = (  # the graphs that AOTAutograd makes part of the graph around them
    "autograd_function_apply", "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint",
    "wrap_with_autocast", "wrap_with_set_grad_enabled",
)  # fmt: skip


def _calls_graphs(gm: fx.GraphModule) -> bool:
    """Whether Inductor compiles graphs within `gm`: of `torch.cond`, of loops, of nested regions."""
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    called = [n for each in graphs for n in each.graph.nodes if isinstance(n.target, HigherOrderOperator)]
    return any(n.target.name() not in _INLINED and _has_graph(n) for n in called)


def _has_graph(call: fx.Node) -> bool:
    attributes = [n for n in call.all_input_nodes if n.op == "get_attr"]
    return any(isinstance(getattr(n.graph.owning_module, str(n.target), None), fx.GraphModule) for n in attributes)


def warn_no_cuda_graphs(inputs: Sequence[object]) -> None:
    """Warn that CUDA graphs are off, if an input is on a GPU.

    Hazard: a replayed graph writes to the addresses that were free when it was recorded. A write to the drive may still
    read from there. And to record fewer graphs, Inductor moves all releases after all kernels.
    """
    if any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs):
        warnings.warn(
            "ssd_fx compiles without CUDA graphs, which know nothing of a write that is going on; "
            "mode='max-autotune-no-cudagraphs' asks for what is left of mode='max-autotune'",
            RuntimeWarning,
            stacklevel=2,
        )
