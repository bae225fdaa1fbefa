"""A few rows (2 to 64) times a weight, tiles fetched by the copy engine (TMA): the weight is read once, at memory
bandwidth. Knows no layer.

A program owns 64 outputs (of each half, where gated) and one part of the inputs. It multiplies the weight by the rows,
not the rows by the weight: the tensor cores' tiles have 64 rows, more than there are tokens. All programs are resident
at once and ask for equally much, so that they end together. Parts of the inputs are summed in order, so that a run
gives the bits of the one before: by the last program of an output to arrive, which saves a kernel, or where more rows
would keep that one program busy for longer than a kernel takes to start, by a second kernel, which may be a norm's.

An RMSNorm between two of these kernels can be theirs: the first adds the residual, the second multiplies by factors.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.arrival import arrives_last
from pagemill.model.kernels.triton.choices import SKINNY_OUTPUTS, SkinnyChoice, rows_class
from pagemill.model.kernels.triton.parts import MAX_COUNTERS, all_parts, combine, counters_of, finish, leave

_TILE = tl.constexpr(SKINNY_OUTPUTS)
LAST_SUMS_ROWS = 16
"""Up to here the last program sums."""


@triton.jit
def _add(out, residual, squares, sums, old, scale, tokens, rows, M, N):
    """The sum with the residual: in its place, times the weight of the norm in `out`, and for the norm's other factor
    the sum of its squares."""
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    places = tokens[:, None] * N + rows[None, :]
    total = (sums.to(out.dtype.element_ty).to(tl.float32) + old.to(tl.float32)).to(out.dtype.element_ty)
    wide = total.to(tl.float32)
    tl.store(out + places, (wide * scale.to(tl.float32)[None, :]).to(out.dtype.element_ty), mask)
    tl.store(residual + places, total, mask)
    tl.store(squares + tokens, tl.sum(wide * wide, 1), tokens < M)


@triton.jit
def _multiply(
    rows_map, weight_map, x, x_stride, first, begin, M, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[_TILE, BLOCK_M] twice: outputs from `first` on, of each half where gated, of PART inputs from `begin` on.

    EARLY: the loop's first tiles of the weight are asked for before the kernel before has ended. The rows must be asked
    for after it, so they come by plain loads, a turn ahead; the first turn multiplies nothing (inputs beyond K are
    zeros) and only loads.
    """
    sums = tl.zeros([_TILE, BLOCK_M], tl.float32)
    up_sums = sums
    if EARLY:
        tokens, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        places = x + tokens[:, None] * x_stride + lanes[None, :]
        rows = tl.zeros([BLOCK_M, BLOCK_K], x.dtype.element_ty)
        for turn in tl.range(0, PART // BLOCK_K + 1, num_stages=STAGES):
            cols = begin + turn * BLOCK_K
            if PDL:
                gdc_wait()  # in each turn: what is before the loop comes before its first tiles, too
            mask = (tokens < M)[:, None] & (cols + lanes < K)[None, :]
            next_rows = tl.load(places + cols, mask, 0.0)
            start = tl.where(turn == 0, K, cols - BLOCK_K)
            tile = weight_map.load([first, start])
            sums = tl.dot(tile, rows.T, sums)
            if GATED:
                tile = weight_map.load([N + first, start])
                up_sums = tl.dot(tile, rows.T, up_sums)
            rows = next_rows
    else:
        if PDL:
            gdc_wait()
        for start in tl.range(begin, begin + PART, BLOCK_K, num_stages=STAGES):
            # Loads without an operation between them share a barrier.
            rows = rows_map.load([0, start])
            tile = weight_map.load([first, start])
            sums = tl.dot(tile, rows.T, sums)
            if GATED:
                tile = weight_map.load([N + first, start])
                up_sums = tl.dot(tile, rows.T, up_sums)
    return sums.T, up_sums.T


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize=["M"])
def _skinny(
    out, parts, counters, rows_map, weight_map, x, x_stride, bias, residual, norm_weight, squares, eps, M, N, stacked,
    part_stride, num_squares,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, LAST_SUMS: tl.constexpr, ADDS: tl.constexpr, SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, part of the inputs), the parts of a block side by side.

    out [M, N]; parts [SPLIT, M, stacked] float32; counters, one for each block, 0 before and after; x [M, K], and
    rows_map of it in blocks [BLOCK_M, BLOCK_K]; weight_map of [stacked, K] in blocks [_TILE, BLOCK_K]. squares
    [num_squares, M] float32: with ADDS of the sum of result and residual [M, N]; else, where SQUARES, a power of two,
    is not 0, of the rows, which still want a norm's factor.
    """
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    block, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    first, begin = block * _TILE, part * PART
    tokens = tl.arange(0, BLOCK_M)
    outputs = first + tl.arange(0, _TILE)
    if PDL:
        gdc_launch_dependents()
    sums, up_sums = _multiply(
        rows_map, weight_map, x, x_stride, first, begin, M, N, K, BLOCK_M, BLOCK_K, PART, STAGES, EARLY, GATED, PDL
    )
    # Asked for here, these are there when they are needed.
    found = tokens
    old = tokens
    scale = tokens
    if SQUARES > 0:
        numbers = tl.arange(0, SQUARES)
        mask = (numbers < num_squares)[:, None] & (tokens < M)[None, :]
        found = tl.load(squares + numbers[:, None] * M + tokens[None, :], mask, 0.0, cache_modifier=".cg")
    if ADDS:
        mask = (tokens < M)[:, None] & (outputs < N)[None, :]
        old = tl.load(residual + tokens[:, None] * N + outputs[None, :], mask, 0.0, cache_modifier=".cg")
        scale = tl.load(norm_weight + outputs, outputs < N, 0.0)
    if SPLIT > 1:
        leave(parts + part * part_stride, sums, up_sums, tokens, outputs, M, N, stacked, GATED)
    last = SPLIT == 1
    if LAST_SUMS:
        last = arrives_last(counters + block, SPLIT - 1)
    if last:
        result = sums
        up = up_sums
        if LAST_SUMS:
            tl.store(counters + block, 0)
            result, up = all_parts(parts, tokens, outputs, M, N, stacked, part_stride, SPLIT, GATED)
        if SQUARES > 0:
            factors = tl.math.rsqrt(tl.sum(found, 0) / K + eps)[:, None]
            result, up = result * factors, up * factors
        if ADDS:
            _add(out, residual, squares + block * M, result, old, scale, tokens, outputs, M, N)
        else:
            finish(out, result, up, bias, tokens, outputs, M, N, HAS_BIAS, GATED, GELU)


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def reads(x: Tensor, weight: Tensor) -> bool:
    """Whether the copy engine can fetch them: it exists (compute capability 9.0), elements have two bytes, and rows
    begin at multiples of 16 bytes."""
    starts = (x.data_ptr(), weight.data_ptr(), x.stride(0) * 2, weight.stride(0) * 2)
    plain = x.dtype.itemsize == 2 and x.stride(1) == 1 and weight.is_contiguous()
    return plain and not any(start % 16 for start in starts) and _has_copy_engine(x.device)


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Rows of an RMSNorm, multiplied by its weight and not yet by the factor of each."""

    rows: Tensor
    """[M, K]."""
    squares: Tensor
    """[parts, M] float32: what was normed, squared and summed over parts of a row."""
    eps: float


def skinny(
    x: Tensor | Unscaled,
    weight: Tensor,
    choice: SkinnyChoice,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, K] times [N, K] -> [M, N], with a gate [M, N / 2]; M up to 64, and what `reads` asks of x and weight.
    `Unscaled` rows only where `sums_at_once`: their factors are applied to the result."""
    rows = x.rows if isinstance(x, Unscaled) else x
    num_rows = len(rows)
    num_outputs = len(weight) // (1 if gate is None else 2)
    split = choice.split_k
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or rows.dtype, device=rows.device)
    at_once = sums_at_once(num_rows, choice, num_outputs, rows.device)
    parts = out if split == 1 else _parts_of(rows, weight, choice)
    _launch(out, parts, x, weight, choice, at_once=at_once, bias=bias, gate=gate)
    if not at_once:
        combine(out, parts, bias, gate)
    return out


def skinny_add(x: Tensor, weight: Tensor, choice: SkinnyChoice, residual: Tensor, norm: tuple[Tensor, float]
) -> Unscaled:  # fmt: skip
    """The norm (weight [N] and eps) of [M, K] times [N, K] plus the residual [M, N], contiguous, which becomes that
    sum. Only where `sums_at_once`."""
    num_rows, num_outputs = residual.shape
    out = torch.empty_like(residual)
    shape = (triton.cdiv(num_outputs, SKINNY_OUTPUTS), num_rows)
    squares = torch.empty(shape, dtype=torch.float32, device=x.device)
    parts = out if choice.split_k == 1 else _parts_of(x, weight, choice)
    _launch(out, parts, x, weight, choice, at_once=True, added=(residual, norm[0], squares))
    return Unscaled(out, squares, norm[1])


def skinny_parts(x: Tensor, weight: Tensor, choice: SkinnyChoice) -> Tensor:
    """[split_k, M, N] float32, still to be summed in this order; split_k > 1."""
    parts = _parts_of(x, weight, choice)
    _launch(parts, parts, x, weight, choice, at_once=False)
    return parts


def sums_at_once(num_rows: int, choice: SkinnyChoice, num_outputs: int, device: torch.device) -> bool:
    """Whether there is nothing to sum, or the last program of an output does it, not a second kernel."""
    few = num_rows <= LAST_SUMS_ROWS and triton.cdiv(num_outputs, SKINNY_OUTPUTS) <= MAX_COUNTERS
    return choice.split_k == 1 or (few and counters_of(device) is not None)


def _parts_of(x: Tensor, weight: Tensor, choice: SkinnyChoice) -> Tensor:
    return torch.empty(choice.split_k, len(x), len(weight), dtype=torch.float32, device=x.device)


def _launch(
    out: Tensor,
    parts: Tensor,
    x: Tensor | Unscaled,
    weight: Tensor,
    choice: SkinnyChoice,
    *,
    at_once: bool,
    bias: Tensor | None = None,
    gate: str | None = None,
    added: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """`added`: residual, norm's weight, where the squares go."""
    if isinstance(x, Unscaled):
        rows = x.rows
        squares = x.squares
        eps = x.eps
        num_squares = len(x.squares)
    else:
        rows = x
        squares = out
        eps = 0.0
        num_squares = 0
    residual, norm_weight, squares = added or (out, weight, squares)
    (num_rows, size), stacked, split = rows.shape, len(weight), choice.split_k
    num_outputs = stacked // (1 if gate is None else 2)
    block_m = rows_class(num_rows)
    last_sums = at_once and split > 1
    launch.on(_skinny, (triton.cdiv(num_outputs, SKINNY_OUTPUTS) * split,))(
        out, parts, counters_of(rows.device) if last_sums else out,
        TensorDescriptor(rows, [num_rows, size], [rows.stride(0), 1], [block_m, choice.block_k]),
        TensorDescriptor(weight, [stacked, size], [size, 1], [SKINNY_OUTPUTS, choice.block_k]),
        rows, rows.stride(0), rows if bias is None else bias, residual, norm_weight, squares, eps,
        num_rows, num_outputs, stacked, parts.stride(0), num_squares,
        K=size, BLOCK_M=block_m, BLOCK_K=choice.block_k, SPLIT=split, STAGES=choice.num_stages,
        LAST_SUMS=last_sums, ADDS=added is not None, SQUARES=launch.power_of_two(num_squares) if num_squares else 0,
        EARLY=choice.early, HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh",
        PDL=launch.dependent(), **launch.options(choice.num_warps),
    )  # fmt: skip
