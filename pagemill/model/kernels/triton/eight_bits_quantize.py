"""Rows to 8-bit floats or integers with a factor for each group of inputs: as they are, or of a gated activation in one
pass. Knows no layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import activate
from pagemill.model.kernels.triton.limits import larger, largest, within

MAX_COLUMNS = 32768
"""Of a row that a program holds in its registers, where all inputs share a factor."""
AT_ONCE = 2048
"""Inputs of a program, where groups are smaller: 16 for each thread, so that what is read and written is 16 bytes wide.
`benchmarks/gpu_quantize.py` measures others."""


@triton.jit
def quantized_groups(values, GROUP: tl.constexpr, INTEGERS: tl.constexpr):
    """float32 [R, C] -> (numbers [R, C] that fit 8 bits, in float32, and factors [R, C / GROUP]): the largest of a
    group becomes 448, or of integers 127. GROUP divides C."""
    LIMIT: tl.constexpr = 127.0 if INTEGERS else 448.0
    together = tl.reshape(values, [values.shape[0], values.shape[1] // GROUP, GROUP])
    factor = larger(largest(together, 2) / LIMIT, 1e-12)
    scaled = within(together * (1.0 / factor)[:, :, None], LIMIT)
    if INTEGERS:
        # Numbers of that size have no places after the point: the nearest integer, the even one of two.
        scaled = (scaled + 12582912.0) - 12582912.0
    return tl.reshape(scaled, values.shape), factor


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize=["M"])
def _quantize_groups(
    numbers, factors, rows, stride, M, K, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: several groups of a row, PARTS of which are the row. numbers [M, K], factors [groups, M]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    groups = tl.program_id(0) % PARTS * BLOCK_G + tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP + lanes[None, :]
    real = (lanes < GROUP)[None, :] & (columns < K)
    values = tl.load(rows + row * stride + columns, real, 0.0).to(tl.float32)
    if GATED:
        up = tl.load(rows + row * stride + K + columns, real, 0.0).to(tl.float32)
        values = activate(values, GELU).to(rows.dtype.element_ty).to(tl.float32)
        values = (values * up).to(rows.dtype.element_ty).to(tl.float32)
    scaled, factor = quantized_groups(values, BLOCK, numbers.dtype.element_ty == tl.int8)
    tl.store(numbers + row * K + columns, scaled.to(numbers.dtype.element_ty), real)
    tl.store(factors + groups.to(tl.int64)[:, None] * M + row, factor, (groups * GROUP < K)[:, None])


def quantize(
    rows: Tensor, group: int, dtype: torch.dtype, gate: str | None = None, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """As kernels.eight_bits.reference_quantize: [M, K] -> [M, K] and [ceil(K / group), M]; with a gate (silu,
    gelu_tanh) of what gated.gated gives, [M, 2 * K]. K up to MAX_COLUMNS where the group is as large. After the
    last row comes room that is not written, up to a `multiple` of rows."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, size = rows.shape
    if gate is not None:
        size //= 2
    group = min(group, size)
    numbers, factors = room_for(num_rows, size, group, dtype, multiple, rows.device)
    groups, room = factors.shape
    block = launch.power_of_two(group)
    together = min(launch.power_of_two(groups), max(1, AT_ONCE // block))
    warps = min(16, max(1, block * together // 512))
    parts = triton.cdiv(groups, together)
    if num_rows:
        launch.on(_quantize_groups, (num_rows * parts,))(
            numbers, factors, rows, rows.stride(0), room, size, GROUP=group, BLOCK_G=together, BLOCK=block,
            PARTS=parts, GATED=gate is not None, GELU=gate == "gelu_tanh", PDL=launch.dependent(),
            **launch.options(warps),
        )  # fmt: skip
    return numbers, factors


def room_for(
    num_rows: int, size: int, group: int, dtype: torch.dtype, multiple: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Room for numbers [M, size] and factors [ceil(size / group), M], where M is `num_rows` up to a `multiple`."""
    room = triton.cdiv(num_rows, multiple) * multiple
    factors = torch.empty(triton.cdiv(size, min(group, size)), room, dtype=torch.float32, device=device)
    return torch.empty(room, size, dtype=dtype, device=device), factors
