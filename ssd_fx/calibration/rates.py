"""Short measurements of a device: its rates for the kernels of a training step.

Figures of compute are medians. The best of a few runs would be that of a core that had idled: products ran at 205
Gflop/s for 35 ms and at 143 from then on (Xeon at 2.5 GHz). Training never idles. The speed of shared cores changes
from second to second, so all rates are measured in turn, several times over (docs/decisions.md, "Rates of shared
cores"). Random numbers come from separate generators, so that measuring does not change what a seeded program
draws.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssd_fx.calibration import launches
from ssd_fx.calibration.timing import Clock
from ssd_fx.passes.cost.machine import HEAD_SIZES, dtype_name
from ssd_fx.passes.cost.roofline import causal_share
from ssd_fx.runtime.errors import first_line

log = logging.getLogger("ssd_fx")
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
MIB = 2**20
_NO_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
_PASSES = 5  # over all rates
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Where launches cannot be measured: the time of one in generated code, as a multiple of the time of a PyTorch operator
# in a row of equal ones. On an H200 the two were 35 us, for each of the 678 launches of a GPT of 12 layers, and 5.6 us:
# docs/results/gpu, "A step that is bound by the host".
_LAUNCH_PER_KERNEL = 6.0
# Inductor draws by Philox, one number at a time without vectors. Eager mode's CPU generator, a Mersenne twister, is as
# scalar, and needs no compiler here. CPU time of a number in one thread: 15.1 ns against 5.6 ns (Xeon at 2.5 GHz).
_PHILOX_PER_TWISTER = 2.7


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` is one of torch's several errors for a host or device without free memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class Compute:
    """Measures the rates of one device."""

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self.device, self.clock = device, clock or Clock(device)
        self.gpu = device.type != "cpu"
        self._generator = torch.Generator(device).manual_seed(0)

    def product_flops(self, dtype: torch.dtype) -> float:
        """Flops per second of the three products that a linear layer makes of its input, weight and gradient."""
        size = self._affordable(dtype)
        rows, wide = 4 * size, size
        x, grad = self._draw((rows, wide), dtype), self._draw((rows, wide), dtype)
        weight = self._draw((wide, wide), dtype)
        works: tuple[Callable[[], object], ...] = (
            lambda: torch.mm(x, weight.t()),
            lambda: torch.mm(grad, weight),
            lambda: torch.mm(grad.t(), x),
        )
        return len(works) * 2 * rows * wide * wide / sum(map(self.clock.typical, works))

    def _affordable(self, dtype: torch.dtype) -> int:
        """The size of the products; small where the type has no fast one (float16 on many CPUs: 10 Gflop/s or less)."""
        x = self._draw((256, 256), dtype)
        seconds = self.clock.typical(lambda: torch.mm(x, x))
        if self.gpu:
            return 4096
        return 512 if seconds < 2e-3 else 128

    def attention_flops(self, dtype: torch.dtype, size: int) -> tuple[float, float]:
        """Flops per second of the fused kernel's forward and backward; (0, 0) where this device has none.

        Measured in causal attention over long rows, with heads of `size`.
        """
        shape = (8, 16, 4096, size) if self.gpu else (1, 4, 1024, size)
        try:
            (_, forward), (_, backward) = self.attention(dtype, shape, causal=True)
            return forward, backward
        except (RuntimeError, NotImplementedError) as error:
            if out_of_memory(error):
                raise
            return 0.0, 0.0  # no kernel for this type on this device: products stand in

    def attention(
        self, dtype: torch.dtype, shape: tuple[int, int, int, int], causal: bool
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """For forward and for backward: seconds, and flops per second as the roofline counts them. `shape`: batch,
        heads, length and size of a head, of queries, keys and values alike.

        Raises: RuntimeError, NotImplementedError: PyTorch has no fused kernel for it on this device.
        """
        q, k, v = (self._draw(shape, dtype).requires_grad_() for _ in range(3))
        with torch.enable_grad(), sdpa_kernel(_FUSED):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            grad = torch.ones_like(out)
            with torch.no_grad():
                forward_s = self.clock.typical(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
            backward_s = self.clock.typical(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        share = causal_share(shape[2], self.device) if causal else 1.0
        flops = 4.0 * math.prod(shape) * shape[2] * share
        return (forward_s, flops / forward_s), (backward_s, 2.5 * flops / backward_s)

    def memory_bw(self) -> float:
        """Bytes per second, read and written, of the sum of two tensors that no cache holds."""
        count = (256 if self.gpu else 32) * MIB // 4
        a, b, out = (torch.ones(count, dtype=torch.float32, device=self.device) for _ in range(3))
        return 3 * 4 * count / self.clock.typical(lambda: torch.add(a, b, out=out))

    def kernel_s(self) -> float:
        """Seconds of a kernel with next to nothing to do, in a row of them."""
        x = torch.ones(65536, dtype=torch.float32, device=self.device)
        out = torch.empty_like(x)

        def row() -> None:
            for _ in range(50):
                torch.add(x, x, out=out)

        return self.clock.typical(row) / 50

    def launch_s(self, kernel_s: float) -> float:
        """Seconds of the host for a launch in generated code; guessed from `kernel_s` where Inductor cannot compile."""
        try:
            return launches.launch_s(self.device)
        except Exception as error:  # of Inductor, of Triton, of a compiler: each has its own
            if out_of_memory(error):
                raise
            log.warning("ssd_fx could not time launches in code of Inductor (%s), and guesses", first_line(error))
            return _LAUNCH_PER_KERNEL * kernel_s

    def erf_s(self) -> float:
        """Seconds of erf of an element in cache; 0 on a GPU, which hides it behind its memory."""
        if self.gpu:
            return 0.0
        x = torch.ones(MIB // 2, dtype=torch.float32)
        out = torch.empty_like(x)
        copied = self.clock.typical(lambda: out.copy_(x))
        return max(self.clock.typical(lambda: torch.erf(x, out=out)) - copied, 0.0) / x.numel()

    def random_s(self) -> float:
        """Seconds of a random number in a fused kernel; 0 on a GPU, which hides it behind its memory.

        All threads draw at once, because two hyperthreads of one core are hardly faster than one.
        """
        if self.gpu:
            return 0.0
        threads, count = torch.get_num_threads(), MIB // 2
        drawers = [(torch.Generator().manual_seed(i), torch.empty(count, dtype=torch.float32)) for i in range(threads)]

        def draw(pair: tuple[torch.Generator, torch.Tensor]) -> object:
            return torch.rand(count, generator=pair[0], out=pair[1], dtype=torch.float32)

        with ThreadPoolExecutor(threads) as pool:
            seconds = self.clock.typical(lambda: list(pool.map(draw, drawers)))
        return _PHILOX_PER_TWISTER * seconds / (threads * count)

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device, dtype=torch.float32).to(dtype)

    def rates(self) -> dict[str, object]:
        """All rates, as `Machine.with_rates` takes them."""
        with self.clock.on_idle_cores():
            passes = [(self._by_dtype(), self._single()) for _ in range(_PASSES)]
            single = _medians([each for _, each in passes])
            launch_s = self.launch_s(single["kernel_s"]) if self.gpu else 0.0
        if self.clock.idle is not None:  # by CPU time a small kernel cannot be told from starting it
            del single["kernel_s"]
        by_dtype = {name: _medians([each[name] for each, _ in passes]) for name in passes[0][0]}
        return {"flops": by_dtype["flops_by_dtype"]["float32"], "launch_s": launch_s, **by_dtype, **single}

    def _by_dtype(self) -> dict[str, dict[str, float]]:
        """The rates of products and of attention, once."""
        found = {"flops_by_dtype": {dtype_name(t): self.product_flops(t) for t in _DTYPES}}
        for size, wide in zip(HEAD_SIZES, ("", "wide_"), strict=True):
            both = {dtype_name(t): self.attention_flops(t, size) for t in _DTYPES[:2]}
            for way, name in enumerate(("attention_flops", "attention_backward_flops")):
                found[wide + name] = {t: flops[way] for t, flops in both.items() if flops[way]}
        return found

    def _single(self) -> dict[str, float]:
        """The rates that no dtype has, once."""
        found = {"kernel_s": self.kernel_s(), "memory_bw": self.memory_bw()}
        return found | {"erf_s": self.erf_s(), "random_s": self.random_s()}


def _medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure; a figure that one of the passes lacks is none."""
    names = set(figures[0]).intersection(*figures)
    return {name: statistics.median(each[name] for each in figures) for name in figures[0] if name in names}
