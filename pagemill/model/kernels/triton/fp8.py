"""8-bit floats on GPUs: quantizing in one kernel, and linear layers by number of rows. Knows shapes, not layers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels import ops
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.fp8_choices import MAX_FEW_ROWS, few_rows_choice, one_row_choice
from pagemill.model.kernels.triton.fp8_rows import few_rows
from pagemill.model.kernels.triton.gemv import gemv

MAX_COLUMNS = 32768
"""Of a row that a program of `quantize` holds in its registers."""
_ALIGNMENT = 16
"""Rows and columns of the 8-bit product come in multiples of it."""


@triton.jit
def _quantize(floats, factors, rows, stride, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < K
    values = tl.load(rows + row * stride + columns, real, 0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(values), 0) / 448.0, 1e-12)
    scaled = tl.minimum(tl.maximum(values * (1.0 / factor), -448.0), 448.0)
    tl.store(floats + row * K + columns, scaled.to(tl.float8e4nv), real)
    tl.store(factors + row, factor)


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels.fp8.quantize: [M, K] -> [M, K] and [M]; K up to MAX_COLUMNS."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, size = rows.shape
    floats = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=rows.device)
    factors = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _quantize[(num_rows,)](
            floats, factors, rows, rows.stride(0), size, BLOCK=block, PDL=launch.dependent(),
            **launch.options(min(16, max(1, block // 512))),
        )  # fmt: skip
    return floats, factors


def linear(x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None = None, gate: str | None = None) -> Tensor:
    """As kernels.fp8.linear: [T, K] -> [T, N], with a gate [T, N / 2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_outputs, size = weight.shape
    if len(x) == 1:
        choice = one_row_choice(num_outputs if gate is None else num_outputs // 2, gate is not None)
        return gemv(x.contiguous(), weight, choice, bias=bias, gate=gate, factors=factors)
    if 1 < len(x) <= MAX_FEW_ROWS:
        return few_rows(x, weight, factors, bias, gate, few_rows_choice(num_outputs, size))
    result = _product(x, weight, factors)
    if bias is not None:
        result += bias
    if gate is None:
        return result
    return ops.gelu_tanh_mul(result) if gate == "gelu_tanh" else ops.silu_mul(result)


def _product(x: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    """[M, K] times [N, K], both in 8 bits, where shapes and types allow it; else the weight as wide as x."""
    num_outputs, size = weight.shape
    if not len(x) or x.dtype != torch.bfloat16 or size % _ALIGNMENT or num_outputs % _ALIGNMENT or size > MAX_COLUMNS:
        return functional.linear(x, (weight.float() * factors.unsqueeze(1)).to(x.dtype))
    floats, token_factors = quantize(x)
    result: Tensor = torch._scaled_mm(
        floats,
        weight.t(),
        scale_a=token_factors.unsqueeze(1),
        scale_b=factors.unsqueeze(0),
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return result
