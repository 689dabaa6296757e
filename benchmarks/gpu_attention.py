"""How fast PyTorch's attention is on the GPU, by length, size of a head and mask: what `ssd-fx calibrate` samples.

python benchmarks/gpu_attention.py                # on the GPU
python benchmarks/gpu_attention.py --device cpu   # try the script out, with few tokens

Each row has the same number of tokens in all. Rates count two products forward and five backward, and of causal
attention the pairs that are not masked. `calibration` is the rate that a plan would be made with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ssd_fx.calibration.rates import Compute

SIZES, LENGTHS, HEADS = (64, 128), (512, 1024, 2048, 4096, 8192, 16384, 32768), 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=32768, help="of every row, default %(default)s")
    flags = parser.parse_args(arguments)
    device = torch.device(flags.device)
    compute = Compute(device)
    print("| head | causal | length | forward ms | TFLOP/s | backward ms | TFLOP/s |", "|" + "---|" * 7, sep="\n")
    for size in SIZES:
        for causal in (True, False):
            for length in (each for each in LENGTHS if each <= flags.tokens):
                shape = (flags.tokens // length, HEADS, length, size)
                found = compute.attention(torch.bfloat16, shape, causal)
                cells = [f"{seconds * 1e3:.3f} | {rate / 1e12:.0f}" for seconds, rate in found]
                print("|", size, "|", causal, "|", length, "|", " | ".join(cells), "|", flush=True)
        calibrated = compute.attention_flops(torch.bfloat16, size)
        print(f"calibration, heads of {size}: " + ", ".join(f"{rate / 1e12:.0f} TFLOP/s" for rate in calibrated))


if __name__ == "__main__":
    main()
