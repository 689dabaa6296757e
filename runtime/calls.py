"""The operators as plain functions: what the Python code calls that Inductor generates.

PyTorch's dispatcher turns each argument into a C++ value and back. An operator whose kernel is Python needs nothing
else of it, unless somebody watches. Then the operator itself is called. These watch: a dispatch mode, a mode of torch
functions such as a default device, a class with `__torch_function__`, the profiler of this thread. Profilers of all
threads do not see the functions. `benchmarks/host_time.py --dispatched` measures the operators instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import has_torch_function

from ssd_fx.compat import _len_torch_dispatch_stack, _profiler_enabled
from ssd_fx.runtime.ops import KERNELS


def _of(name: str) -> Callable[..., Any]:
    operator, kernel = getattr(torch.ops.ssd_fx, name).default, KERNELS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if _len_torch_dispatch_stack() or has_torch_function(args) or _profiler_enabled():
            return operator(*args, **kwargs)
        return kernel(*args, **kwargs)

    return call


begin_ = _of("begin_")
store = _of("store")
stand_in = _of("stand_in")
refuse_stand_ins = _of("refuse_stand_ins")
wait_store_ = _of("wait_store_")
load = _of("load")
wait_load_ = _of("wait_load_")
