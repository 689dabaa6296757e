"""Has Inductor save inputs that convolutions read (weights, images) as they are, and no copies in another order
(`joint/conv_operands.py`).

Inductor keeps the strides of outputs that the caller sees, so we tell it that the caller sees these inputs.
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
