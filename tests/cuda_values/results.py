"""What a process that trains CUDA code tells the test that started it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Trained:
    """One case, trained through one engine in one order of the device.

    `apart`: the largest difference from the reference, as a share of the largest value of its tensor; the reference is
    eager PyTorch, or plain Inductor's CUDA code where numbers are random (drawn one by one if ours are). `same_bits`:
    as the same code with everything kept. `stores`, `read`, `forwarded`: how many, and bytes. `kernels`, `calls`: given
    to the device, of Triton and of libraries. `error`: what ended it.
    """

    case: str
    engine: str
    order: str
    apart: float = float("inf")
    same_bits: bool = False
    stores: int = 0
    read: int = 0
    forwarded: int = 0
    kernels: int = 0
    calls: int = 0
    violations: tuple[str, ...] = ()
    error: str = ""

    def line(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(line: str) -> Trained:
        found: dict[str, Any] = json.loads(line)
        return Trained(**(found | {"violations": tuple(found["violations"])}))
