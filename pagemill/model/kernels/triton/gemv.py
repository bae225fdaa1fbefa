"""One row times a weight: the weight is read once, at memory bandwidth, with the norm before it and the bias or gated
activation after it in the same kernel. Knows no layer.

Programs own outputs; all threads of a program share a row of the weight, so that its sum is formed in one order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.choices import GemvChoice
from pagemill.model.kernels.triton.gated import activate
from pagemill.model.kernels.triton.norm_before import NormBefore


@triton.jit
def _inputs(x, residual, norm_weight, cols, K: tl.constexpr, EVEN_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
            NORM: tl.constexpr):  # fmt: skip
    """(inputs, what they are a norm of): float32 [BLOCK_K]."""
    mask = None if EVEN_K else cols < K
    other = None if EVEN_K else 0.0
    value = tl.load(x + cols, mask, other).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + cols, mask, other).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if NORM:
        return value * tl.load(norm_weight + cols, mask, other).to(tl.float32), value
    return value, value


@triton.jit
def _weights(places, cols, rows, N, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of the weight, once used never again."""
    if EVEN_N and EVEN_K:
        return tl.load(places, eviction_policy="evict_first")
    mask = (rows < N)[:, None] & (cols < K)[None, :]
    return tl.load(places, mask, 0.0, eviction_policy="evict_first")


@triton.jit
def _gemv(
    out, x, weight, factors, bias, residual, norm_weight, summed, N, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN_N: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    pid = tl.program_id(0)
    rows = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    # One 64-bit base for each program; offsets inside it fit 32 bits.
    places = weight + pid.to(tl.int64) * (BLOCK_N * K) + (tl.arange(0, BLOCK_N) * K)[:, None] + lanes[None, :]
    up_places = places + (pid.to(tl.int64) * 0 + N) * K
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    first: tl.constexpr = BLOCK_K if PDL else 0
    if PDL:
        # The weight does not depend on the kernel before: its first tile is on the way while that one ends.
        gdc_launch_dependents()
        tile = _weights(places, lanes, rows, N, K, EVEN_N, EVEN_K)
        up_tile = tile
        if GATED:
            up_tile = _weights(up_places, lanes, rows, N, K, EVEN_N, EVEN_K)
        gdc_wait()
        value, raw = _inputs(x, residual, norm_weight, lanes, K, EVEN_K, HAS_RESIDUAL, NORM)
        sums += tile.to(tl.float32) * value[None, :]
        if GATED:
            up_sums += up_tile.to(tl.float32) * value[None, :]
        if NORM:
            squares += raw * raw
            if pid == 0:
                tl.store(summed + lanes, raw.to(x.dtype.element_ty), lanes < K)
    for start in tl.range(first, K, BLOCK_K, num_stages=STAGES):
        cols = start + lanes
        tile = _weights(places + start, cols, rows, N, K, EVEN_N, EVEN_K)
        value, raw = _inputs(x, residual, norm_weight, cols, K, EVEN_K, HAS_RESIDUAL, NORM)
        sums += tile.to(tl.float32) * value[None, :]
        if GATED:
            up_tile = _weights(up_places + start, cols, rows, N, K, EVEN_N, EVEN_K)
            up_sums += up_tile.to(tl.float32) * value[None, :]
        if NORM:
            squares += raw * raw
            if pid == 0:
                tl.store(summed + cols, raw.to(x.dtype.element_ty), cols < K)
    result = tl.sum(sums, 1)
    up = tl.sum(up_sums, 1) if GATED else result
    if NORM:
        inverse = tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
        result, up = result * inverse, up * inverse
    if SCALED:
        result *= tl.load(factors + rows, rows < N, 0.0)
        up *= tl.load(factors + rows + (N if GATED else 0), rows < N, 0.0)
    if HAS_BIAS:
        result += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + rows, rows < N, 0.0).to(tl.float32)
    if GATED:
        result = activate(result, GELU) * up
    tl.store(out + rows, result.to(out.dtype.element_ty), rows < N)


def gemv(
    x: Tensor,
    weight: Tensor,
    choice: GemvChoice,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
    norm: NormBefore | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """[1, K] times [N, K] -> [1, N]; with a gate [1, N / 2]. The weight and x are contiguous. `factors` [N] float32
    are those of the rows of a weight of 8-bit floats.

    `norm`: x (plus the residual) goes through an RMSNorm first; its sum is left in norm.summed.
    """
    num_outputs, size = weight.shape
    num_outputs //= 1 if gate is None else 2
    out = torch.empty(1, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    block_n = choice.block_n
    block_k = min(choice.block_k, launch.power_of_two(size))
    residual = None if norm is None else norm.residual
    launch.on(_gemv, (triton.cdiv(num_outputs, block_n),))(
        out, x, weight, x if factors is None else factors, x if bias is None else bias,
        x if residual is None else residual, x if norm is None else norm.weight,
        x if norm is None else norm.summed, num_outputs, 0.0 if norm is None else norm.eps,
        K=size, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=choice.num_stages, EVEN_N=num_outputs % block_n == 0,
        HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh", NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, SCALED=factors is not None, PDL=launch.dependent(),
        **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
