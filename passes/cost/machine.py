"""The rates of the machine that runs a graph: measured (`ssd_fx/calibration`), typical, or given by the user."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property

import torch

from ssd_fx.options import Tier

Rates = tuple[tuple[str, float], ...]  # pairs of a dtype's name, such as "bfloat16", and a number, mostly flops/s
HEAD_SIZES = (64, 128)  # the sizes of heads for which a machine has rates of attention
# The host's time for one of our nodes, where that was not measured: the wrapper's line, our function, waking an I/O
# thread. With PyTorch's dispatcher it was 145 us in a GPT, 172 us in a T5 (docs/decisions.md, "What a step costs beside
# its compute"). On a GPU it delays the device only if all of the host's work takes longer than the device's.
NODE_S = 150e-6
_BY_DTYPE = (
    *("flops_by_dtype", "attention_flops", "attention_backward_flops"),
    *("wide_attention_flops", "wide_attention_backward_flops"),
)
_TIMES = (  # may be 0; rates may not
    "latency_s", "node_s", "drag_s_per_byte", "kernel_s", "erf_s", "random_s", "host_latency_s", "launch_s",
    "host_node_s",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The rates from which the roofline and the schedule are computed. Plain values, as the repr is in cache keys.

    `flops`: flops per second of matrix products, for dtypes that are not in `flops_by_dtype`. `attention_flops` and
    `attention_backward_flops`: the same for fused attention with heads of 64, by dtype; other dtypes run at the rate of
    products. `wide_attention_flops`, `wide_attention_backward_flops`: the same with heads of 128; other dtypes run as
    with heads of 64. `memory_bw`: bytes per second of memory. `write_bw`, `read_bw`, `latency_s`: bytes per second of
    the directories beside compute, and the latency of one transfer. `node_s`: the host's time for one of our nodes.
    `drag_s_per_byte`: the time that the compute lane loses for a transferred byte, because the I/O uses its cores or
    its memory bandwidth. `kernel_s`: the fixed cost of a kernel. `erf_s`, `random_s`: the time of one error function,
    of one random number, in a fused kernel. `to_host_bw`, `from_host_bw`, `host_latency_s`: bytes per second and
    latency of copies between a device's own memory and pinned host memory. `launch_s`, `host_node_s`: if the device
    runs behind the host, the host's time to launch a kernel, and for one of our nodes. A CPU has `node_s` instead.
    """

    flops: float
    memory_bw: float
    write_bw: float
    read_bw: float
    latency_s: float = 1e-3
    node_s: float = 0.0
    drag_s_per_byte: float = 0.0
    flops_by_dtype: Rates = ()
    attention_flops: Rates = ()
    attention_backward_flops: Rates = ()
    kernel_s: float = 0.0
    erf_s: float = 0.0
    random_s: float = 0.0
    to_host_bw: float = 12e9  # PCIe 3.0 x16 gives 12 to 13 GB/s to pinned memory, 4.0 twice that
    from_host_bw: float = 12e9
    host_latency_s: float = 2e-5
    launch_s: float = 0.0
    host_node_s: float = 0.0
    wide_attention_flops: Rates = ()
    wide_attention_backward_flops: Rates = ()

    @staticmethod
    def default(device: torch.device, threads: int) -> Machine:
        """Typical rates: a CPU core at 50 Gflop/s; a drive at 1.5 GB/s write and 1.0 GB/s read beside compute."""
        if device.type == "cpu":
            return Machine(50e9 * threads, 5e9 * threads, 1.5e9, 1.0e9)
        return Machine(100e12, 1.5e12, 5e9, 6e9)

    def own_s(self, nbytes: int, tier: Tier = "ssd") -> float:
        """Seconds of the compute lane at either end of a transfer: for two nodes of ours, and for the drag."""
        return 2 * self.node_s + self.lanes(tier).drag_s_per_byte * nbytes

    def host_s(self, launches: int, transfers: int) -> float:
        """The host's seconds for a step, if the device runs behind the host. A transfer has four nodes."""
        return self.launch_s * launches + 4 * self.host_node_s * transfers

    def product_flops(self, dtype: torch.dtype) -> float:
        """Flops per second of a matrix product."""
        return dict(self.flops_by_dtype).get(dtype_name(dtype), self.flops)

    def fused_attention_flops(self, dtype: torch.dtype, size: float, *, backward: bool) -> float:
        """Flops per second of fused attention with heads of `size`; between the two measured sizes in proportion."""
        narrow, wide = self.attention_flops, self.wide_attention_flops
        if backward:
            narrow, wide = self.attention_backward_flops, self.wide_attention_backward_flops
        low = dict(narrow).get(dtype_name(dtype), self.product_flops(dtype))
        high = dict(wide).get(dtype_name(dtype), low)
        first, second = HEAD_SIZES
        return low + (high - low) * min(max((size - first) / (second - first), 0.0), 1.0)

    def lanes(self, tier: Tier) -> Machine:
        """The machine with the rates of a tier's lanes in the place of the drives' rates."""
        return self if tier == "ssd" else self._host

    @cached_property
    def _host(self) -> Machine:
        """The rates of copies. Copy engines move the bytes, so the compute lane loses nothing.

        The drives' bytes cross the same bus. Copies have the bandwidth that the drives leave, and half of it at least.
        """
        there = max(self.to_host_bw - self.write_bw, self.to_host_bw / 2)
        back = max(self.from_host_bw - self.read_bw, self.from_host_bw / 2)
        return replace(self, write_bw=there, read_bw=back, latency_s=self.host_latency_s, drag_s_per_byte=0.0)

    def rates(self) -> dict[str, object]:
        """All rates by name, in the form of JSON. `with_rates` takes them."""
        return {name: dict(value) if name in _BY_DTYPE else value for name, value in asdict(self).items()}

    def with_rates(self, rates: Mapping[str, object]) -> Machine:
        """A copy with the given rates.

        Raises:
            ValueError: an unknown name, or a value that is no rate; the message names it and what would be right.
        """
        return replace(self, **{name: _checked(name, value) for name, value in rates.items()})  # type: ignore[arg-type]

    def shared(self, processes: int) -> Machine:
        """The machine of one of so many processes that use the same drives at the same time."""
        return replace(self, write_bw=self.write_bw / processes, read_bw=self.read_bw / processes)

    def rounded(self, digits: int = 3) -> Machine:
        """The machine with rounded rates: digits that differ from one measurement to the next would miss caches."""
        return self.with_rates({name: _rounded(value, digits) for name, value in self.rates().items()})


_WORDS = {  # for people, in the order of printing: the name of a rate, its unit, and the factor to it from SI units
    "flops_by_dtype": ("matrix products", "GFLOP/s", 1e-9),
    "flops": ("other matrix products", "GFLOP/s", 1e-9),
    "attention_flops": ("attention", "GFLOP/s", 1e-9),
    "attention_backward_flops": ("attention, backward", "GFLOP/s", 1e-9),
    "wide_attention_flops": ("attention, heads of 128", "GFLOP/s", 1e-9),
    "wide_attention_backward_flops": ("the same, backward", "GFLOP/s", 1e-9),
    "memory_bw": ("memory", "MB/s", 1e-6),
    "kernel_s": ("smallest kernel", "us", 1e6),
    "node_s": ("node of ssd_fx, each", "us", 1e6),
    "erf_s": ("error function, each", "ns", 1e9),
    "random_s": ("random number, each", "ns", 1e9),
    "write_bw": ("drives, write", "MB/s", 1e-6),
    "read_bw": ("drives, read", "MB/s", 1e-6),
    "latency_s": ("drives, latency", "us", 1e6),
    "drag_s_per_byte": ("compute lost to transfers", "ms per GB", 1e12),
    "to_host_bw": ("copies to host memory", "MB/s", 1e-6),
    "from_host_bw": ("copies from host memory", "MB/s", 1e-6),
    "host_latency_s": ("copies, latency", "us", 1e6),
    "launch_s": ("host, launch of a kernel", "us", 1e6),
    "host_node_s": ("host, node of ssd_fx", "us", 1e6),
}


def described(rates: Mapping[str, object]) -> list[str]:
    """A line for people for each of `rates`, as `Machine.rates` has them: `drives, write    1,500 MB/s`."""
    lines = []
    for name, (words, unit, scale) in _WORDS.items():
        value = rates.get(name)
        if isinstance(value, Mapping):
            text = ", ".join(f"{dtype} {_digits(float(rate) * scale)}" for dtype, rate in sorted(value.items()))
        else:
            text = "" if value is None else _digits(float(str(value)) * scale)
        if text:
            lines.append(f"{words:26} {text} {unit}")
    return lines


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checked(name: str, value: object) -> float | Rates:
    known = [f.name for f in fields(Machine)]
    if name not in known:
        raise ValueError(f"a machine has no {name!r}; right would be any of {', '.join(known)}")
    if name not in _BY_DTYPE:
        return _number(name, value)
    if not isinstance(value, Mapping) or not all(isinstance(getattr(torch, str(t), None), torch.dtype) for t in value):
        raise ValueError(f"{name}={value!r} has no rates per dtype; right would be e.g. {{'bfloat16': 3e14}}")
    return tuple(sorted((str(dtype), _number(f"{name}[{dtype}]", rate)) for dtype, rate in value.items()))


def _number(name: str, value: object) -> float:
    least = "a number >= 0" if name in _TIMES else "a number > 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}={value!r} is no rate; right would be {least}, in seconds, bytes/s or flops/s")
    if not value and name not in _TIMES:
        raise ValueError(f"{name}={value!r} is no rate; right would be {least}, in bytes/s or flops/s")
    return float(value)


def _rounded(value: object, digits: int) -> object:
    if isinstance(value, dict):
        return {key: _rounded(rate, digits) for key, rate in value.items()}
    return float(f"{value:.{digits - 1}e}")
