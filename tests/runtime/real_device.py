"""The accelerator of this machine, as far as tests of the store use the fake one.

That is a GPU, or the device of the package that the environment variable ACCELERATOR names. PyTorch has one that is
simulated: torch_openreg, in its sources at test/cpp_extensions/open_registration_extension. Its streams are threads,
and the host cannot read its memory. A process has one accelerator, so tests of a machine without one do not pass then:

    ACCELERATOR=torch_openreg python -m pytest tests/accelerator tests/runtime/test_runtime_streams.py
"""

from __future__ import annotations

import importlib
import os

import torch
from torch import Tensor

from tests.runtime.harness import raw

if "ACCELERATOR" in os.environ:
    importlib.import_module(os.environ["ACCELERATOR"])


def kinds() -> list[str]:
    """The type of this process's accelerator, if it has one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return [found.type] if found else []


class RealDevice:
    """What `FakeGpu` has for tests, on the current device of a type."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device(kind, torch.accelerator.current_device_index())

    def tensor(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def overwrite(self, x: Tensor, values: Tensor) -> None:
        x.copy_(values)

    def bytes_of(self, x: Tensor) -> bytes:
        """What a kernel sees that is queued now."""
        return raw(x.cpu())

    def finish(self) -> None:
        """Runs all that is queued."""
        torch.accelerator.synchronize()

    def scrub(self) -> None:
        """Runs every kernel, then writes over memory that nobody has."""
        torch.accelerator.synchronize()
        for nbytes in (1 << 10, 1 << 16, 200_000, 1 << 20):
            torch.full((nbytes,), 0xCD, dtype=torch.uint8, device=self.device)
