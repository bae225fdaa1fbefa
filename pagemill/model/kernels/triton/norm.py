"""RMSNorm with the residual sum before it, and numbers of 8 bits after it: one read and one write of each row.

Knows no layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.eight_bits_quantize import quantized_groups, room_for
from pagemill.model.kernels.triton.fp8_quantize import empty_floats, to_floats
from pagemill.model.kernels.triton.parts import sum_parts

_TILE = 2048
"""Elements that a program of short rows takes at once."""


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize_on_alignment=["num_rows"], do_not_specialize=["factor_stride"])
def _rms_norm(
    out, factors, x, weight, residual,
    num_rows, num_heads, x_stride, head_stride, residual_stride, part_stride, factor_stride, eps,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ROUND_ONCE: tl.constexpr, QUANTIZE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows. With QUANTIZE a row has one factor, or with a GROUP one for each so many inputs: factors
    [groups, factor_stride]."""
    TYPE: tl.constexpr = x.dtype.element_ty if SPLIT == 1 else out.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < N)[None, :]
    if PDL:
        gdc_launch_dependents()
    scale = tl.load(weight + cols, cols < N, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    starts = (rows // num_heads).to(tl.int64) * x_stride + (rows % num_heads) * head_stride
    if SPLIT == 1:
        value = tl.load(x + starts[:, None] + cols[None, :], mask, 0.0).to(tl.float32)
    else:
        value = sum_parts(x + starts[:, None] + cols[None, :], part_stride, mask, SPLIT).to(TYPE).to(tl.float32)
    if HAS_RESIDUAL:
        places = residual + rows[:, None].to(tl.int64) * residual_stride + cols[None, :]
        rounded = (tl.load(places, mask, 0.0).to(tl.float32) + value).to(residual.dtype.element_ty)
        tl.store(places, rounded, mask)
        value = rounded.to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(value * value, 1) / N + eps)
    value = value * inverse[:, None]
    if not ROUND_ONCE:
        value = value.to(TYPE).to(tl.float32)
    normed = (value * scale[None, :]).to(TYPE)
    places = out + rows[:, None].to(tl.int64) * N + cols[None, :]
    if GROUP > 0:
        numbers, group_factors = quantized_groups(normed.to(tl.float32), GROUP, out.dtype.element_ty == tl.int8)
        tl.store(places, numbers.to(out.dtype.element_ty), mask)
        groups = tl.arange(0, BLOCK // GROUP)
        known = (rows < num_rows)[:, None] & (groups * GROUP < N)[None, :]
        tl.store(factors + groups.to(tl.int64)[None, :] * factor_stride + rows[:, None], group_factors, known)
    elif QUANTIZE:
        floats, row_factors = to_floats(normed.to(tl.float32))
        # Wider stores would change the layout of all, so the order of the sum above, so its bits.
        tl.store(tl.max_contiguous(places, [1, 8]), floats, mask)
        tl.store(factors + rows, row_factors, rows < num_rows)
    else:
        tl.store(places, normed, mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """As reference.rms_norm: x [T, N] or [T, H, N], the last dimension contiguous; `residual` [T, N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(out, None, x, weight, eps, residual)
    return out


def rms_norm_of_parts(parts: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype, residual: Tensor | None
) -> Tensor:  # fmt: skip
    """`rms_norm` [T, N] of what linear layers have left, [parts, T, N] float32: their sum, rounded."""
    out = torch.empty(parts.shape[1:], dtype=out_dtype, device=parts.device)
    _launch(out, None, parts, weight, eps, residual, len(parts))
    return out


def rms_norm_floats(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`rms_norm` of [T, N], quantized: 8-bit floats [T, N] and factors [T], bit for bit those of its result."""
    floats, factors = empty_floats(len(x), x.shape[1], x.device)
    _launch(floats, factors, x, weight, eps, residual)
    return floats, factors


def rms_norm_groups(
    x: Tensor, norm: tuple[Tensor, float], residual: Tensor | None, group: int, dtype: torch.dtype, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of [T, N], quantized: what eight_bits_quantize.quantize makes of its result. `group`: a power of
    two, or N and more."""
    size = x.shape[1]
    numbers, factors = room_for(len(x), size, group, dtype, multiple, x.device)
    _launch(numbers[: len(x)], factors, x, *norm, residual, group=group if group < size else launch.power_of_two(size))
    return numbers, factors


def _launch(
    out: Tensor,
    factors: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    split: int = 1,
    group: int = 0,
) -> None:
    """`split`: parts, the first dimension of x where there are several. `group`: inputs that share a factor, where
    factors are [groups, room]."""
    part_stride, rows_of = (x.stride(0), x[0]) if split > 1 else (0, x)
    size = x.shape[-1]
    num_heads = rows_of.shape[1] if rows_of.dim() == 3 else 1
    num_rows = out.numel() // size
    block = launch.power_of_two(size)
    if not num_rows:
        return
    rows = max(1, min(_TILE // block, launch.power_of_two(num_rows)))
    launch.on(_rms_norm, (triton.cdiv(num_rows, rows),))(
        out, weight if factors is None else factors, x, weight, x if residual is None else residual,
        num_rows, num_heads, rows_of.stride(0), rows_of.stride(1) if rows_of.dim() == 3 else 0,
        0 if residual is None else residual.stride(0), part_stride, 0 if factors is None else factors.stride(0), eps,
        N=size, ROWS=rows, BLOCK=block, SPLIT=split, HAS_RESIDUAL=residual is not None,
        ROUND_ONCE=weight.dtype == torch.float32, QUANTIZE=factors is not None, GROUP=group,
        PDL=launch.dependent(), **launch.options(_num_warps(rows * block)),
    )  # fmt: skip


def _num_warps(elements: int) -> int:
    """About eight elements a thread."""
    return max(1, min(16, elements // 256))
