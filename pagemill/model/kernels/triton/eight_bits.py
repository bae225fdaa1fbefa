"""Linear layers with weights of 8 bits (blocks of floats, integers) on GPUs, by number of rows. Knows shapes, not
layers."""

from torch import Tensor

from pagemill.model.kernels import ops
from pagemill.model.kernels.eight_bits import BLOCK, EightBits
from pagemill.model.kernels.triton import fp8_choices
from pagemill.model.kernels.triton.eight_bits_choices import MAX_FEW_ROWS, few_choice, many_choice, one_row_choice
from pagemill.model.kernels.triton.eight_bits_gemv import blocks_gemv
from pagemill.model.kernels.triton.eight_bits_many import product
from pagemill.model.kernels.triton.eight_bits_quantize import MAX_COLUMNS, quantize
from pagemill.model.kernels.triton.eight_bits_rows import few_rows
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.norm import rms_norm_groups

MULTIPLE = 8
"""Of quantized rows: cuBLAS refuses floats in blocks where their number is not aligned."""


def quantizes(x: Tensor, weight: EightBits) -> bool:
    """Whether rows like x are quantized."""
    return len(x) > MAX_FEW_ROWS and x.dtype.itemsize == 2 and weight.values.shape[1] <= MAX_COLUMNS


def linear(x: Tensor, weight: EightBits, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
    """As kernels.eight_bits.linear: [T, K] -> [T, N], with a gate [T, N / 2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    stacked, size = weight.values.shape
    outputs = stacked if gate is None else stacked // 2
    if not len(x):
        return x.new_empty(0, outputs)
    if quantizes(x, weight):
        result = _quantized(x, weight, bias, None)
        return result if gate is None else ops.gated(result, gate)
    if len(x) == 1:
        if weight.group >= size and weight.rows == 1:
            one = fp8_choices.one_row_choice(outputs, size, gate is not None)
            return gemv(x.contiguous(), weight.values, one, bias=bias, gate=gate, factors=weight.scales)
        if weight.rows == BLOCK and (gate is None or outputs % BLOCK == 0):
            return blocks_gemv(x, weight, one_row_choice((outputs, size, gate is not None)), bias=bias, gate=gate)
    return few_rows(x, weight, few_choice(len(x), (outputs, size, gate is not None)), bias=bias, gate=gate)


def gated_linear(x: Tensor, gate: str, weight: EightBits, bias: Tensor | None = None) -> Tensor:
    """As kernels.eight_bits.gated_linear: [T, 2 * K] -> [T, N]."""
    if quantizes(x, weight):
        return _quantized(x, weight, bias, gate)
    return linear(ops.gated(x, gate), weight, bias)


def norm_linear(
    x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], weight: EightBits, bias: Tensor | None = None
) -> Tensor:
    """As kernels.eight_bits.norm_linear, where `quantizes`."""
    rows = rms_norm_groups(x, norm, residual, weight.group, weight.values.dtype, MULTIPLE)
    return _product(x, rows, weight, bias)


def _quantized(x: Tensor, weight: EightBits, bias: Tensor | None, gate: str | None) -> Tensor:
    return _product(x, quantize(x, weight.group, weight.values.dtype, gate, MULTIPLE), weight, bias)


def _product(x: Tensor, rows: tuple[Tensor, Tensor], weight: EightBits, bias: Tensor | None) -> Tensor:
    """Of numbers and factors of as many rows as x has, in its type."""
    choice = many_choice(len(x), weight.num_outputs)
    return product(*rows, weight, choice, x.dtype, bias)[: len(x)]
