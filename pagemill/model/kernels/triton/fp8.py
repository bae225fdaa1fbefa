"""Linear layers with weights of 8-bit floats on GPUs, by number of rows. Knows shapes, not layers."""

import torch
from torch import Tensor
from torch.nn import functional

from pagemill.model.kernels import ops
from pagemill.model.kernels.cublas_lt import Kind
from pagemill.model.kernels.fp8_tiles import available, multiply
from pagemill.model.kernels.triton.fp8_choices import MAX_FEW_ROWS, few_rows_choice, one_row_choice
from pagemill.model.kernels.triton.fp8_quantize import MAX_COLUMNS, quantize
from pagemill.model.kernels.triton.fp8_rows import few_rows
from pagemill.model.kernels.triton.gemv import gemv
from pagemill.model.kernels.triton.norm import rms_norm_floats

__all__ = ["MAX_COLUMNS", "gated_linear", "linear", "norm_linear", "quantize", "quantizes"]

_ALIGNMENT = 16
"""Rows and columns of the 8-bit product come in multiples of it."""


def quantizes(num_rows: int, dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether rows of that number and type are quantized for [N, K]: where the 8-bit product is faster, and can be."""
    num_outputs, size = weight.shape
    fits = size % _ALIGNMENT == 0 and num_outputs % _ALIGNMENT == 0 and size <= MAX_COLUMNS
    return fits and dtype == torch.bfloat16 and (num_rows > MAX_FEW_ROWS or (num_rows > 1 and available(weight.device)))


def linear(x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
    """As kernels.fp8.linear: [T, K] -> [T, N], with a gate [T, N / 2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_outputs, size = weight.shape
    if len(x) == 1:
        choice = one_row_choice(num_outputs if gate is None else num_outputs // 2, size, gate is not None)
        return gemv(x.contiguous(), weight, choice, bias=bias, gate=gate, factors=factors)
    if quantizes(len(x), x.dtype, weight):
        result = product(quantize(x), weight, factors, bias)
    elif 1 < len(x) <= MAX_FEW_ROWS:
        return few_rows(x, weight, factors, bias, gate, few_rows_choice(num_outputs, size))
    else:
        result = functional.linear(x, (weight.float() * factors.unsqueeze(1)).to(x.dtype), bias)
    return result if gate is None else ops.gated(result, gate)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    factors: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """As kernels.fp8.norm_linear, where `quantizes`."""
    return product(rms_norm_floats(x, *norm, residual), weight, factors, bias)


def gated_linear(x: Tensor, gate: str, weight: Tensor, factors: Tensor, bias: Tensor | None = None) -> Tensor:
    """As kernels.fp8.gated_linear, where `quantizes`."""
    return product(quantize(x, gate), weight, factors, bias)


def product(rows: tuple[Tensor, Tensor], weight: Tensor, factors: Tensor, bias: Tensor | None = None) -> Tensor:
    """Quantized rows ([M, K] and [M]) times [N, K] with factors [N] -> [M, N] bfloat16."""
    result = multiply(Kind.FP8_ROWS, rows, (weight, factors))
    if result is None:
        result = torch._scaled_mm(
            rows[0],
            weight.t(),
            scale_a=rows[1].unsqueeze(1),
            scale_b=factors.unsqueeze(0),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    return result if bias is None else result.add_(bias)
