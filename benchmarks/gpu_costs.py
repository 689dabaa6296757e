"""What the small things cost on the host: an event, a device guard, one of our nodes without its transfer.

python benchmarks/gpu_costs.py                # on the GPU
python benchmarks/gpu_costs.py --device cpu   # try the script out

Each is repeated in a row; the best of five rows, in microseconds a time.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Callable, Sequence

import torch

from ssd_fx.runtime import calls
from ssd_fx.runtime.device import streams

ROWS = 5
KEEPS = json.dumps({"engine": "memory", "budget": 1 << 40, "adapt": False})  # nothing leaves: the node alone
WRITES = json.dumps({"engine": "memory", "adapt": False})


def cost_us(work: Callable[[], object], times: int) -> float:
    """Of one of `times` in a row."""
    return min(timeit.repeat(work, number=times, repeat=ROWS)) / times * 1e6


def node(x: torch.Tensor, config: str) -> Callable[[], object]:
    """Store and release of `x`, and the death of its handle."""

    def work() -> None:
        handle = calls.store(x, config, "cost", 0, 0)
        calls.wait_store_(handle, x, 1, True)

    return work


def backward(call: Callable[[], None]) -> None:
    """Runs `call` in a backward: a load asks the running one whether it keeps its graph."""
    end = torch.zeros((), requires_grad=True).clone()
    end.register_hook(lambda _: call())
    end.backward()


def round_trip(x: torch.Tensor, config: str) -> Callable[[], object]:
    """Store and release of `x`, then a backward with its load and wait."""

    def work() -> None:
        handle = calls.store(x, config, "trip", 0, 0)
        calls.wait_store_(handle, x, 1, True)

        def back() -> None:
            y = calls.load(handle, x.shape, x.stride(), x.dtype, x.device, 0)
            calls.wait_load_(y, handle, 1)

        backward(back)

    return work


def costs(device: torch.device, times: int) -> dict[str, float]:
    """By what it is."""
    x = torch.ones(1024, device=device)
    works = {
        "store and release of 4 KiB that stays": node(x, KEEPS),
        "store and release of 4 KiB to host memory": node(x, WRITES),
        "and with load and wait, in a backward": round_trip(x, WRITES),
        "a backward": lambda: backward(lambda: None),
    }
    queued = streams.of(device)
    if queued:
        stream = queued.current(x.device)
        fired = queued.record(stream)
        torch.cuda.synchronize(x.device)

        def guard() -> None:
            with queued.on(x.device):
                pass

        works |= {"event made and recorded": lambda: queued.record(stream)}
        works |= {"the same, with a time": lambda: queued.record(stream, timed=True), "event asked": fired.query}
        works |= {"device guard": guard}
    return {name: cost_us(work, times) for name, work in works.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--times", type=int, default=1000, help="in a row, default %(default)s")
    flags = parser.parse_args(arguments)
    for name, us in costs(torch.device(flags.device), flags.times).items():
        print(f"{name:44}{us:8.2f} us")


if __name__ == "__main__":
    main()
