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
from pagemill.model.kernels.triton.limits import larger, largest, within

MAX_COLUMNS = 32768
"""Of a row that a program holds in its registers."""


@triton.jit
def _factors(size):
    """Of the largest magnitude; NaN of NaN."""
    return larger(size / 448.0, 1e-12)


@triton.jit
def _scaled(values, factors):
    return within(values * (1.0 / factors), 448.0).to(tl.float8e4nv)


@triton.jit
def to_floats(values):
    """float32 [R, C] -> (8-bit floats, factors [R]): the largest of a row becomes 448."""
    factors = _factors(largest(values, 1))
    return _scaled(values, factors[:, None]), factors


@triton.jit
def _values(row, columns, K, MASKED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr):
    """What is quantized of some columns, in the row's type."""
    real = columns < K if MASKED else None
    other = 0.0 if MASKED else None
    values = tl.load(row + columns, real, other)
    if GATED:
        up = tl.load(row + K + columns, real, other).to(tl.float32)
        values = activate(values.to(tl.float32), GELU).to(row.dtype.element_ty).to(tl.float32)
        values = (values * up).to(row.dtype.element_ty)
    return values


@triton.jit
def _quantize(
    floats, factors, rows, stride, K, FIRST: tl.constexpr, SECOND: tl.constexpr, MASKED: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a row, FIRST columns of it and then SECOND, if any. MASKED: the last of them are not all there."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    rows += row * stride
    floats += row * K
    columns1 = tl.arange(0, FIRST)
    values1 = _values(rows, columns1, K, MASKED and SECOND == 0, GATED, GELU)
    size = largest(values1.to(tl.float32), 0)
    if SECOND:
        columns2 = FIRST + tl.arange(0, SECOND)
        values2 = _values(rows, columns2, K, MASKED, GATED, GELU)
        size = larger(size, largest(values2.to(tl.float32), 0))
    factor = _factors(size)
    floats1 = _scaled(values1.to(tl.float32), factor)
    tl.store(floats + columns1, floats1, columns1 < K if MASKED and SECOND == 0 else None)
    if SECOND:
        tl.store(floats + columns2, _scaled(values2.to(tl.float32), factor), columns2 < K if MASKED else None)
    tl.store(factors + row, factor)


def quantize(rows: Tensor, gate: str | None = None) -> tuple[Tensor, Tensor]:
    """As kernels.fp8.quantize: [M, K] -> [M, K] and [M]; with a gate (silu, gelu_tanh) of what gated.gated gives,
    [M, 2 * K] -> [M, K] and [M]. K up to MAX_COLUMNS."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, size = rows.shape
    if gate is not None:
        size //= 2
    floats, factors = empty_floats(num_rows, size, rows.device)
    if num_rows:
        first, second = pieces(size)
        launch.on(_quantize, (num_rows,))(
            floats, factors, rows, rows.stride(0), size, FIRST=first, SECOND=second, MASKED=first + second != size,
            GATED=gate is not None, GELU=gate == "gelu_tanh", PDL=launch.dependent(), **launch.options(_warps(first)),
        )  # fmt: skip
    return floats, factors


def pieces(size: int) -> tuple[int, int]:
    """Powers of two that cover a row together: one, and 0, where two would not be less."""
    whole = launch.power_of_two(size)
    first = whole // 2
    second = launch.power_of_two(size - first) if size > first else 0
    return (first, second) if 0 < second < first else (whole, 0)


def _warps(columns: int) -> int:
    """More would leave room for fewer programs on a multiprocessor, and those of few rows wait for each other's."""
    return min(8 if columns <= MAX_COLUMNS // 2 else 16, max(1, columns // 512))


def empty_floats(num_rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for 8-bit floats [num_rows, size] and their factors."""
    floats = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=device)
    return floats, torch.empty(num_rows, dtype=torch.float32, device=device)
