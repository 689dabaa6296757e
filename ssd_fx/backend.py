"""The backend that `torch.compile` calls."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ssd_fx.config import Config
from ssd_fx.errors import user_errors
from ssd_fx.passes.partitioner import Partitioner
from ssd_fx.passes.pipeline import PlanOptions
from ssd_fx.runtime import heap
from ssd_fx.runtime.extents import check_directory

Compiled = Any  # what a backend returns: a callable; Inductor types it as whatever any of its modes yields


def backend(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile `gm` as Inductor does, with the activations that it saves for backward on disk.

    `options` are those of `ssd_fx.Config`; `mode` is one of `torch.compile`'s and goes to Inductor.

    Raises:
        ValueError: an option that is unknown or whose value is none.
        OSError: a directory that is missing, not writable, or in memory (tmpfs); the message names it.
    """
    with user_errors():
        config = Config.make(options)
        if config.inner == "aot_eager" and mode not in (None, "default"):
            raise ValueError(f"mode={mode!r} is Inductor's; inner='aot_eager' takes none")
        if config.engine != "memory":
            for directory in config.dirs:
                check_directory(directory, allow_tmpfs=config.allow_tmpfs)
        if config.dump:
            os.makedirs(config.dump, exist_ok=True)
    heap.keep_freed_memory()
    if config.inner == "aot_eager":
        return _aot_eager(gm, inputs, config)
    return _inductor(gm, inputs, config, mode)


def plan_options(config: Config, *, hand_over: bool = True) -> PlanOptions:
    """What the passes need of the options."""
    return PlanOptions(
        budget=config.budget if isinstance(config.budget, float) else 0,  # bytes are the runtime's: one budget for all
        min_bytes=config.min_bytes,
        prefetch=config.prefetch,
        machine=None,
        runtime_config=config.runtime_json(),
        hand_over=hand_over,
        dump_dir=config.dump,
    )


def _inductor(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], config: Config, mode: str | None) -> Compiled:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from ssd_fx.passes import inductor, order

    inductor.register()
    patches: dict[str, Any] = dict(list_mode_options(mode)) if mode is not None else {}
    patches["custom_partitioner_fn"] = Partitioner(plan_options(config))
    patches["_post_fusion_custom_pass"] = order.PinOrder()
    return compile_fx(gm, list(inputs), config_patches=patches)


def _aot_eager(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], config: Config) -> Compiled:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=Partitioner(plan_options(config)))
    return compiler(gm, list(inputs))
