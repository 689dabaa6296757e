"""What PyTorch's CPU build must be told to write CUDA code, beside guard.cpp: for a process that does nothing else."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.scheduler
import torch._subclasses.fake_tensor
import torch.utils._triton
from torch import nn
from torch._dynamo.device_interface import CudaInterface

DEVICE = torch.device("cuda:0")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, gcnArchName="", uuid="0", total_memory=80 << 30,
    multi_processor_count=132, warp_size=32, max_threads_per_block=1024, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, clock_rate=1980000,
    memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip


class _Nowhere(contextlib.AbstractContextManager[None]):
    """Stands for `torch.cuda.device`."""

    def __init__(self, device: object) -> None: ...

    def __exit__(self, *raised: object) -> None: ...


# Attributes of torch.cuda: those that are no types are what the function of that name returns.
_ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": H100,
    "get_device_name": H100.name,
    "get_device_capability": (H100.major, H100.minor),
    "memory_allocated": 0,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "_is_in_bad_fork": False,
    "init": None,
    "_lazy_init": None,
    "set_device": None,
    "set_rng_state": None,
    "synchronize": None,
    "device": _Nowhere,
    "_DeviceGuard": _Nowhere,
}


def device() -> None:
    """One CUDA device from here on, until the process ends.

    Raises: RuntimeError where guard.cpp is not preloaded.
    """
    if torch.accelerator.current_accelerator() != torch.device("cuda"):
        raise RuntimeError("preload guard.cpp: start this with tests.cuda_codegen.process")
    os.environ.pop("LD_PRELOAD", None)  # other processes need none
    for name, value in _ANSWERS.items():
        answer = value if isinstance(value, type) else _returning(value)
        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name):  # it has the functions of torch.cuda as they were when it was imported
            setattr(CudaInterface, name, staticmethod(answer))
    torch._subclasses.fake_tensor.init_gpu_context = _returning(None)
    # The patterns of attention are traced with real tensors on the device.
    torch._inductor.fx_passes.fuse_attention._sfdp_init = _returning(None)
    # Triton is not needed, for nothing is compiled.
    torch._inductor.scheduler.has_triton = _returning(True)
    torch.utils._triton.triton_hash_with_backend = _returning("pretended")


def move(model: nn.Module) -> None:
    """Parameters and buffers become fake ones on the device; to be called under the mode of the fake tensors."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # tied ones stay tied
    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = moved.setdefault(tensor, _on_device(tensor))


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_like(tensor, device=DEVICE)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _returning(value: object) -> Any:
    return lambda *arguments, **more: value
