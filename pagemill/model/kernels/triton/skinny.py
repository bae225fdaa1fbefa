"""A few rows (2 to 64) times a weight, tiles fetched by the copy engine (TMA): the weight is read once, at memory
bandwidth. Knows no layer.

A program owns 64 outputs (of each half, where gated) and one part of the inputs. It multiplies the weight by the rows,
not the rows by the weight: the tensor cores' tiles have 64 rows, more than there are tokens. All programs are resident
at once and ask for equally much, so that they end together. Parts of the inputs are summed in order, so that a run
gives the bits of the one before: by the last program of an output to arrive, which saves a kernel, or where more rows
would keep that one program busy for longer than a kernel takes to start, by a second kernel.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.choices import SKINNY_OUTPUTS, SkinnyChoice, rows_class
from pagemill.model.kernels.triton.gated import activate

_TILE = tl.constexpr(SKINNY_OUTPUTS)
_COMBINED = 1024
_LAST_SUMS_ROWS = 16
"""Up to here the last program sums."""
_MAX_COUNTERS = 8192
_counters: dict[torch.device, Tensor] = {}


@triton.jit
def _finish(out, sums, up_sums, bias, tokens, rows, M, N, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
            GELU: tl.constexpr):  # fmt: skip
    """Bias and activation of [BLOCK_M, _TILE], and the store."""
    if HAS_BIAS:
        sums += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            up_sums += tl.load(bias + N + rows, rows < N, 0.0).to(tl.float32)[None, :]
    if GATED:
        sums = activate(sums, GELU) * up_sums
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    tl.store(out + tokens[:, None] * N + rows[None, :], sums.to(out.dtype.element_ty), mask)


@triton.jit
def _leave(part, sums, up_sums, tokens, rows, M, N, stacked, GATED: tl.constexpr):
    """What one part of the inputs gives."""
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    places = part + tokens[:, None] * stacked + rows[None, :]
    tl.store(places, sums, mask)
    if GATED:
        tl.store(places + N, up_sums, mask)


@triton.jit
def _sum_parts(places, part_stride, mask, SPLIT: tl.constexpr):
    """In order. From the L2 cache: other programs wrote them while this one ran."""
    sums = tl.load(places, mask, 0.0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        sums += tl.load(places + part * part_stride, mask, 0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _finish_parts(out, parts, bias, tokens, rows, M, N, stacked, part_stride, SPLIT: tl.constexpr,
                  HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr):  # fmt: skip
    """`_finish` of the sum of what the programs of an output have left."""
    mask = (tokens < M)[:, None] & (rows < N)[None, :]
    places = parts + tokens[:, None] * stacked + rows[None, :]
    sums = _sum_parts(places, part_stride, mask, SPLIT)
    up_sums = sums
    if GATED:
        up_sums = _sum_parts(places + N, part_stride, mask, SPLIT)
    _finish(out, sums, up_sums, bias, tokens, rows, M, N, HAS_BIAS, GATED, GELU)


@triton.jit
def _skinny(
    out, parts, counters, rows_map, weight_map, bias, M, N, stacked, part_stride,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    LAST_SUMS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, part of the inputs), the parts of a block side by side.

    out [M, N]; parts [SPLIT, M, stacked] float32; counters, one for each block, 0 before and after; rows_map of
    [M, K] in blocks [BLOCK_M, BLOCK_K]; weight_map of [stacked, K] in blocks [_TILE, BLOCK_K].
    """
    PART: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    block, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    first, begin = block * _TILE, part * PART
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([_TILE, BLOCK_M], tl.float32)
    up_sums = sums
    for start in tl.range(begin, begin + PART, BLOCK_K, num_stages=STAGES):
        # Loads without an operation between them share a barrier.
        rows = rows_map.load([0, start])
        tile = weight_map.load([first, start])
        sums = tl.dot(tile, rows.T, sums)
        if GATED:
            tile = weight_map.load([N + first, start])
            up_sums = tl.dot(tile, rows.T, up_sums)
    tokens, outputs = tl.arange(0, BLOCK_M), first + tl.arange(0, _TILE)
    if SPLIT == 1:
        _finish(out, sums.T, up_sums.T, bias, tokens, outputs, M, N, HAS_BIAS, GATED, GELU)
    else:
        _leave(parts + part * part_stride, sums.T, up_sums.T, tokens, outputs, M, N, stacked, GATED)
    if LAST_SUMS:
        # All threads have written before one of them tells so.
        tl.debug_barrier()
        if tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(counters + block, 0)
            _finish_parts(out, parts, bias, tokens, outputs, M, N, stacked, part_stride, SPLIT, HAS_BIAS, GATED, GELU)


@triton.jit
def _combine(
    out, parts, bias, M, N, stacked, part_stride,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of outputs)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) + tl.arange(0, 1)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _finish_parts(out, parts, bias, token, outputs, M, N, stacked, part_stride, SPLIT, HAS_BIAS, GATED, GELU)


def _counters_of(device: torch.device) -> Tensor | None:
    """Of programs that have arrived, for each block of outputs, all zero; one kernel at a time uses them, also with
    dependent launch: each waits until the one before has ended. None where they would have to be made while a graph is
    captured, which would write the zeros at each replay only."""
    found = _counters.get(device)
    if found is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        found = _counters[device] = torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)
    return found


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def reads(x: Tensor, weight: Tensor) -> bool:
    """Whether the copy engine can fetch them: it exists (compute capability 9.0), elements have two bytes, and rows
    begin at multiples of 16 bytes."""
    starts = (x.data_ptr(), weight.data_ptr(), x.stride(0) * 2, weight.stride(0) * 2)
    plain = x.dtype.itemsize == 2 and x.stride(1) == 1 and weight.is_contiguous()
    return plain and not any(start % 16 for start in starts) and _has_copy_engine(x.device)


def skinny(
    x: Tensor,
    weight: Tensor,
    choice: SkinnyChoice,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, K] times [N, K] -> [M, N], with a gate [M, N / 2]; M up to 64, and what `reads` asks of x and weight."""
    num_rows, size, gated = len(x), weight.shape[1], gate is not None
    stacked = weight.shape[0]
    num_outputs = stacked // 2 if gated else stacked
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    split, block_m = choice.split_k, rows_class(num_rows)
    num_blocks = triton.cdiv(num_outputs, SKINNY_OUTPUTS)
    parts, counters = out, None
    if split > 1:
        parts = torch.empty(split, num_rows, stacked, dtype=torch.float32, device=x.device)
        if num_rows <= _LAST_SUMS_ROWS and num_blocks <= _MAX_COUNTERS:
            counters = _counters_of(x.device)
    epilogue = {
        "HAS_BIAS": bias is not None, "GATED": gated, "GELU": gate == "gelu_tanh", "PDL": launch.dependent(),
    }  # fmt: skip
    bias = x if bias is None else bias
    sizes = (num_rows, num_outputs, stacked, num_rows * stacked)
    _skinny[(num_blocks * split,)](
        out, parts, out if counters is None else counters,
        TensorDescriptor(x, [num_rows, size], [x.stride(0), 1], [block_m, choice.block_k]),
        TensorDescriptor(weight, [stacked, size], [size, 1], [SKINNY_OUTPUTS, choice.block_k]), bias, *sizes,
        K=size, BLOCK_M=block_m, BLOCK_K=choice.block_k, SPLIT=split, STAGES=choice.num_stages,
        LAST_SUMS=counters is not None, **epilogue, **launch.options(choice.num_warps),
    )  # fmt: skip
    if split > 1 and counters is None:
        block = min(_COMBINED, launch.power_of_two(num_outputs))
        _combine[(num_rows, triton.cdiv(num_outputs, block))](
            out, parts, bias, *sizes, SPLIT=split, BLOCK=block, **epilogue, **launch.options()
        )
    return out
