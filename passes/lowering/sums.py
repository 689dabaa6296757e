"""Has Inductor add each term of a long sum as soon as the term is there (`cost/sums.py`).

    before     dw = add(add(add(mm_1, mm_2), mm_3), ...)
    after      dw = add(written(add(written(add(mm_1, mm_2)), mm_3)), ...)
    code       addmm(addmm(addmm(...)))

Our operator `written` writes its argument to memory and returns it. It is no loop and no view, so Inductor merges the
addition that it reads into an `addmm`, on a GPU too. An addition that stays a loop is not fused with the next one
(`order.py`). Inductor's graphs alone have the operator, and the generated code does not call it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.library import Library

from ssd_fx.compat import is_lite
from ssd_fx.compat.inductor import register_lowering
from ssd_fx.passes.cost.sums import RUNNING, running_sums

_library = Library("ssd_fx", "FRAGMENT")
_library.define("written(Tensor x) -> Tensor")
_library.impl("written", torch.clone, "CompositeExplicitAutograd")  # for Inductor's fake tensors


def write_running_sums(graph: fx.Graph) -> None:
    """Put `written` behind every addition of a long sum. In lite mode Inductor fuses nothing, and would call it."""
    if is_lite():
        return
    for node in running_sums(list(graph.nodes)):
        (reader,) = node.users
        with graph.inserting_after(node):
            written = graph.call_function(torch.ops.ssd_fx.written.default, (node,))
        node.meta[RUNNING] = written.meta[RUNNING] = True
        written.meta |= {name: node.meta[name] for name in ("val", "tensor_meta", "stack_trace") if name in node.meta}
        reader.replace_input_with(node, written)


def _lower_written(x: Any) -> Any:
    x.realize()
    return x


def register() -> None:
    """Make the operator known to Inductor; calling it again changes nothing."""
    register_lowering(torch.ops.ssd_fx.written.default, type_promotion_kind=None)(_lower_written)
