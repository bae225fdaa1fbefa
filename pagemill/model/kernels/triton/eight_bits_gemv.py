"""One row times a weight of 8-bit floats in blocks of 128 x 128, read once. Knows no layer.

The outputs of a program lie in one block, so the row is multiplied with the block's scale instead of the weight. What a
program reads first of weight and scales is asked for before the kernel before has ended.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.eight_bits import BLOCK, EightBits
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.choices import GemvChoice
from pagemill.model.kernels.triton.gated import activate


@triton.jit
def _tile(places, columns, rows, N, K: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_N, G, 128] of the weight, once used never again."""
    if EVEN:
        return tl.load(places, eviction_policy="evict_first")
    mask = (rows < N)[:, None, None] & (columns < K)[None, :, :]
    return tl.load(places, mask, 0.0, eviction_policy="evict_first")


@triton.jit
def _scales(scales, groups, row, group_stride, row_stride, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[G] of the blocks that a row is in."""
    return tl.load(scales + groups * group_stride + row // BLOCK_K * row_stride, groups * BLOCK_K < K, 0.0)


@triton.jit
def _blocks_gemv(
    out, x, weight, scales, bias, N, group_stride, row_stride,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: BLOCK_N outputs, which go through all inputs, BLOCK_G blocks at a time, with the next on their way."""
    STEP: tl.constexpr = BLOCK_G * BLOCK_K
    EVEN: tl.constexpr = EVEN_N and K % STEP == 0
    pid = tl.program_id(0)
    first = pid * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    blocks = tl.arange(0, BLOCK_G)
    inside = blocks[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    # One 64-bit base for each program; offsets inside it fit 32 bits.
    places = weight + first.to(tl.int64) * K + (tl.arange(0, BLOCK_N) * K)[:, None, None] + inside[None, :, :]
    up_places = places + (pid.to(tl.int64) * 0 + N) * K
    if PDL:
        gdc_launch_dependents()
    # The weight does not depend on the kernel before: its first tile is on the way while that one ends.
    tile = _tile(places, inside, rows, N, K, EVEN)
    scale = _scales(scales, blocks, first, group_stride, row_stride, K, BLOCK_K)
    up_tile = tile
    up_scale = scale
    if GATED:
        up_tile = _tile(up_places, inside, rows, N, K, EVEN)
        up_scale = _scales(scales, blocks, N + first, group_stride, row_stride, K, BLOCK_K)
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_G, BLOCK_K], tl.float32)
    up_sums = sums
    for start in tl.static_range(0, K, STEP):
        now = tile
        up_now = up_tile
        scale_now = scale
        up_scale_now = up_scale
        if start + STEP < K:
            after = start + STEP
            groups = after // BLOCK_K + blocks
            tile = _tile(places + after, after + inside, rows, N, K, EVEN)
            scale = _scales(scales, groups, first, group_stride, row_stride, K, BLOCK_K)
            if GATED:
                up_tile = _tile(up_places + after, after + inside, rows, N, K, EVEN)
                up_scale = _scales(scales, groups, N + first, group_stride, row_stride, K, BLOCK_K)
        value = tl.load(x + start + inside, start + inside < K, 0.0).to(tl.float32)
        sums += now.to(tl.float32) * (value * scale_now[:, None])[None, :, :]
        if GATED:
            up_sums += up_now.to(tl.float32) * (value * up_scale_now[:, None])[None, :, :]
    result = tl.sum(tl.sum(sums, 2), 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)
    if GATED:
        up = tl.sum(tl.sum(up_sums, 2), 1)
        if HAS_BIAS:
            up += tl.load(bias + N + rows, rows < N, 0.0).to(tl.float32)
        result = activate(result, GELU) * up
    tl.store(out + rows, result.to(out.dtype.element_ty), rows < N)


def blocks_gemv(
    x: Tensor, weight: EightBits, choice: GemvChoice, *, bias: Tensor | None = None, gate: str | None = None
) -> Tensor:
    """[1, K] times [N, K] -> [1, N]; with a gate [1, N / 2], where N / 2 is a multiple of 128. The elements of x are
    side by side, and 128 outputs share their scales."""
    stacked, size = weight.values.shape
    num_outputs = stacked // (1 if gate is None else 2)
    out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    blocks = max(1, min(choice.block_k, launch.power_of_two(size)) // BLOCK)
    launch.on(_blocks_gemv, (triton.cdiv(num_outputs, choice.block_n),))(
        out, x, weight.values, weight.scales, x if bias is None else bias, num_outputs, *weight.scales.stride(),
        K=size, BLOCK_N=choice.block_n, BLOCK_G=blocks, BLOCK_K=BLOCK,
        EVEN_N=num_outputs % choice.block_n == 0, HAS_BIAS=bias is not None,
        GATED=gate is not None, GELU=gate == "gelu_tanh", PDL=launch.dependent(),
        **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
