"""A few rows times a weight of 8-bit floats that is read once; gemv.py has the kernel for one row. Knows no layer.

The floats become bfloat16 or float32, which hold each of them exactly, on their way to the product; the factor of an
output is applied to its sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.fp8_choices import FewRowsChoice
from pagemill.model.kernels.triton.gated import activate


@triton.jit(do_not_specialize=["M"])
def _few_rows(
    parts, x, weight, M, N, x_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums [SPLIT, M, N] float32 without factors. The weight is the left operand: its rows fill the wide side of the
    tensor cores' instruction."""
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    EVEN: tl.constexpr = EVEN_N and (K % (SPLIT * BLOCK_K) == 0)
    part = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tokens, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    values = x + tl.where(tokens < M, tokens, 0)[:, None] * x_stride + part * PART + lanes[None, :]
    places = weight + rows.to(tl.int64)[:, None] * K + part * PART + lanes[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, PART, BLOCK_K):
        if EVEN:
            a = tl.load(values + start)
            tile = tl.load(places + start)
        else:
            inside = (part * PART + start + lanes < K)[None, :]
            a = tl.load(values + start, inside, 0.0)
            tile = tl.load(places + start, (rows < N)[:, None] & inside, 0.0)
        sums = tl.dot(tile.to(a.dtype), tl.trans(a), sums, input_precision="ieee")
    targets = parts + (part * M + tokens).to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(targets, sums, (tokens < M)[None, :] & (rows < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def _finish(
    out, parts, factors, bias, M, N, SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sum of the parts, factors, bias and activation; N is the width of the result."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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


def few_rows(
    x: Tensor, weight: Tensor, factors: Tensor, bias: Tensor | None, gate: str | None, choice: FewRowsChoice
) -> Tensor:
    """[M, K] times [N, K] with factors [N] -> [M, N]; with a gate [M, N / 2]."""
    num_rows, (stacked, size) = len(x), weight.shape
    num_outputs = stacked if gate is None else stacked // 2
    parts = torch.empty(choice.split_k, num_rows, stacked, dtype=torch.float32, device=x.device)
    launch.on(_few_rows, (triton.cdiv(stacked, choice.block_n), choice.split_k))(
        parts, x, weight, num_rows, stacked, x.stride(0), K=size, BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, SPLIT=choice.split_k,
        EVEN_N=stacked % choice.block_n == 0, PDL=launch.dependent(),
        num_stages=choice.num_stages, **launch.options(choice.num_warps),
    )  # fmt: skip
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(num_outputs))
    launch.on(_finish, (num_rows, triton.cdiv(num_outputs, block)))(
        out, parts, factors, factors if bias is None else bias, num_rows, num_outputs, SPLIT=choice.split_k,
        BLOCK=block, HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh",
        PDL=launch.dependent(), **launch.options(),
    )  # fmt: skip
    return out
