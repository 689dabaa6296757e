"""Saves inputs that convolutions read (weights, images) as they are; the backward turns them to channels last.

    Inductor    w_1 = channels last of w; ...; conv(x, w_1); save w_1      a copy of each weight, during the whole step
    this        ...; conv(x, channels last of w); save w                   a copy during the call alone, in the
                ...; convolution_backward(dy, x, clone(w))                 forward and in the backward

If Inductor lays convolutions out with their channels last, it turns the inputs that they read: it copies them in that
order. It turns a saved input where the forward begins, and saves the copy, although the input is there anyway. We tell
Inductor to save inputs with the strides that they have (`lowering/conv_operands.py`). This pass writes the copies into
the backward. So nodes there have the strides that they would have with saved copies, and the plan counts the copies.

The strides of a weight with one channel a group, [n, 1, 3, 3], fit any order. For these, on the CPU, Inductor copies
images that the backward reads: rows come before channels, as in the gradient of the weight. But ATen computes with
contiguous images then, and copies them again (`convolution_backward_lowering` in Inductor's kernel/conv.py, torch
2.13). So the backward makes one contiguous copy.

Hazard: in the forward no node may yield other strides than before. `as_strided` counts elements by the strides of the
graph, and the caller gets its outputs with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ssd_fx.passes.cost.operators import CONTIGUOUS, is_of_single_channels
from ssd_fx.passes.groups import is_channels_last, is_contiguous
from ssd_fx.passes.partition import Partition, arguments_of, tensor_of

aten = torch.ops.aten


def turn_operands(partition: Partition) -> None:
    """Have the backward's convolutions read copies of inputs, with their channels last, as Inductor saves them."""
    if not lays_out(partition):
        return
    made = {n.name for n in partition.saved if n.op != "placeholder"}  # Inductor saves these in its own order
    graph = partition.backward.graph
    # where the backward computes a convolution again, Inductor lays out all of its convolutions
    again = bool(graph.find_nodes(op="call_function", target=aten.convolution.default))
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if is_of_single_channels(node) and arguments_of(node)["output_mask"][1] and not again:
            for operand in node.args[:2] if _has_channels(node.args[1]) else ():
                tensor = operand.meta["val"]
                if operand.name in made or not is_contiguous(tensor.shape, tensor.stride()):
                    _turn(node, operand, torch.contiguous_format)
            continue
        for at, operand in enumerate(node.args[:3]):
            if operand.op == "placeholder" and operand.name not in made and _is_read(node, at):
                _turn(node, operand, torch.channels_last)
    partition.recompile()


def lays_out(partition: Partition) -> bool:
    """Whether Inductor lays the convolutions of the forward out with their channels last (`decide_layout_opt` in its
    graph.py, torch 2.13)."""
    if partition.is_of_region or not any(n.target is aten.convolution.default for n in partition.forward.graph.nodes):
        return False
    from ssd_fx.compat.inductor import has_channels_last  # here, as it imports Inductor's compiler

    return has_channels_last(partition.forward)


def _is_read(node: fx.Node, at: int) -> bool:
    """Whether a convolution reads the elements of an argument, and in another order than it has.

    The gradient of the weight, the second result, needs the image, and that of the image needs the weight.
    """
    if at and not arguments_of(node)["output_mask"][2 - at]:
        return False
    operand = tensor_of(node.args[at])  # type: ignore[arg-type]
    if operand is None or operand.ndim != 4:
        return False
    return not is_channels_last(operand.shape, operand.stride())


def _has_channels(image: fx.Node) -> bool:
    """Whether an image has several channels, so that their order is one."""
    tensor = tensor_of(image)
    return tensor is not None and not statically_known_true(tensor.shape[1] == 1)


def _turn(node: fx.Node, operand: fx.Node, order: torch.memory_format) -> None:
    """Have a convolution read a copy of `operand` in another order, made right before it."""
    name = f"{node.name}_{operand.name}"
    given: dict[str, Any] = {"memory_format": order}
    with node.graph.inserting_before(node):
        copy = node.graph.create_node("call_function", aten.clone.default, (operand,), given, name=name)
    copy.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "seq_nr") if key in node.meta}
    if order is torch.contiguous_format:
        copy.meta[CONTIGUOUS] = True
    tensor = operand.meta["val"]
    with torch.no_grad(), tensor.fake_mode:
        copy.meta["val"] = tensor.clone(memory_format=order)
    node.replace_input_with(operand, copy)
