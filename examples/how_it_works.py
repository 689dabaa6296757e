"""The excerpts of docs/how-it-works.md: what becomes of a toy model, and of one tensor in it.

python examples/how_it_works.py    # prints them; excerpts.py puts them into the page
"""

from __future__ import annotations

import inspect
import re
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import ssd_fx

# Rates at which the toy computes about as long as it writes. Only the plan believes in them.
RATES = {"flops": 1e9, "memory_bw": 1e9, "write_bw": 1e8, "read_bw": 1e8}
OPTIONS: dict[str, Any] = {
    "machine": RATES,
    "min_bytes": "256KiB",
    "recompute": False,
    "spare": False,  # the toy is a whole step whose peak no offload lowers
    "engine": "memory",
}


class Toy(nn.Module):
    """Three products and two tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512, bias=False)
        self.second = nn.Linear(512, 512, bias=False)
        self.third = nn.Linear(512, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = self.second(h).tanh()
        loss: Tensor = self.third(h).sum()
        return loss


def excerpts() -> dict[str, str]:
    """Every excerpt by its name, but for those of Inductor."""
    (graph,) = ssd_fx.explain(Toy(), options=OPTIONS | {"inner": "aot_eager"})(torch.zeros(128, 256)).dumps
    return {
        "toy": textwrap.dedent(inspect.getsource(Toy.forward)).strip(),
        "joint": _lines(_joint_graph(), r"\b(tanh|detach|detach_3)\b(?!\.)"),
        "plan": "\n".join(graph.table.splitlines()[:4]),
        "forward": _lines(graph.forward, r"\b(mm|tanh|mm_1|tanh_1|ssd_fx_handle_1|ssd_fx_handle_2)\b"),
        "backward": _lines(graph.backward, r"\b(ssd_fx_handle_1|load_default_1|detach|detach_3)\b(?!\.)"),
        "runs": _runs(),
    }


def inductor_excerpts() -> dict[str, str]:
    """Excerpts of the code that Inductor makes of both graphs."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as directory:  # a dump, so that no compile cache has this graph
        compiled = torch.compile(Toy(), backend=ssd_fx.backend, options=OPTIONS | {"dump": directory})
        _, (forward, backward) = run_and_get_code(lambda: compiled(torch.zeros(128, 256)).backward())
    return {
        "inductor_forward": _lines(_call(forward), r"\b(buf4|buf5|buf6)\b"),
        "inductor_backward": _lines(_call(backward), r"\b(ssd_fx_handle_1|buf7|buf8)\b"),
    }


def _joint_graph() -> str:
    """The graph of forward and backward together, as PyTorch gives it to a partitioner."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    seen: list[str] = []

    def partition(joint: torch.fx.GraphModule, inputs: Sequence[object], **arguments: Any) -> Any:
        seen.append(joint.print_readable(print_output=False))
        return min_cut_rematerialization_partition(joint, inputs, **arguments)

    torch._dynamo.reset()
    compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)
    torch.compile(Toy(), backend=compiler)(torch.zeros(128, 256))
    return seen[0]


def _call(code: str) -> str:
    """The function that runs a graph, without Inductor's assertions."""
    body = code[code.index("def call") : code.index("runner = ")]
    return "\n".join(line for line in body.splitlines() if "assert_" not in line)


def _lines(code: str, wanted: str) -> str:
    """The lines of `code` that match `wanted`, shortened: no types, comments, `torch.`, `device` or JSON of options."""
    code = re.sub(r"device\(type='(\w+)'\)", r"\1", code)
    dropped = r'\s*#.*|: "[^"]*"|;  .* = None$|torch\.(ops\.)?'
    lines = (re.sub(r"'\{.*\}'|\bCONFIG\b", "config", re.sub(dropped, "", line)).strip() for line in code.splitlines())
    return "\n".join(line for line in lines if re.search(wanted, line))


def _runs() -> str:
    """What the runtime alone does with a tensor of 256 KiB in three cases."""
    rows = [
        _run("the write has ended"),
        _run("no write yet, for there is room within the budget", budget="1MiB"),
        _run("no write, for the file is full", disk_limit=1),
    ]
    return "\n".join(rows)


def _run(case: str, **options: Any) -> str:
    ssd_fx.reset_stats()
    ops = torch.ops.ssd_fx
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        config = ssd_fx.Config.make({"dirs": [directory], "allow_tmpfs": True} | options).runtime_json()
        tensor = torch.ones(2**16)
        memory = StorageWeakRef(tensor.untyped_storage())
        handle = ops.store(tensor, config, "toy", 0, 0)
        ops.wait_store_(handle, tensor, 1, True, True)
        del tensor
        free = memory.expired()
        loaded = ops.load(handle, [2**16], [1], torch.float32, torch.device("cpu"), 0)
        ops.wait_load_(loaded, handle, 1)
        assert torch.equal(loaded, torch.ones(2**16))
        ssd_fx.close()
    found = ssd_fx.stats()
    moved = {name: getattr(found, f"{name}_bytes") // 1024 for name in ("written", "kept", "forwarded", "read")}
    return f"{case + ':':51} memory free {free!s:5}  " + "  ".join(f"{k} {v:3}" for k, v in moved.items())


if __name__ == "__main__":
    print(*(f"-- {name}\n{text}\n" for name, text in (excerpts() | inductor_excerpts()).items()), sep="\n")
