"""Known GPUs and drives, which `ssd-fx fit --machine` plans for. docs/projection.md, "7. Presets", has the sources."""

from __future__ import annotations

from dataclasses import dataclass

_LEAST, _MOST = 1e-9, 1e9  # drives that a GPU may have; far beyond, products and quotients are no floats


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU.

    peak_tflops: of dense products in 16 bits. memory_gbps: 10^9 bytes a second of its memory. link_gbps: of its PCIe,
    each way.
    """

    name: str
    peak_tflops: float
    memory_gib: float
    memory_gbps: float
    link_gbps: float


@dataclass(frozen=True, kw_only=True)
class Drive:
    """One drive: 10^9 bytes a second, and 10^12 bytes of room. tbw: its rated endurance, in 10^12 bytes."""

    name: str
    write_gbps: float
    read_gbps: float
    capacity_tb: float
    tbw: float


@dataclass(frozen=True, kw_only=True)
class Drives:
    """The drives of one GPU: `count` of a kind, striped. Four drives of a node of eight GPUs are 0.5.

    link_gbps: what passes between them and the GPU, 10^9 bytes a second each way.

    Raises:
        ValueError: no possible count.
    """

    drive: Drive
    count: float
    link_gbps: float

    def __post_init__(self) -> None:
        if not _LEAST <= self.count <= _MOST:
            right = f"a number of drives per GPU above 0, from {_LEAST:g} to {_MOST:g}"
            raise ValueError(f"drives={self.count:g} is not possible; right would be {right}")

    @property
    def write_bytes_s(self) -> float:
        return min(self.count * self.drive.write_gbps, self.link_gbps) * 1e9

    @property
    def read_bytes_s(self) -> float:
        return min(self.count * self.drive.read_gbps, self.link_gbps) * 1e9

    @property
    def rated_tb(self) -> float:
        """The bytes that all drives together are rated to be written, in 10^12."""
        return self.count * self.drive.tbw


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU and its drives."""

    device: Device
    drives: Drives

    def rates(self) -> dict[str, float]:
        """The rates to plan with (the option `machine`) for a GPU that is not here. It computes in 16 bits, and shares
        its drives with nobody."""
        return {
            "flops": _MEASURED_FLOPS * self.device.peak_tflops * 1e12,
            "memory_bw": _MEASURED_MEMORY * self.device.memory_gbps * 1e9,
            "write_bw": self.drives.write_bytes_s,
            "read_bw": self.drives.read_bytes_s,
            "latency_s": _LATENCY_S,
        }


_MEASURED_FLOPS, _MEASURED_MEMORY = 0.65, 0.85  # of their peaks, by `ssd-fx calibrate` on an H200: docs/results/gpu
_LATENCY_S = 1e-4  # of a transfer
_PCIE_4, _PCIE_5 = 31.5, 63.0  # GB/s each way of 16 lanes: 16 and 32 GT/s, of which 128 of 130 bits are data

DRIVES = {
    name: Drive(name=name, capacity_tb=terabytes, write_gbps=write, read_gbps=read, tbw=tbw)
    for name, terabytes, write, read, tbw in (
        ("samsung-980-pro-1tb", 1.0, 5.0, 7.0, 600),
        ("samsung-pm9d3a-7.68tb-u2", 7.68, 6.8, 12.0, 14016),
        ("micron-9550-max-6.4tb-u2", 6.4, 10.0, 14.0, 35040),
        ("micron-9550-pro-7.68tb-e1s", 7.68, 10.0, 14.0, 14016),
        ("samsung-990-pro-2tb", 2.0, 6.9, 7.45, 1200),
        ("samsung-9100-pro-2tb", 2.0, 13.4, 14.7, 1200),
        ("samsung-9100-pro-4tb", 4.0, 13.4, 14.7, 2400),
        ("wd-black-sn850x-2tb", 2.0, 6.6, 7.3, 1200),
        ("crucial-t700-2tb", 2.0, 11.8, 12.4, 1200),
        ("crucial-t700-4tb", 4.0, 11.8, 12.4, 2400),
        ("crucial-t705-2tb", 2.0, 12.7, 14.5, 1200),
        ("samsung-pm1753-7.68tb-u2", 7.68, 10.0, 14.5, 14016),
        ("intel-d7-p5500-7.68tb-u2", 7.68, 4.3, 7.0, 14016),
        ("intel-d7-p5600-6.4tb-u2", 6.4, 4.3, 7.0, 35040),
        ("kioxia-cm6-30.72tb-u3", 30.72, 4.2, 6.9, 56064),
        ("kioxia-cd6-15.36tb-u3", 15.36, 4.0, 6.2, 28032),
    )
}


def _device(name: str, tflops: float, gib: float, gbps: float, link: float = _PCIE_5) -> Device:
    return Device(name=name, peak_tflops=tflops, memory_gib=gib, memory_gbps=gbps, link_gbps=link)


_A100_40 = _device("A100-40G", 312, 40, 1555, _PCIE_4)
_A100_80 = _device("A100-80G", 312, 80, 2039, _PCIE_4)
_H100 = _device("H100-SXM-80G", 989.4, 80, 3350)


def _with(device: Device, count: int, drive: str) -> Hardware:
    return Hardware(device=device, drives=Drives(drive=DRIVES[drive], count=count, link_gbps=device.link_gbps))


MACHINES = {
    "a100-40g": _with(_A100_40, 4, "samsung-980-pro-1tb"),
    "a100-80g": _with(_A100_80, 4, "samsung-980-pro-1tb"),
    "h100-u2": _with(_H100, 2, "samsung-pm9d3a-7.68tb-u2"),
    "h100-u2-max": _with(_H100, 2, "micron-9550-max-6.4tb-u2"),
    "h100-e1s": _with(_H100, 2, "micron-9550-pro-7.68tb-e1s"),
    "a100": _with(_A100_80, 2, "intel-d7-p5500-7.68tb-u2"),
    "h100": _with(_H100, 2, "samsung-pm9d3a-7.68tb-u2"),
    "h200": _with(_device("H200-SXM", 989.4, 141, 4800), 2, "samsung-pm9d3a-7.68tb-u2"),
    "b200": _with(_device("B200-SXM", 2250, 180, 7700), 2, "samsung-pm1753-7.68tb-u2"),
    "mi300x": _with(_device("MI300X", 1307.4, 192, 5300), 2, "samsung-pm9d3a-7.68tb-u2"),
    "l40s": _with(_device("L40S", 362, 48, 864, _PCIE_4), 2, "intel-d7-p5500-7.68tb-u2"),
    "4090": _with(_device("RTX-4090", 165.2, 24, 1008, _PCIE_4), 1, "samsung-990-pro-2tb"),
    "5090": _with(_device("RTX-5090", 209.5, 32, 1792), 1, "samsung-9100-pro-2tb"),
}
