# isort: skip_file
"""The private parts of Inductor that a compilation needs: lowerings, the scheduler, the code that it writes.

They are many modules, which `import ssd_fx` does without. So nothing imports this one before a graph is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

# The compiler itself: the backend. Where the C++ compiler is: `ssd-fx doctor`.
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table

# Nodes of ours in its graph: `lowering/inductor.py`.
from torch._inductor import ir, lowering
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

# Its scheduler: `lowering/order.py`, `in_place.py`, `cpp_functions.py`.
from torch._inductor import memory
from torch._inductor.dependencies import Dep, WeakDep
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    NopKernelSchedulerNode,
)
from torch.utils._ordered_set import OrderedSet

# Its generated code: `lowering/audit.py` reads it line by line.
from torch._inductor.codegen import wrapper as lines_of
from torch._inductor.graph import GraphLowering

# Random numbers of CUDA kernels: `lowering/random_numbers.py`, `joint/recompute.py`.
from torch._inductor.codegen.triton import TritonOverrides

_LINES = (
    "CommentLine", "ExternKernelAllocLine", "FreeIfNotReusedLine", "FreeLine", "KernelCallLine", "LineContext",
    "MemoryPlanningLine", "MultiOutputLine", "ReinterpretLine", "ReuseLine", "UnbackedSymbolDefsLine", "WrapperLine",
)  # fmt: skip
if _missing := [name for name in _LINES if not hasattr(lines_of, name)]:
    raise ImportError(
        f"Inductor of torch {torch.__version__} writes its code without {_missing}, which the audit reads"
    )

has_saved_lowp_output_use: Any = getattr(lowering, "_has_saved_lowp_output_use", None)
"""Tells whether a result of a small dtype is saved and read, and so rounded. From 2.13 on; None before."""

can_use_4x_random: Any = getattr(TritonOverrides, "_can_use_4x_random", None)
"""Tells whether a kernel may draw four numbers at once. In torch 2.13 kernels of one dimension may; None before."""


def has_channels_last(module: torch.fx.GraphModule) -> bool:
    """Whether Inductor lays out the convolutions of a graph for training with their channels last."""
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def prefer_channels_last(module: torch.fx.GraphModule) -> Iterable[torch.fx.Node]:
    """The nodes of a graph for training that Inductor prefers to lay out with their channels last."""
    lowering: Any = SimpleNamespace(module=module)
    found: Iterable[torch.fx.Node] = GraphLowering.find_nodes_prefer_channels_last(lowering)
    return found


def draws_one_by_one() -> bool:
    """Whether kernels for CUDA draw every number by itself, or can be told to."""
    from torch._inductor.runtime import triton_helpers

    return hasattr(TritonOverrides, "_can_use_4x_random") or not hasattr(triton_helpers, "rand4x")
