# isort: skip_file
"""All that this package uses of PyTorch's private modules. Who tries a new version of torch reads this folder.

The versions are those of `versions.py`. If older ones of them lack a name, a text beside it says since which version
PyTorch has it, and it has a fallback. If a new version lacks a name, the import of the package fails here. What belongs
to Inductor's lowerings and its scheduler is in `compat.inductor`, which is imported when a graph is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import fx

# The joint graph, and what AOTAutograd says of its inputs and outputs: the partitioner, `joint/`.
from functorch.compile import min_cut_rematerialization_partition
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BackwardTokenAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTInput,
    SubclassStrideAOTInput,
    TangentAOTInput,
)
from torch._functorch.compile_utils import fx_graph_cse
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state
from torch._prims_common import compute_required_storage_length
from torch.fx._lazy_graph_module import _get_graph_module_cls, _make_graph_module

# Tensors without data, and trees of tensors: `fake.py`, `script.py`, the rewrite, the runtime.
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

# Dynamo: the backend, `traced.py`, `survey.py`, errors that pass through it.
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import OptimizedModule, eval_frame
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.callback import callback_handler
from torch._dynamo.distributed import get_compile_pg
from torch._dynamo.eval_frame import innermost_fn, skip_code
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.symbolic_convert import tls
from torch._guards import CompileContext, CompileId

# Inductor's settings and custom passes. `inductor_prims` is imported because it defines operators for random numbers.
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass, inductor_prims, list_mode_options, list_options
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

# Autograd's engine: the runtime learns when a backward ends.
from torch._C import _current_graph_task_id
from torch._C._autograd import _get_current_graph_task_keep_graph

# Who holds a tensor, and how to make one over given memory: the runtime.
from torch._C import (
    DispatchKey,
    _construct_storage_from_data_pointer,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_excluded,
    _storage_Use_Count,
)

# Whether somebody watches operators, in this thread: `runtime/calls.py`.
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled

# The structured trace for `tlparse`: `report/folder.py`, the partitioner.
from torch._logging import trace_structured
from torch._logging._internal import trace_log

REGION_BUDGET: str = getattr(fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "_region_activation_memory_budget")
"""The key in a node's annotations for the budget that part of a model sets for PyTorch, which names it from 2.13 on."""

CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)
"""The class of passes of the scheduler, from 2.13 on. Before, such a pass may be any callable, and Inductor's cache
accepts subclasses of `CustomGraphPass`."""

TAKES_SEVERAL_PASSES: bool = hasattr(custom_graph_pass, "get_custom_graph_passes")
"""Whether a setting of Inductor may have several passes over graphs; older versions take one. Inductor then also tells
a pass that asks whether the graph is for inference."""


def is_lite() -> bool:
    """Whether Inductor calls operators without an annotation as they are: `mode="lite"`, from 2.12 on."""
    return bool(getattr(inductor_config, "fallback_by_default", False))


def inlined_at_most(on_cpu: bool) -> tuple[int, int]:
    """The reads and the operations of a loop beyond which Inductor writes its result to memory, instead of computing it
    in the kernels that read it. They are the user's settings, or else those for the type of device."""
    found = inductor_config
    reads, operations = found.realize_acc_reads_threshold, found.realize_opcount_threshold
    if reads is None:  # as in torch 2.13, unless the user has set it
        reads = found.realize_cpu_acc_reads_threshold if on_cpu else found._realize_acc_reads_threshold_default
    if operations is None:
        operations = found.realize_cpu_opcount_threshold if on_cpu else found._realize_opcount_threshold_default
    return reads, operations


def syncs_decisions() -> bool:
    """Whether the ranks exchange what they save, each time that a graph with a collective is partitioned."""
    return bool(getattr(functorch_config, "_sync_decision_cross_ranks", False))


def saves_packages() -> bool:
    """Whether Dynamo saves what it compiles for other processes."""
    return bool(getattr(torch._dynamo.config, "caching_precompile", False))


def current_raw_stream(device_index: int) -> int:
    """The current CUDA stream as its address. A torch without CUDA has no such function."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The hooks that autograd packs and unpacks saved tensors with now; None without any."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_within_checkpoint() -> bool:
    """Whether what is saved now is dropped by a `torch.utils.checkpoint` around it, which computes it again."""
    hooks = saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def uncalled(functions: set[Callable[..., Any]]) -> AbstractContextManager[None]:
    """Within, Dynamo leaves these functions out, and they break no graph. From 2.13 on the setting is an alias of
    `ignore_logging_functions`."""
    config = torch._dynamo.config
    patched: AbstractContextManager[None] = config.patch(ignore_logger_methods=config.ignore_logger_methods | functions)
    return patched


def layers_may_fill_caches() -> AbstractContextManager[None]:
    """Within, Dynamo traces what a checkpoint runs although it has side effects, as a layer that fills a cache."""
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    config = torch._dynamo.config
    patched: AbstractContextManager[None] = config.patch({name: True}) if hasattr(config, name) else nullcontext()
    return patched


def may_compile_again() -> bool:
    """Whether Dynamo compiles a function again where it has to, without an error, and without the other ranks."""
    stance, config = eval_frame._stance, torch._dynamo.config
    freely = stance.stance == "default" and not getattr(stance, "skip_guard_eval_unsafe", False)
    return freely and not config.error_on_recompile and get_compile_pg() is None


def compiled_entries(code: CodeType) -> int:
    """How many times Dynamo has compiled a function, as its limit counts: forgotten compilations, too."""
    return len(_debug_get_cache_entry_list(code))


def entries_allowed() -> int:
    """How many times Dynamo compiles a function before it runs it as it is."""
    return int(torch._dynamo.config.recompile_limit)


def forget_compiled(code: CodeType, compile_id: CompileId, reason: str) -> bool:
    """Makes Dynamo forget one compilation of a function, as it does where an object that is guarded has died.

    Code that runs goes on, and so do backwards that wait. The next call compiles. False if it is forgotten already.
    """
    for entry in _debug_get_cache_entry_list(code):
        if entry.compile_id == compile_id and (owner := entry.guard_manager.extra_state) is not None:
            owner.invalidate(entry, DeletedGuardManagerWrapper(reason))
            return True
    return False
