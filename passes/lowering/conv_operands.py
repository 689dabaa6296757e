"""Has Inductor save the weights and images that convolutions read of inputs, and no copies of them in another order
(`joint/conv_operands.py`).

Inductor keeps the strides of what the caller sees, so it is told that the caller sees these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def as_they_are(graph: fx.Graph) -> None:
    """Tell Inductor that the operands which a forward saves have the strides that the caller sees."""
    output = graph.output_node()
    visible = output.meta.get("user_visible_output_idxs")
    if visible is None:
        return
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    operands = {operand for node in convolutions for operand in node.args[:2]}
    saved: Any = output.args[0]
    own = (i for i, n in enumerate(saved) if n in operands and n.op == "placeholder")
    output.meta["user_visible_output_idxs"] = sorted({*visible, *own})
