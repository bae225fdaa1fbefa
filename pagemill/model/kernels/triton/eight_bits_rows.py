"""A few rows times a weight of 8 bits that is read once: floats with a scale for each block of inputs, or integers with
one for each output. Knows no layer.

The numbers become those of the rows' type, which holds each of them exactly, on their way to the product. The weight is
the left operand: its rows fill the wide side of the tensor cores' instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.eight_bits import BLOCK, EightBits
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.eight_bits_choices import FewChoice
from pagemill.model.kernels.triton.parts import LAST_SUMS_ROWS, MAX_COUNTERS, combine, counters_of, end


@triton.jit
def _times(sums, tile, x, scales, row_stride, rows, stacked, ROWS: tl.constexpr, BLOCKED: tl.constexpr):
    """sums [N, M] plus a tile of the weight [N, 128] times x [M, 128]; `scales`: of these inputs."""
    left = tile.to(tl.float32).to(x.dtype) if tile.dtype == tl.int8 else tile.to(x.dtype)
    if BLOCKED:
        scale = tl.load(scales + rows // ROWS * row_stride, rows < stacked, 0.0)
        product = tl.dot(left, x.T, tl.zeros(sums.shape, tl.float32), input_precision="ieee")
        sums += product * scale[:, None]
    else:
        sums = tl.dot(left, x.T, sums, input_precision="ieee")
    return sums


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize=["M"])
def _eight_bits_rows(
    out, parts, counters, x, x_stride, weight, scales, bias, M, N, stacked, group_stride, row_stride, part_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr, LAST_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs and part of the inputs, block of rows), the parts of a block side by side.

    out [M, N]; parts [SPLIT, M, stacked] float32; counters, one for each block, 0 before and after; x [M, K]; weight
    [stacked, K], where stacked is 2 * N if gated; scales [groups, blocks of outputs].
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    EVEN: tl.constexpr = EVEN_N and K % BLOCK_K == 0 and STEPS % SPLIT == 0
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = part * (PART * BLOCK_K) + tl.arange(0, BLOCK_K)
    places = weight + rows.to(tl.int64)[:, None] * K + lanes[None, :]
    up_places = places + (tl.program_id(0) * 0 + N).to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_places = x + tokens.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in tl.range(0, PART, num_stages=STAGES):
        start = turn * BLOCK_K
        if EVEN:
            tile = tl.load(places + start)
            value = tl.load(x_places + start, (tokens < M)[:, None], 0.0)
        else:
            inside = (start + lanes < K)[None, :]
            tile = tl.load(places + start, (rows < N)[:, None] & inside, 0.0)
            value = tl.load(x_places + start, (tokens < M)[:, None] & inside, 0.0)
        # Beyond the end, the last group again, times rows that are zeros there.
        group = scales + tl.minimum(part * PART + turn, STEPS - 1) * group_stride
        sums = _times(sums, tile, value, group, row_stride, rows, stacked, ROWS, BLOCKED)
        if GATED:
            if EVEN:
                up_tile = tl.load(up_places + start)
            else:
                up_tile = tl.load(up_places + start, (rows < N)[:, None] & (start + lanes < K)[None, :], 0.0)
            up_sums = _times(up_sums, up_tile, value, group, row_stride, N + rows, stacked, ROWS, BLOCKED)
    if not BLOCKED:
        sums *= tl.load(scales + rows // ROWS * row_stride, rows < N, 0.0)[:, None]
        if GATED:
            up_sums *= tl.load(scales + (N + rows) // ROWS * row_stride, rows < N, 0.0)[:, None]
    end(
        out, parts, counters, sums.T, up_sums.T, bias, tokens, rows, block, part, M, N, stacked, part_stride,
        SPLIT, LAST_SUMS, HAS_BIAS, GATED, GELU,
    )  # fmt: skip


def few_rows(
    x: Tensor, weight: EightBits, choice: FewChoice, *, bias: Tensor | None = None, gate: str | None = None
) -> Tensor:
    """[M, K] times [N, K] -> [M, N]; with a gate [M, N / 2]. x has rows side by side, of a type of 16 or 32 bits."""
    num_rows, size = x.shape
    stacked = weight.num_outputs
    num_outputs = stacked // (1 if gate is None else 2)
    split = choice.split_k
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    shape = (split, num_rows, stacked)
    parts = out if split == 1 else torch.empty(shape, dtype=torch.float32, device=x.device)
    blocks, tiles = triton.cdiv(num_outputs, choice.block_n), triton.cdiv(num_rows, choice.block_m)
    few = num_rows <= LAST_SUMS_ROWS and tiles == 1 and blocks <= MAX_COUNTERS
    counters = counters_of(x.device) if few and split > 1 else None
    launch.on(_eight_bits_rows, (blocks * split, tiles))(
        out, parts, out if counters is None else counters, x, x.stride(0), weight.values, weight.scales,
        out if bias is None else bias, num_rows, num_outputs, stacked, *weight.scales.stride(), parts.stride(0),
        K=size, ROWS=weight.rows, BLOCKED=len(weight.scales) > 1, BLOCK_M=choice.block_m, BLOCK_N=choice.block_n,
        BLOCK_K=BLOCK, SPLIT=split, STAGES=choice.num_stages, EVEN_N=num_outputs % choice.block_n == 0,
        LAST_SUMS=counters is not None, HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh",
        PDL=launch.dependent(), **launch.options(choice.num_warps),
    )  # fmt: skip
    if split > 1 and counters is None:
        combine(out, parts, bias, gate)
    return out
