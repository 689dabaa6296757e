"""The backend that `torch.compile` calls."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx

from ssd_fx import again, patterns, progress, traced
from ssd_fx.calibration import calibrate
from ssd_fx.compat import (
    inductor_config,
    innermost_fn,
    is_within_checkpoint,
    list_mode_options,
    registry,
    saves_packages,
)
from ssd_fx.config import Config
from ssd_fx.options import PLAN
from ssd_fx.passes.cost.machine import Machine, Rates, dtype_name
from ssd_fx.passes.lowering import compiled_autograd
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partitioner import Partitioner, Rewritten, Survey, hooks_are_compiled_in
from ssd_fx.passes.pipeline import inductor_passes
from ssd_fx.passes.user_errors import user_errors
from ssd_fx.report import folder, limit
from ssd_fx.report.describe import about
from ssd_fx.report.dump import Explanation, dump
from ssd_fx.runtime import graphs, stats
from ssd_fx.runtime.codec import is_lossy, shrinks
from ssd_fx.runtime.config import parse, quoted
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.engines.registry import check_engine
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.memory.libraries import LIBRARIES
from ssd_fx.source import source_digest

log = logging.getLogger("ssd_fx")
NAME = "ssd_fx"  # of the entry point
Report = Callable[[Explanation], None]
"""Gets the dump of a graph."""
NO_BACKWARD = (
    "the model has no backward; right would be one whose parameters or inputs require a gradient, and whose outputs "
    "depend on them, outside torch.no_grad()"
)


within_ours = threading.local()
"""`now` is true while a function runs that `ssd_fx.checkpoint` was given."""


class NoBackward(ValueError):
    """A graph has no backward, and a survey wants one."""


Compiled = Any  # a callable; Inductor types it as whatever any of its modes yields


def backend(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Return `gm` compiled as by Inductor, with the activations that it saves for the backward on disk.

    `torch.compile` calls it, with the graph and the example inputs that Dynamo found::

        model = torch.compile(model, backend=ssd_fx.backend, options={"dirs": ["/mnt/nvme"], "budget": "2GiB"})

    Args:
        gm: the graph of the forward.
        inputs: its example inputs.
        options: those of `ssd_fx.Config`.
        mode: one of `torch.compile`'s, which goes to Inductor.

    Raises:
        ValueError: an unknown option, a bad value, or an engine that this machine lacks.
        OSError: a directory that is missing, not writable, or in memory (tmpfs); the message names it.
    """
    return compile_graph(gm, inputs, options=options, mode=mode)


def _register() -> None:
    """Register `backend` with Dynamo by its name, if nobody has used the name yet.

    After a compilation Dynamo drops its weak references to parameters, but only if the backend is registered, or a
    function of a registered name. These references would forbid `torch.utils.swap_tensors`, with which `Module.to`
    replaces some parameters. Importing this package must not register the backend: Dynamo imports it to look the name
    up, and registers the backend itself.
    """
    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=NAME)


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    report: Report | None = None,
    survey: Survey | None = None,
) -> Compiled:
    """Return what `backend` returns. `report` gets the dump of every graph, instead of the option `dump`.

    `survey` gets the first joint graph, and nothing is compiled; without a backward it is a ValueError. `report` and
    `survey` are pickled with the partitioner, so each must be a function of a module.
    """
    began = time.perf_counter()
    with user_errors():
        config = check_options(options, mode=mode)
        _register()
        _keep_out_of_packages()
        if config.cpu_allocator and _trains(inputs) and device_of(inputs).type == "cpu":
            LIBRARIES.watch()
            CPU_ALLOCATOR.install()  # ahead of the plan: the machine is measured with the memory that it will use
        plan = _with_modules(plan_options(config, device_of(inputs)), gm)
        only_told = survey is not None or report is not None or bool(config.dump)
        adapts = bool(config.memory) and config.adapt and not only_told and _trains(inputs)
        room = again.planned(config.runtime_json()) if adapts else again.Room()
        plan = replace(plan, room=room.share)
        arguments, whole = traced.arguments(gm), _keeps_all(gm)
        tells = partial(about, arguments, traced.function())
        if config.memory:
            tells = partial(limit.told, config.memory, config.ranks.count, device_of(inputs), tells)
        partitioner = Partitioner(
            plan,
            keeps_all=bool(whole) or is_within_checkpoint(),
            log=partial(folder.tell, arguments),
            during=progress.planning,
            survey=survey,
            about=tells,
            lasting=traced.lasting(gm),
        )
        dumps_to = "" if report else config.own_dump
        if dumps_to:
            os.makedirs(dumps_to, exist_ok=True)
            report = partial(folder.write, dumps_to, config.share())
        if report is not None:
            partitioner = replace(partitioner, report=partial(_reported, report, arguments))
    if config.share():
        log.info("%s", config.share())
    eager = config.inner == "aot_eager"
    compiled = _aot_eager(gm, inputs, partitioner) if eager else _inductor(gm, inputs, partitioner, mode, dumps_to)
    room.took(time.perf_counter() - began)
    stats.compiled(whole)
    stats.rated(config.own_drive_tbw)
    graphs.uses(innermost_fn(compiled), config.runtime_json())
    return compiled


def check_options(options: Mapping[str, Any] | None = None, *, mode: str | None = None) -> Config:
    """Return all options as they would be in force, those in the environment included.

    `backend` checks the same when a model first runs. Two errors need a graph and are not found here: a pattern of
    `keep` or `offload` that names no module, and a budget in bytes that is too small. Nothing is made: the directory
    of `dump` may be missing.

    Raises:
        ValueError: an unknown option, a bad value, or an engine that this machine lacks.
        OSError: a directory that is missing, not writable, or in memory (tmpfs), or a `dump` that cannot be made; the
            message names it.
    """
    config = Config.make(options)
    if config.inner == "inductor" and inductor_config.custom_partitioner_fn is not None:
        raise ValueError("torch._inductor.config.custom_partitioner_fn is set, and ssd_fx is a partitioner; unset it")
    if config.inner == "aot_eager" and mode not in (None, "default"):
        raise ValueError(f"mode={mode!r} is Inductor's; inner='aot_eager' takes none")
    if mode is not None and mode not in list_mode_options():
        modes = ", ".join(map(repr, list_mode_options()))
        raise ValueError(f"mode={mode!r} is none of Inductor's; right would be one of {modes}")
    try:
        check_engine(config.engine)
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    if config.engine != "memory":
        for directory in config.dirs:
            check_directory(directory, allow_tmpfs=config.allow_tmpfs)
    if config.dump:
        _check_dump(config.own_dump)
    return config


def _keep_out_of_packages() -> None:
    """Let `torch._dynamo.config.caching_precompile` save nothing of the function that Dynamo compiles now.

    Its key has neither the backend nor its options. Another process would train with this one's options, without a
    word.
    """
    translator = traced.translator()
    if translator is not None and saves_packages():
        translator.output.bypass_package("the options of ssd_fx are not in the key of a package")


def _keeps_all(gm: fx.GraphModule) -> str:
    """Why all tensors of the graph compiled now must stay in memory, with a warning; empty if they need not.

    Empty too within `ssd_fx.checkpoint`: it takes what the checkpoint saves to the drive itself, so no warning is due.

    * The graph computes on several streams. Transfers follow the current one, and Inductor runs the kernel that makes a
      tensor, or reads it, on another. Or it waits for another stream, and the store of an input would stand before the
      wait for the kernel that makes the input.
    * Autograd's saved tensors are in somebody else's hands. A checkpoint drops them, and recomputes them right before
      they are needed. Its second forward may be another graph (for dynamic sizes). That one's saved tensors then go to
      the backward of the first graph, which can take plain tensors only.
    """
    if is_within_checkpoint():
        if getattr(within_ours, "now", False):
            return ""
        reason = (
            "it is compiled within torch.utils.checkpoint, which computes again what is saved; ssd_fx.checkpoint "
            "in its place takes its inputs to the drive"
        )
    elif hooks_are_compiled_in():
        reason = "torch.autograd.graph.saved_tensors_hooks are compiled into it"
    elif any(map(_names_a_stream, traced.nodes(gm))):
        reason = "it computes on several streams or waits for one, and transfers would follow only one"
    else:
        return ""
    warnings.warn(f"ssd_fx keeps all tensors of a graph in memory: {reason}", RuntimeWarning, stacklevel=2)
    return reason


def _names_a_stream(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph is within `torch.cuda.stream(...)`, or an operation of streams and events."""
    return "stream" in (node.meta.get("custom") or ()) or str(node.target).startswith("streams.")


def _check_dump(directory: str) -> None:
    """Check that files can be made in `directory`, or in the one that it would be made in.

    Raises:
        OSError: it cannot be made or written to; the message names it.
    """
    there = directory
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, directory) from None


def _reported(report: Report, arguments: Sequence[str], made: Rewritten) -> None:
    found = dump(made.partition, made.plan, made.names, arguments, made.stages.found)
    report(replace(found, about=made.about))


def plan_options(config: Config, device: torch.device) -> PlanOptions:
    """The options of plans for graphs on `device`, without what only a graph tells (`_with_modules`)."""
    return PlanOptions(
        **config.view(PLAN),
        version=source_digest(),
        rates=machine_of(config, device),
        source=_source_of_rates(config, device),
        runtime_config=config.runtime_json(),
        chosen=config.digest(),
        shrinks=_shrinks(config),
        lossy=any(is_lossy(codec, torch.float32) for _, codec in config.compression),
    )


def _shrinks(config: Config) -> Rates:
    """By dtype, the share of its bytes that compression for the drives leaves of a tensor, where it is known before."""
    codec = dict(config.compression).get("ssd")
    return tuple((dtype_name(dtype), share) for dtype, share in shrinks(codec).items()) if codec else ()


def _with_modules(options: PlanOptions, gm: fx.GraphModule) -> PlanOptions:
    """`options` with the marks and module names that only the Dynamo graph and its frame know.

    Raises:
        ValueError: a pattern of `keep` or `offload` that names no module.
    """
    roots = traced.roots(gm)
    named = (*options.keep, *options.offload)
    patterns.check(named, gm, roots)
    digest = traced.annotation_digest(gm, names=bool(named) or options.policy is not None)
    return replace(options, roots=tuple(roots), annotations=digest)


def machine_of(config: Config, device: torch.device) -> Machine:
    """The rates to plan for, by the option `machine`; the first call on a machine may measure for some seconds.

    Rates of the drives are those of one process alone. A rank plans with its share.
    """
    if config.machine == "auto":
        return calibrate.calibrated(parse(config.runtime_json()), device).shared(config.sharing())
    machine = Machine.default(device, torch.get_num_threads())
    if config.machine != "default":
        machine = machine.with_rates(json.loads(config.machine))
    return machine.shared(config.sharing())


def _source_of_rates(config: Config, device: torch.device) -> str:
    """Where the rates come from that `machine_of` has returned before: a word or two to put before "rates"."""
    if config.machine != "auto":
        return "typical" if config.machine == "default" else "given"
    missing = calibrate.unmeasured(parse(config.runtime_json()), device)
    return f"typical {' and '.join(missing)}" if missing else "measured"


def device_of(inputs: Sequence[object]) -> torch.device:
    """The device that a graph with these inputs computes on: the first that is not the CPU, else the CPU."""
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _trains(inputs: Sequence[object]) -> bool:
    """Whether a graph with these inputs has a backward."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _inductor(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], partitioner: Partitioner, mode: str | None, dumps_to: str
) -> Compiled:
    from ssd_fx.compat.inductor import compile_fx, compile_fx_inner
    from ssd_fx.passes.lowering import inductor
    from ssd_fx.passes.lowering.settings import settings

    inductor.register()
    if inductor_config.cpp_wrapper:
        partitioner = _for_cpp(partitioner)
    patches = settings(gm, inputs, mode) | inductor_passes(partitioner, source_digest())
    inner = compile_fx_inner if partitioner.survey is None else _no_backward
    if dumps_to:
        inner = partial(folder.with_code, dumps_to, inner)
    return compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)


def _no_backward(*_: object, **__: object) -> NoReturn:
    """Stands in for Inductor's compiler where a survey has not ended the compilation."""
    with user_errors():
        raise NoBackward(NO_BACKWARD)


def _for_cpp(partitioner: Partitioner) -> Partitioner:
    """The partitioner for Inductor's C++ wrapper, which escapes no strings and frees buffers itself; warns.

    No release can hand its buffer over there, so every release waits for its write.
    """
    warnings.warn(
        "torch._inductor.config.cpp_wrapper is on: every release of ssd_fx waits until its tensor is written, because "
        "Inductor's C++ code cannot give it away before; without it the step goes on meanwhile",
        RuntimeWarning,
        stacklevel=2,
    )
    options = partitioner.options
    return replace(partitioner, options=replace(options, runtime_config=quoted(options.runtime_config)))


def _aot_eager(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], partitioner: Partitioner) -> Compiled:
    from ssd_fx.compat import aot_autograd, boxed_nop

    def inference(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
        if partitioner.survey is not None:
            _no_backward()
        compiled_autograd.wait_in_place(gm.graph)
        gm.recompile()
        return boxed_nop(gm, list(inputs))

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        inference_compiler=inference,
        partition_fn=partitioner,
        keep_inference_input_mutations=True,  # as stock; behind the graph, a checkpoint's second run would miss them
    )
    return compiler(gm, list(inputs))
