"""A few rows (2 to 64) times a weight, on the tensor cores: the weight is read once. Knows no layer.

With a split over the inputs the parts are written apart and summed in order by a second kernel: no atomics, so the
result of a run is that of the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.choices import SkinnyChoice, rows_class
from pagemill.model.kernels.triton.gated import activate

_COMBINED = 1024


@triton.jit
def _skinny(
    out, x, weight, bias, M, N, x_stride, out_stride, part_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    part = tl.program_id(1)
    tokens = tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        cols = part * PART + start + lanes
        inside = cols < K
        a = tl.load(x + tokens[:, None] * x_stride + cols[None, :], (tokens < M)[:, None] & inside[None, :], 0.0)
        places = weight + rows[:, None].to(tl.int64) * K + cols[None, :]
        mask = (rows < N)[:, None] & inside[None, :]
        b = tl.load(places, mask, 0.0)
        sums = tl.dot(b, tl.trans(a), sums) if SWAP else tl.dot(a, tl.trans(b), sums)
        if GATED:
            b = tl.load(places + (part.to(tl.int64) * 0 + N) * K, mask, 0.0)
            up_sums = tl.dot(b, tl.trans(a), up_sums) if SWAP else tl.dot(a, tl.trans(b), up_sums)
    if SWAP:
        sums, up_sums = tl.trans(sums), tl.trans(up_sums)
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    places = out + part.to(tl.int64) * part_stride + tokens[:, None] * out_stride + rows[None, :]
    if SPLIT > 1:
        tl.store(places, sums, mask)
        if GATED:
            tl.store(places + N, up_sums, mask)
    else:
        if HAS_BIAS:
            sums += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)[None, :]
            if GATED:
                up_sums += tl.load(bias + N + rows, rows < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            sums = activate(sums, GELU) * up_sums
        tl.store(places, sums.to(out.dtype.element_ty), mask)


@triton.jit
def _combine(
    out, parts, bias, N, row_size, part_stride,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    result = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        places = parts + part * part_stride + token * row_size + cols
        result += tl.load(places, mask, 0.0)
        if GATED:
            up += tl.load(places + N, mask, 0.0)
    if HAS_BIAS:
        result += tl.load(bias + cols, mask, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + N + cols, mask, 0.0).to(tl.float32)
    if GATED:
        result = activate(result, GELU) * up
    tl.store(out + token * N + cols, result.to(out.dtype.element_ty), mask)


def skinny(
    x: Tensor,
    weight: Tensor,
    choice: SkinnyChoice,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, K] times [N, K] -> [M, N], with a gate [M, N / 2]; M up to 64, two-byte elements, the weight contiguous."""
    num_rows, size, gated = len(x), weight.shape[1], gate is not None
    stacked = weight.shape[0]
    num_outputs = stacked // 2 if gated else stacked
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    split = choice.split_k
    parts = out
    if split > 1:
        parts = torch.empty(split, num_rows, stacked, dtype=torch.float32, device=x.device)
    epilogue = {
        "HAS_BIAS": bias is not None, "GATED": gated, "GELU": gate == "gelu_tanh", "PDL": launch.dependent(),
    }  # fmt: skip
    bias = x if bias is None else bias
    _skinny[(triton.cdiv(num_outputs, choice.block_n), split)](
        parts, x, weight, bias, num_rows, num_outputs, x.stride(0), stacked if split > 1 else num_outputs,
        num_rows * stacked if split > 1 else 0,
        K=size, BLOCK_M=rows_class(num_rows), BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, SPLIT=split,
        STAGES=choice.num_stages, SWAP=choice.weight_first, **epilogue, **launch.options(choice.num_warps),
    )  # fmt: skip
    if split > 1:
        combine_parts(out, parts, bias, epilogue)
    return out


def combine_parts(out: Tensor, parts: Tensor, bias: Tensor, epilogue: dict[str, bool]) -> None:
    """Sum parts [S, M, N] float32 in order, with what the kernel's constants say comes after it, to out [M, N], or
    with a gate [M, N / 2]."""
    split, num_rows, stacked = parts.shape
    num_outputs = out.shape[1]
    block = min(_COMBINED, launch.power_of_two(num_outputs))
    _combine[(num_rows, triton.cdiv(num_outputs, block))](
        out, parts, bias, num_outputs, stacked, num_rows * stacked, SPLIT=split, BLOCK=block, **epilogue,
        **launch.options(),
    )  # fmt: skip
