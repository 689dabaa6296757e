"""Memory that an operator takes while it runs and gives back before it returns. No graph shows it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ssd_fx.compat import OpOverload
from ssd_fx.passes.cost.operators import hint, is_of_single_channels, operator_of
from ssd_fx.passes.groups import is_channels_last, is_contiguous
from ssd_fx.passes.partition import arguments_of, called, tensor_of

aten = torch.ops.aten
# Products of matrices, and the names of the two matrices in the schemas.
_PRODUCTS: dict[object, tuple[str, str]] = {
    aten.mm: ("self", "mat2"),
    aten.addmm: ("mat1", "mat2"),
    aten.bmm: ("self", "mat2"),
    aten.baddbmm: ("batch1", "batch2"),
}
# Elementwise operators: those that copy, whatever the dtypes; that read a condition; whose result is complex at first.
_COPIES = (aten.clone, torch.ops.prims.convert_element_type)
_WITH_CONDITION = (aten.where, aten.masked_fill)
_COMPLEX_FIRST = (aten.abs, aten.angle)
ROWS = 128  # flash attention rounds up the rows of a sequence to a multiple of this
# oneDNN multiplies matrices of bfloat16 in blocks. These are the most rows of a block, products that are summed up, and
# columns of sums. Then the columns that it reads at once, and a line of the cache, in elements.
BLOCK_ROWS, BLOCK_DEPTH, BLOCK_COLUMNS = 256, 512, 1024
NARROW, LINE = 64, 16
BLOCK, LARGE_KERNEL = 16, 14  # channels of a block of a convolution, and the largest kernel that it is made for
UNPACKED = 16**3  # a product of no more multiplications is left to a loop (`mkldnn_gemm` in Matmul.cpp)


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that one call has beside its inputs and results while it runs, as far as that is known."""
    target = called(node)[0]
    if not isinstance(target, OpOverload):
        return 0
    if operator_of(node) in _PRODUCTS:
        return _product(node)
    if operator_of(node) in (aten.convolution, aten.convolution_backward):
        return _convolution(node)
    if torch.Tag.pointwise in target.tags:
        return _elements(node)
    heads_first = operator_of(node) is aten._scaled_dot_product_flash_attention_backward
    if heads_first or operator_of(node) is aten._flash_attention_backward:
        return _flash_backward(node, heads_first=heads_first)
    return 0


def _elements(node: fx.Node) -> int:
    """The workspace of an elementwise operator, which is a library call if numbers are complex: copies of the inputs
    that have another dtype than it computes in. `abs` and `angle` have a complex result before the real one.

    (`compute_types` in TensorIterator.cpp, `unary_op_impl_with_complex_to_float_out` in UnaryOps.cpp, PyTorch 2.13.)
    The graph has already copied inputs that were lazily conjugated.
    """
    operator, inputs = operator_of(node), [t for t in map(tensor_of, node.all_input_nodes) if t is not None]
    if operator in _WITH_CONDITION:
        inputs = [tensor for tensor in inputs if tensor.dtype != torch.bool]
    if not inputs or operator in _COPIES:
        return 0
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in inputs))
    copied = [tensor for tensor in inputs if tensor.dtype != dtype and tensor.device.type == "cpu"]
    if operator in _COMPLEX_FIRST and dtype.is_complex:
        copied += inputs
    return sum(hint(tensor.numel()) for tensor in copied) * dtype.itemsize


def _product(node: fx.Node) -> int:
    """The workspace of a product of matrices: copies of the matrices that lie in no order that libraries take, and the
    blocks that are packed. The gradient of a sum is such a matrix: one number for all elements.

    ATen copies them, if Inductor has not (`addmm_impl_cpu_` in LinearAlgebra.cpp, `prepare_matrix_for_cublas` in
    CUDABlas, `may_require_contiguous` in Inductor's bmm.py, PyTorch 2.13). Either copy is there during the call only.
    """
    given = arguments_of(node)
    tensors = [tensor_of(given[name]) for name in _PRODUCTS[operator_of(node)]]
    matrices = [_Matrices.of(tensor) for tensor in tensors if tensor is not None]
    if len(matrices) < 2:
        return 0
    return sum(each.nbytes for each in matrices if each.is_copied) + _packed(*matrices)


def _packed(a: _Matrices, b: _Matrices) -> int:
    """Bytes that oneDNN packs of two matrices of bfloat16 on the CPU: blocks of a bounded size, for each thread.

    It packs a block of the first matrix if the columns of that matrix are contiguous, as those of the input are in the
    gradient of a weight. If there is more than one block of products then, their sums wait in float32. Counted with
    AVX-512 and PyTorch 2.13. With sizes that are no multiple of 64 it takes less, and with rows of 8 KiB and more it
    packs the first matrix at times.
    """
    if not a.is_packed or a.rows * a.columns * b.columns <= UNPACKED:
        return 0
    rows, depth = min(a.rows, BLOCK_ROWS), a.columns
    if a.is_transposed:
        block = min(depth, BLOCK_DEPTH)
        packed = a.itemsize * block * rows
        sums = min(b.columns, BLOCK_COLUMNS) + LINE if depth > BLOCK_DEPTH else NARROW
    else:
        block, packed, sums = min(depth, BLOCK_DEPTH if depth <= 2 * BLOCK_DEPTH else 2 * BLOCK_DEPTH), 0, NARROW
    return torch.get_num_threads() * (packed + b.itemsize * block * NARROW + 4 * rows * sums)


def _convolution(node: fx.Node) -> int:
    """The workspace of a convolution on the CPU: what ATen copies into the order that oneDNN computes in, and what
    oneDNN copies and packs (`mkldnn_convolution_backward` and its neighbours in mkldnn/Conv.cpp, PyTorch 2.13 with
    oneDNN 3.12).

    A transposed convolution computes what is the gradient of the image otherwise, and the other way round.
    """
    given, is_forward = arguments_of(node), operator_of(node) is aten.convolution
    weight, image = tensor_of(given["weight"]), tensor_of(given["input"])
    result = tensor_of(node if is_forward else given["grad_output"])
    if weight is None or image is None or result is None or weight.device.type != "cpu":
        return 0
    steps = [hint(step) for step in given["stride"]]
    inside = _Convolution(weight, image, result, max(steps) > 1, given["transposed"], _is_last(node))
    copies = sum(_nbytes(x) for x in inside.copied if x is image or not is_forward)
    if is_forward and inside.is_last:
        copies += sum(_turned(given[name]) for name in ("input", "weight"))
    if inside.is_product:
        return copies
    if is_forward:
        return copies + (inside.spread(image, result) if inside.is_transposed else inside.gather(image, result))
    to_image, to_weight, _ = given["output_mask"]
    image_bytes = (inside.gather if inside.is_transposed else inside.spread)(result, image) if to_image else 0
    return copies + max(image_bytes, inside.weight_gradient() if to_weight else 0)


def _is_last(node: fx.Node) -> bool:
    """Whether ATen computes a convolution with the channels last, as Inductor lays images and weights out, and no other
    tensors (`mkldnn_conv_use_channels_last` in ConvUtils.h)."""
    weight = arguments_of(node)["weight"].meta["val"]
    return weight.ndim == 4 and not is_of_single_channels(node)


class _Convolution(NamedTuple):
    """A convolution, or its gradients. `result`: its result, or the gradient of that.

    `is_last`: channels come last. Then oneDNN reads the images as they lie. Else it copies them into blocks of
    channels, and its result out of such blocks, while the blocks are there.
    """

    weight: Tensor
    image: Tensor
    result: Tensor
    is_strided: bool
    is_transposed: bool
    is_last: bool

    @property
    def copied(self) -> list[Tensor]:
        """Of the image and the gradient of the result, what ATen copies, as it lies in another order or has gaps."""
        fits = _is_dense if self.weight.ndim == 4 else _is_contiguous
        return [x for x in (self.image, self.result) if not fits(x)]

    @property
    def kernel(self) -> list[int]:
        return [hint(n) for n in self.weight.shape[2:]]

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices (`use_mkldnn` in Convolution.cpp)."""
        is_small = hint(self.image.shape[0]) < 16 and torch.get_num_threads() == 1
        return max(self.kernel) == 1 and not self.is_strided and (self.is_last or is_small)

    @property
    def _is_large(self) -> bool:
        """Whether each image becomes a matrix, with all pixels that each result reads, as its kernel is large."""
        return max(self.kernel) > LARGE_KERNEL and not self.is_transposed

    @property
    def _matrix(self) -> int:
        pixels = math.prod(hint(n) for n in self.result.shape[2:])
        return self.weight.itemsize * hint(self.weight.shape[1]) * math.prod(self.kernel) * pixels

    def _packed(self, out: int, of: int) -> int:
        """Bytes of the weight in blocks of 16 channels of what is computed."""
        return _up(out, BLOCK) * of * math.prod(self.kernel) * self.weight.itemsize

    def gather(self, source: Tensor, result: Tensor) -> int:
        """Each pixel of the result reads as many of the source as the kernel has."""
        packed = self._packed(*(hint(n) for n in self.weight.shape[:2]))
        if self.is_last:
            return packed
        return max(0 if self._is_large else _nbytes(source) + packed, _nbytes(result))

    def spread(self, source: Tensor, result: Tensor) -> int:
        """Each pixel of the source is read by as many of the result as the kernel has.

        If the convolution takes steps, oneDNN pads a copy of the source, one image a thread, and has channels last.
        ATen then makes the result contiguous by a second copy (`mkldnn_to_dense` in MKLDNNConversions.cpp).
        """
        out, of = (hint(n) for n in self.weight.shape[:2])
        packed = self._packed(of, out)
        if self.is_last:
            padded = math.prod(hint(n) + k - 1 for n, k in zip(source.shape[2:], self.kernel, strict=True))
            return packed + torch.get_num_threads() * out * padded * self.weight.itemsize * self.is_strided
        if (self.is_strided and of > 1) or self.is_transposed:
            return max(_nbytes(source) + packed, 2 * _nbytes(result))
        return max(self._matrix if self._is_large else _nbytes(source) + packed, _nbytes(result))

    def weight_gradient(self) -> int:
        """It is computed in blocks, in float32, and copied; twice if channels come last, and again into that order."""
        out, of = (hint(n) for n in self.weight.shape[:2])
        plain = 4 * out * of * math.prod(self.kernel)
        if not self.is_last:
            return self._matrix + 4 * plain if self._is_large else _nbytes(self.image) + _nbytes(self.result)
        blocks = 4 * _up(out, BLOCK) * (of if of < BLOCK else _up(of, BLOCK)) * math.prod(self.kernel)
        turned = 0 if is_channels_last(self.weight.shape, self.weight.stride()) else plain
        return turned + (4 * plain + 2 * self._matrix if self._is_large else plain + blocks)


def _turned(operand: fx.Node) -> int:
    """Bytes of the copy, with its channels last, that Inductor makes of an input for a convolution."""
    tensor = tensor_of(operand)
    assert tensor is not None
    if operand.op != "placeholder" or is_channels_last(tensor.shape, tensor.stride()):
        return 0
    return _nbytes(tensor)


def _nbytes(tensor: Tensor) -> int:
    return math.prod(hint(n) for n in tensor.shape) * tensor.itemsize


def _is_contiguous(tensor: Tensor) -> bool:
    return is_contiguous([hint(n) for n in tensor.shape], [hint(n) for n in tensor.stride()])


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, in some order of its dimensions."""
    dims = sorted(((hint(step), hint(n)) for step, n in zip(tensor.stride(), tensor.shape, strict=True)), reverse=True)
    return is_contiguous([n for _, n in dims], [step for step, _ in dims])


class _Matrices(NamedTuple):
    """A matrix, or a batch of them, `nbytes` in all. `steps`: the stride from row to row, and from column to column."""

    rows: int
    columns: int
    steps: tuple[int, int]
    nbytes: int
    itemsize: int
    is_apart: bool  # the matrices of a batch do not follow each other
    is_packed: bool

    @staticmethod
    def of(tensor: Tensor) -> _Matrices:
        size, stride = ([hint(n) for n in each] for each in (tensor.shape, tensor.stride()))
        rows, columns = size[-2:]
        is_packed = tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16
        is_packed = is_packed and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        is_apart = tensor.ndim > 2 and size[0] > 1 and stride[0] != rows * columns
        nbytes = math.prod(size) * tensor.itemsize
        return _Matrices(rows, columns, (stride[-2], stride[-1]), nbytes, tensor.itemsize, is_apart, is_packed)

    @property
    def is_transposed(self) -> bool:
        return self.steps[0] == 1 and self.steps[1] >= max(self.rows, 1)

    @property
    def is_copied(self) -> bool:
        """Whether a product copies it. For oneDNN the matrices of a batch of bfloat16 must follow each other."""
        by_rows = self.steps[1] == 1 and self.steps[0] >= max(self.columns, 1)
        return not (self.is_transposed or by_rows) or (self.is_packed and self.is_apart)


def _flash_backward(node: fx.Node, *, heads_first: bool) -> int:
    """The workspace of flash attention's backward on NVIDIA's GPUs (`mha_bwd` in flash_api.cpp, PyTorch 2.11 to 2.13).

    It sums up the gradient of the queries in float32, and keeps a float32 for every row. Where heads share keys and
    values, it makes the gradients of these for every head first. It copies a gradient or a result that is not
    contiguous (`_flash_attention_backward` in attention_backward.cu). Sequences of several lengths are not counted:
    they lie behind each other in tensors of three dimensions.
    """
    arguments = arguments_of(node)
    query, key, grad, out = (_Dense.of(arguments[name], heads_first) for name in ("query", "key", "grad_out", "out"))
    if query is None or key is None or query.device.type != "cuda" or torch.version.hip:
        return 0
    batch, rows, heads, width = query.size
    columns = _up(width, 32 if width <= 128 else 64)
    nbytes = 4 * batch * heads * _up(rows, ROWS) * (columns + 1)
    if key.size[2] != heads:
        nbytes += 2 * batch * key.size[1] * heads * width * query.itemsize
    return nbytes + sum(x.nbytes for x in (grad, out) if x is not None and not x.is_contiguous)


class _Dense(NamedTuple):
    """A tensor of batch, rows, heads, columns, its sizes as they were when the graph was traced."""

    size: list[int]
    stride: list[int]
    itemsize: int
    device: torch.device

    @staticmethod
    def of(argument: object, heads_first: bool) -> _Dense | None:
        """`heads_first`: heads come before rows."""
        tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            return None
        order = (0, 2, 1, 3) if heads_first else range(4)
        size, stride = [[hint(each[d]) for d in order] for each in (tensor.shape, tensor.stride())]
        return _Dense(size, stride, tensor.itemsize, tensor.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.size, self.stride)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
