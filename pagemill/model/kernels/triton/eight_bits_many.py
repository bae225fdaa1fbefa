"""Many rows of 8 bits times a weight of 8 bits, on the tensor cores' 8-bit products: floats with factors for each block
of inputs, or integers with one for each row and each output. Knows no layer."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.cublas_lt import Kind
from pagemill.model.kernels.eight_bits import BLOCK, EightBits
from pagemill.model.kernels.fp8_tiles import multiply
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.eight_bits_choices import ManyChoice

_BAND = 8
"""Blocks of rows that are gone through before the next block of outputs, so that both stay in the L2 cache."""


@triton.jit(do_not_specialize=["M"])
def _eight_bits_many(
    out, x, factors, weight, scales, bias, M, N, group_stride, row_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BAND: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a tile of out [M, N]. x [M, K] with factors [groups, M]; weight [N, K] with scales [groups,
    blocks of outputs]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    INTEGERS: tl.constexpr = weight.dtype.element_ty == tl.int8
    EVEN: tl.constexpr = K % BLOCK_K == 0
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    band = pid // (BAND * across)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * BAND, BAND)
    inside = pid % (BAND * across)
    first = inside // height * BLOCK_N
    tokens = (band * BAND + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_N)
    # What lies beyond the ends repeats the first, and is not stored.
    known_tokens = tl.where(tokens < M, tokens, 0)
    known_rows = tl.where(rows < N, rows, 0)
    lanes = tl.arange(0, BLOCK_K)
    x_places = x + known_tokens.to(tl.int64)[:, None] * K + lanes[None, :]
    places = weight + known_rows.to(tl.int64)[:, None] * K + lanes[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if EVEN:
            left = tl.load(x_places + start)
            right = tl.load(places + start)
        else:
            real = (start + lanes < K)[None, :]
            left = tl.load(x_places + start, real, 0.0)
            right = tl.load(places + start, real, 0.0)
        if BLOCKED:
            group = start // BLOCK_K
            factor = tl.load(factors + group * M + known_tokens)
            product = tl.dot(left, right.T)
            if ROWS % BLOCK_N == 0:
                sums += (
                    product * (factor * tl.load(scales + group * group_stride + first // ROWS * row_stride))[:, None]
                )
            else:
                scale = tl.load(scales + group * group_stride + known_rows // ROWS * row_stride)
                sums += product * factor[:, None] * scale[None, :]
        else:
            sums = tl.dot(left, right.T, sums, out_dtype=tl.int32 if INTEGERS else tl.float32)
    result = sums.to(tl.float32)
    if not BLOCKED:
        result *= tl.load(factors + known_tokens)[:, None] * tl.load(scales + known_rows // ROWS * row_stride)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + known_rows).to(tl.float32)[None, :]
    targets = out + tokens.to(tl.int64)[:, None] * N + rows[None, :]
    tl.store(targets, result.to(out.dtype.element_ty), (tokens < M)[:, None] & (rows < N)[None, :])


@functools.cache
def _library_takes_blocks() -> bool:
    """Whether cuBLAS multiplies floats in blocks of 128 x 128: from CUDA 12.9 on, on compute capability 9.0."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return version >= (12, 9) and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _by_library(weight: EightBits, dtype: torch.dtype) -> bool:
    num_outputs, size = weight.values.shape
    fits = weight.rows == BLOCK and dtype == torch.bfloat16 and num_outputs % BLOCK == 0 and size % (4 * BLOCK) == 0
    return fits and weight.values.is_cuda and _library_takes_blocks()


def product(
    numbers: Tensor,
    factors: Tensor,
    weight: EightBits,
    choice: ManyChoice,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Rows as `eight_bits_quantize.quantize` makes them times [N, K] -> [M, N] in dtype."""
    if _by_library(weight, dtype):
        made = multiply(Kind.FP8_BLOCKS, (numbers, factors), (weight.values, weight.scales))
        if made is None:
            made = torch._scaled_mm(
                numbers, weight.values.t(), scale_a=factors.t(), scale_b=weight.scales, out_dtype=dtype
            )
        return made if bias is None else made.add_(bias)
    (num_rows, size), num_outputs = numbers.shape, weight.num_outputs
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=numbers.device)
    tiles = triton.cdiv(num_rows, choice.block_m) * triton.cdiv(num_outputs, choice.block_n)
    launch.on(_eight_bits_many, (tiles,))(
        out, numbers, factors, weight.values, weight.scales, out if bias is None else bias, num_rows, num_outputs,
        *weight.scales.stride(), K=size, ROWS=weight.rows, BLOCKED=len(weight.scales) > 1, BLOCK_M=choice.block_m,
        BLOCK_N=choice.block_n, BLOCK_K=BLOCK, BAND=_BAND, HAS_BIAS=bias is not None, PDL=launch.dependent(),
        num_stages=choice.num_stages, **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
