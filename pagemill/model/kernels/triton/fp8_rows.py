"""One row, and a few, times a weight of 8-bit floats that is read once. Knows no layer.

The floats become bfloat16 or float32, which hold each of them exactly, on their way to the product; the factor of an
output is applied to its sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemill.model.kernels.triton.fp8_choices import FewRowsChoice, OneRowChoice
from pagemill.model.kernels.triton.moe_activation import activate


@triton.jit
def _one_row(
    out, x, weight, factors, bias, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    GELU: tl.constexpr,
):  # fmt: skip
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    real = rows < N
    places = weight + rows.to(tl.int64)[:, None] * K + lanes[None, :]
    up_places = places + (tl.zeros([1], tl.int64) + N)[:, None] * K
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if EVEN_K:
            value = tl.load(x + start + lanes).to(tl.float32)[None, :]
            mask = real[:, None]
        else:
            inside = start + lanes < K
            value = tl.load(x + start + lanes, inside, 0.0).to(tl.float32)[None, :]
            mask = real[:, None] & inside[None, :]
        sums += tl.load(places + start, mask, 0.0).to(tl.float32) * value
        if GATED:
            up_sums += tl.load(up_places + start, mask, 0.0).to(tl.float32) * value
    result = tl.sum(sums, 1) * tl.load(factors + rows, real, 0.0)
    if HAS_BIAS:
        result += tl.load(bias + rows, real, 0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1) * tl.load(factors + N + rows, real, 0.0)
        if HAS_BIAS:
            up += tl.load(bias + N + rows, real, 0.0).to(tl.float32)
        result = activate(result, GELU) * up
    tl.store(out + rows, result.to(out.dtype.element_ty), real)


@triton.jit
def _few_rows(
    parts, x, weight, M, N, x_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Sums [SPLIT, M, N] float32 without factors. The weight is the left operand: its rows fill the wide side of the
    tensor cores' instruction."""
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    EVEN_K: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    part = tl.program_id(1)
    tokens, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    values = x + tl.where(tokens < M, tokens, 0)[:, None] * x_stride + part * PART + lanes[None, :]
    # Rows beyond the last repeat it; what they give is not stored.
    places = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + part * PART + lanes[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, PART, BLOCK_K):
        if EVEN_K:
            a = tl.load(values + start)
            tile = tl.load(places + start)
        else:
            inside = (part * PART + start + lanes < K)[None, :]
            a = tl.load(values + start, inside, 0.0)
            tile = tl.load(places + start, inside, 0.0)
        sums = tl.dot(tile.to(a.dtype), tl.trans(a), sums, input_precision="ieee")
    targets = parts + (part * M + tokens).to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(targets, sums, (tokens < M)[None, :] & (rows < N)[:, None])


@triton.jit
def _finish(
    out, parts, factors, bias, M, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """The sum of the parts, factors, bias and activation; N is the width of the result."""
    STACKED = N * 2 if GATED else N
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < N
    result = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        places = parts + (part * M + token).to(tl.int64) * STACKED + columns
        result += tl.load(places, real, 0.0)
        if GATED:
            up += tl.load(places + N, real, 0.0)
    result *= tl.load(factors + columns, real, 0.0)
    if HAS_BIAS:
        result += tl.load(bias + columns, real, 0.0).to(tl.float32)
    if GATED:
        up *= tl.load(factors + N + columns, real, 0.0)
        if HAS_BIAS:
            up += tl.load(bias + N + columns, real, 0.0).to(tl.float32)
        result = activate(result, GELU) * up
    tl.store(out + token.to(tl.int64) * N + columns, result.to(out.dtype.element_ty), real)


def one_row(
    x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None, gate: str | None, choice: OneRowChoice
) -> Tensor:
    """[1, K] times [N, K] with factors [N] -> [1, N]; with a gate [1, N / 2]."""
    stacked, size = weight.shape
    num_outputs = stacked if gate is None else stacked // 2
    out = torch.empty(1, num_outputs, dtype=x.dtype, device=x.device)
    _one_row[(triton.cdiv(num_outputs, choice.block_n),)](
        out, x, weight, factors, factors if bias is None else bias, num_outputs, K=size, BLOCK_N=choice.block_n,
        BLOCK_K=min(choice.block_k, triton.next_power_of_2(size)), HAS_BIAS=bias is not None, GATED=gate is not None,
        GELU=gate == "gelu_tanh", num_warps=choice.num_warps,
    )  # fmt: skip
    return out


def few_rows(
    x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None, gate: str | None, choice: FewRowsChoice
) -> Tensor:
    """[M, K] times [N, K] with factors [N] -> [M, N]; with a gate [M, N / 2]."""
    num_rows, (stacked, size) = len(x), weight.shape
    num_outputs = stacked if gate is None else stacked // 2
    parts = torch.empty(choice.split_k, num_rows, stacked, dtype=torch.float32, device=x.device)
    _few_rows[(triton.cdiv(stacked, choice.block_n), choice.split_k)](
        parts, x, weight, num_rows, stacked, x.stride(0), K=size, BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, SPLIT=choice.split_k, num_warps=choice.num_warps,
        num_stages=choice.num_stages,
    )  # fmt: skip
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(num_outputs))
    _finish[(num_rows, triton.cdiv(num_outputs, block))](
        out, parts, factors, factors if bias is None else bias, num_rows, num_outputs, SPLIT=choice.split_k,
        BLOCK=block, HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh",
    )  # fmt: skip
    return out
