"""What the host needs for a launch in code that Inductor generates.

    weight.to(bfloat16)             a kernel
    mm(x, weight.t())               a library call, into memory that the code allocates; it reads a view
    relu(product + bias)            a kernel; its result is kept, as by a forward

An operator of PyTorch takes less: the code around a launch allocates, makes views and asks for the stream, and Triton's
launcher is partly Python. The tensors are so small that the device is done before the next launch comes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.calibration.round_trip import sweep
from ssd_fx.compat import inductor_config
from ssd_fx.runtime.device import streams

_LAYERS, _SIZE = 16, 64
_LAUNCHES = 3 * _LAYERS
_WARM_UP, _RUNS = 3, 9

Compiled = Callable[[list[Tensor]], object]


def launch_s(device: torch.device) -> float:
    """CPU seconds of this thread for a launch. It compiles two small kernels, which takes a second or two.

    Raises: what Inductor raises where it cannot compile for the device.
    """
    x = torch.ones((_SIZE, _SIZE), dtype=torch.bfloat16, device=device)
    layers = [torch.ones(shape, device=device) for _ in range(_LAYERS) for shape in ((_SIZE, _SIZE), (_SIZE,))]
    run, sweeps = compiled(forward, [x, *layers]), sweep()
    seconds = [_once(run, [x, *layers], device, sweeps) for _ in range(_WARM_UP + _RUNS)]
    return statistics.median(seconds[_WARM_UP:]) / _LAUNCHES


def forward(x: Tensor, *layers: Tensor) -> tuple[Tensor, ...]:
    """All that the layers yield. `layers`: weight, bias, weight, bias and so on."""
    kept = []
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        x = torch.relu(torch.mm(x, weight.to(x.dtype).t()) + bias).to(x.dtype)
        kept.append(x)
    return tuple(kept)


def compiled(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Compiled:
    """The function as Inductor's code for such inputs. No lock of Dynamo is taken: the caller may be compiling."""
    from ssd_fx.compat.inductor import compile_fx_inner, select_decomp_table

    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with inductor_config.patch({"triton.cudagraphs": False, "max_autotune": False}):
        made: Compiled = compile_fx_inner(graph, fakes)
    return made


def _once(run: Compiled, inputs: Sequence[Tensor], device: torch.device, sweeps: Callable[[], object]) -> float:
    """CPU seconds of one run, with nothing of it in the caches, and nothing on the device."""
    given, queued = list(inputs), streams.of(device)
    sweeps()
    if queued:
        queued.record(queued.current(device)).synchronize()
    started = time.thread_time()
    run(given)
    return time.thread_time() - started
