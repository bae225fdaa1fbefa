"""Rows to 8-bit floats with a factor each: as they are, or of a gated activation in one pass. Knows no layer.

norm.py does the same to what it norms. All quantize what would have been written: rounded to the input's type first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import activate

MAX_COLUMNS = 32768
"""Of a row that a program holds in its registers."""


@triton.jit
def to_floats(values):
    """float32 [R, C] -> (8-bit floats, factors [R]): the largest of a row becomes 448."""
    factors = tl.maximum(tl.max(tl.abs(values), 1) / 448.0, 1e-12)
    scaled = tl.minimum(tl.maximum(values * (1.0 / factors)[:, None], -448.0), 448.0)
    return scaled.to(tl.float8e4nv), factors


@triton.jit
def _quantize(
    floats, factors, rows, stride, K, BLOCK: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < K
    values = tl.load(rows + row * stride + columns, real, 0.0).to(tl.float32)
    if GATED:
        up = tl.load(rows + row * stride + K + columns, real, 0.0).to(tl.float32)
        values = activate(values, GELU).to(rows.dtype.element_ty).to(tl.float32)
        values = (values * up).to(rows.dtype.element_ty).to(tl.float32)
    scaled, factor = to_floats(values[None, :])
    tl.store(floats + row * K + columns[None, :], scaled, real[None, :])
    tl.store(factors + row + tl.arange(0, 1), factor)


def quantize(rows: Tensor, gate: str | None = None) -> tuple[Tensor, Tensor]:
    """As kernels.fp8.quantize: [M, K] -> [M, K] and [M]; with a gate (silu, gelu_tanh) of what gated.gated gives,
    [M, 2 * K] -> [M, K] and [M]. K up to MAX_COLUMNS."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, size = rows.shape
    if gate is not None:
        size //= 2
    floats, factors = empty_floats(num_rows, size, rows.device)
    if num_rows:
        block = launch.power_of_two(size)
        launch.on(_quantize, (num_rows,))(
            floats, factors, rows, rows.stride(0), size, BLOCK=block, GATED=gate is not None,
            GELU=gate == "gelu_tanh", PDL=launch.dependent(), **launch.options(min(16, max(1, block // 512))),
        )  # fmt: skip
    return floats, factors


def empty_floats(num_rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for 8-bit floats [num_rows, size] and their factors."""
    floats = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=device)
    return floats, torch.empty(num_rows, dtype=torch.float32, device=device)
