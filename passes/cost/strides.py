"""Which storages a loop reads in the order in which it writes its result, so that the result may be written over them.

A loop of Inductor's goes over its result in the order of memory. So it depends on the strides of the tensors that the
loop reads and writes, which are not always the strides of the graph.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ssd_fx.passes.cost.kernels import Kernels, summed
from ssd_fx.passes.cost.operators import CONTIGUOUS, REDUCTIONS, hint, is_of_single_channels, operator_of
from ssd_fx.passes.groups import channels_last_strides
from ssd_fx.passes.partition import arguments_of, tensor_of

aten = torch.ops.aten


class Strides:
    """The strides of the tensors of one graph, as its kernels have them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._images = {kernels.index[n] for n in _images(kernels.nodes)}
        self._found: dict[int, set[int]] = {}

    def read_in_order(self, i: int) -> set[int]:
        """The storages whose elements a loop reads in the order in which it writes its result, and in no other.

        A loop that sums up rows reads them row by row.
        """
        if i not in self._found:
            self._found[i] = self._find_read_in_order(i)
        return self._found[i]

    def _find_read_in_order(self, i: int) -> set[int]:
        kernels = self._kernels
        found: dict[bool, set[int]] = {True: set(), False: set()}
        work = [(i, True)]
        seen = set(work)
        while work:
            k, in_order = work.pop()
            for source in kernels.nodes[k].all_input_nodes:
                straight = in_order and self._is_in_order(source, k, i)
                at = kernels.index[source]
                while kernels.view[at]:
                    at = kernels.index[kernels.nodes[at].all_input_nodes[0]]
                if at != i and i in kernels.inside[at]:
                    if (at, straight) not in seen:
                        seen.add((at, straight))
                        work.append((at, straight))
                else:
                    found[straight].update(kernels.storages[at])
        return found[True] - found[False]

    def _is_in_order(self, source: fx.Node, k: int, i: int) -> bool:
        """Whether node `k`, a part of loop `i`, reads the elements of `source` in the order in which the loop writes
        its result, or sums up whole rows of it."""
        given, made, written = tensor_of(source), tensor_of(self._kernels.nodes[k]), tensor_of(self._kernels.nodes[i])
        if given is None:
            return False
        if operator_of(self._kernels.nodes[k]) in REDUCTIONS:
            return _sums_rows(given, self._kernels.nodes[k])
        if made is None:
            return False
        size, stride = self._laid_out(self._kernels.index[source])
        of, steps = _hints(made)
        if written is not None and _hints(written)[0] == of:
            steps = self._laid_out(i)[1]
        return size == of and all(a == b for a, b, n in zip(stride, steps, of, strict=True) if n != 1)

    def _laid_out(self, i: int) -> tuple[list[int], list[int]]:
        """Sizes and strides of a node's tensor. Inductor makes the result of a loop contiguous if a library call reads
        it through a view; an image, if a view of it has other sizes. It does not if the result is an output, or if a
        product or a convolution's backward reads it beside other nodes (`convert_to_reinterpret_view` and `View.create`
        in its ir.py, `need_fixed_layout` in its graph.py, torch 2.13)."""
        node = self._kernels.nodes[i]
        tensor = tensor_of(node)
        assert tensor is not None
        size, stride = _hints(tensor)
        is_image = i in self._images
        if is_image:
            stride = list(channels_last_strides(size))
        is_remade = self._is_reshaped(node) if is_image else self._is_viewed_by_call(node)
        if not self._kernels.computes[i] or i in self._kernels.calls or not is_remade:
            return size, stride
        fixed = (aten.mm.default, aten.convolution_backward.default)
        if any(n.op == "output" or (len(node.users) > 1 and n.target in fixed) for n in node.users):
            return size, stride
        return size, [math.prod(size[d + 1 :]) for d in range(len(size))]

    def _is_reshaped(self, node: fx.Node) -> bool:
        """Whether a view has other sizes than the node."""
        return any(operator_of(user) is aten.view and _size(user) != _size(node) for user in node.users)

    def _is_viewed_by_call(self, node: fx.Node) -> bool:
        views = [user for user in node.users if self._kernels.view[self._kernels.index[user]]]
        readers = (self._kernels.index[reader] for view in views for reader in view.users)
        return any(r in self._kernels.calls for r in readers) or any(map(self._is_viewed_by_call, views))


def _images(nodes: list[fx.Node]) -> set[fx.Node]:
    """The images that lie with their channels last in a backward, though the graph has other strides: those that
    convolutions read and write, if Inductor lays any of these out so, and all that are computed of these or with these
    element by element (`get_fill_order` in Inductor's ir.py, torch 2.13). What a convolution of single channels reads
    and writes is contiguous (`joint/conv_operands.py`)."""
    beside: dict[fx.Node, list[fx.Node]] = {}  # by node, the nodes that lie in the same order
    images: list[fx.Node] = []
    contiguous: set[fx.Node] = set()
    is_laid_out = False
    for node in nodes:
        alike: list[fx.Node] = []
        if node.target is aten.convolution_backward.default:
            result, image, weight = (arguments_of(node)[name] for name in ("grad_output", "input", "weight"))
            around = [result, image, *(user for user in node.users if user.args[1] == 0)]
            around = [n for n in around if len(_size(n)) == 4]
            if is_of_single_channels(node):
                contiguous.update(around)
                continue
            alike = around
            images += around
            is_laid_out = is_laid_out or _is_turned(weight)
        elif CONTIGUOUS in node.meta and node.all_input_nodes[0].op == "placeholder" and len(_size(node)) == 4:
            images += node.all_input_nodes
            is_laid_out = True
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) and len(size := _size(node)) == 4:
            alike = [node, *(n for n in node.all_input_nodes if _size(n) == size)]
        for one in alike:
            beside.setdefault(one, []).extend(alike)
    found: set[fx.Node] = set()
    work = images if is_laid_out else []
    while work:
        node = work.pop()
        if node not in found and node not in contiguous:
            found.add(node)
            work += beside.get(node, ())
    return found


def _is_turned(weight: fx.Node) -> bool:
    """Whether the weight of a convolution has its channels last, and its strides fit no other order."""
    tensor = tensor_of(weight)
    assert tensor is not None
    size, stride = _hints(tensor)
    return len(size) == 4 and size[1] > 1 and math.prod(size[2:]) > 1 and stride[1] == 1


def _size(node: fx.Node) -> list[int]:
    tensor = tensor_of(node)
    return [] if tensor is None else _hints(tensor)[0]


def _sums_rows(given: torch.Tensor, node: fx.Node) -> bool:
    """Whether a reduction is over whole rows of a contiguous tensor."""
    size, stride = _hints(given)
    dims = sorted(summed(node))
    rows = [math.prod(size[d + 1 :]) for d in range(given.ndim)]
    is_contiguous = all(a == b for a, b, n in zip(stride, rows, size, strict=True) if n != 1)
    return is_contiguous and dims == list(range(given.ndim - len(dims), given.ndim))


def _hints(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides as numbers: to compare symbolic ones would add guards."""
    return [hint(n) for n in tensor.shape], [hint(n) for n in tensor.stride()]
