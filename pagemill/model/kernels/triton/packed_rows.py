"""Rows times a weight of packed integers of 4 or 8 bits, with a scale for each group of inputs of an output, and
perhaps a zero point. Knows no layer; kernels/packed.py has the layout.

The weight, unpacked by packed_unpack.py, is the left operand: its rows fill the wide side of the tensor cores'
instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.packed import PLANE, TILE, Packed, span
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.packed_choices import PackedChoice
from pagemill.model.kernels.triton.packed_unpack import added, planes_of, scaled
from pagemill.model.kernels.triton.parts import LAST_SUMS_ROWS, MAX_COUNTERS, combine, counters_of, end

_PLANE = tl.constexpr(PLANE)
_TILE = tl.constexpr(TILE)
_WORDS = tl.constexpr(PLANE * TILE)
"""Of a tile."""


@triton.jit
def _fetch(address, size):
    """Ask for bytes that follow each other to be brought into the L2 cache, by one thread."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [address, size], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def products(
    sums, words, x_places, scales, offsets, rows, tokens, columns, span, M, padded,
    K: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, BITS: tl.constexpr, HALVES: tl.constexpr,
    LATE: tl.constexpr, HAS_OFFSETS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """sums [N, M] plus one span of inputs of the weight times the rows; so many planes of it SHARE their scales."""
    TYPE: tl.constexpr = x_places.dtype.element_ty
    WIDE: tl.constexpr = TYPE if ASM else tl.float32
    PLANES: tl.constexpr = 16 // BITS
    # What stands for 0, where there are no zero points.
    SHIFTED: tl.constexpr = BITS == 4 and not HALVES
    BIAS: tl.constexpr = (8.0 if not ASM else (136.0 if tl.bfloat16 == TYPE else 1032.0)) if SHIFTED else 0.0
    planes = planes_of(words, TYPE, BITS, HALVES, ASM)
    partial = tl.zeros(sums.shape, tl.float32)
    scale = tl.zeros([words.shape[0]], tl.float32)
    shift = tl.full([words.shape[0]], -BIAS, tl.float32)
    for plane in tl.static_range(PLANES):
        if plane % SHARE == 0:
            group = (span * (_PLANE * PLANES) + plane * _PLANE) // GROUP
            scale = tl.load(scales + group * padded + rows)
            if HAS_OFFSETS:
                shift = tl.load(offsets + group * padded + rows) - BIAS
        values = planes[plane]
        if HAS_OFFSETS or SHIFTED:
            values = added(values, tl.broadcast_to(shift.to(WIDE)[:, None], words.shape), ASM)
        if not LATE:
            values = scaled(values, tl.broadcast_to(scale.to(WIDE)[:, None], words.shape), ASM)
        if EVEN:
            x = tl.load(x_places + plane * _PLANE, (tokens < M)[:, None], 0.0)
        else:
            mask = (tokens < M)[:, None] & (columns + plane * _PLANE < K)[None, :]
            x = tl.load(x_places + plane * _PLANE, mask, 0.0)
        if LATE:
            partial = tl.dot(values.to(TYPE), x.T, partial, input_precision="ieee")
            if plane % SHARE == SHARE - 1:
                sums += partial * scale[:, None]
                partial = tl.zeros(sums.shape, tl.float32)
        else:
            sums = tl.dot(values.to(TYPE), x.T, sums, input_precision="ieee")
    return sums


# Numbers of rows differ from step to step: no step must wait for a variant of its own.
@triton.jit(do_not_specialize=["M", "prefetch"])
def _packed_rows(
    out, parts, counters, x, x_stride, weight, scales, offsets, bias, M, N, stacked, padded, part_stride, prefetch,
    K: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, BITS: tl.constexpr, HALVES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, LATE: tl.constexpr, PREFETCHES: tl.constexpr, LAST_SUMS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs and part of the inputs, block of rows), the parts of a block side by side.

    out [M, N]; parts [SPLIT, M, stacked] float32; counters, one for each block, 0 before and after; x [M, K]; weight,
    scales and offsets as in kernels/packed.py, with `stacked` outputs, which are 2 * N where gated, `padded` with room.
    """
    PART: tl.constexpr = (SPANS + SPLIT - 1) // SPLIT
    EVEN: tl.constexpr = K % SPAN == 0 and SPANS % SPLIT == 0
    block = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first = block * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, _PLANE)
    begin = part * PART
    # The words of 64 outputs and a span follow each other, then those of the next span.
    tiles = weight + (first // _TILE).to(tl.int64) * (SPANS * _WORDS) + begin * _WORDS
    inside = tl.arange(0, BLOCK_N) + first % _TILE
    places = tiles + ((inside // _TILE) * (SPANS * _WORDS) + inside % _TILE * _PLANE)[:, None] + lanes[None, :]
    up_places = places + (tl.program_id(0) * 0 + N // _TILE).to(tl.int64) * (SPANS * _WORDS)
    if PDL:
        gdc_launch_dependents()
        if PREFETCHES:
            for tile in tl.static_range((BLOCK_N + _TILE - 1) // _TILE):
                _fetch(tiles + tile * (SPANS * _WORDS), prefetch)
                if GATED:
                    _fetch(tiles + tile * (SPANS * _WORDS) + (N // _TILE).to(tl.int64) * (SPANS * _WORDS), prefetch)
        gdc_wait()
    x_places = x + tokens.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for turn in tl.range(0, PART, num_stages=STAGES):
        span = begin + turn
        step = turn * _WORDS
        if not EVEN:
            # Beyond the end, the last span again, times rows that are zeros there.
            step = (tl.minimum(span, SPANS - 1) - begin) * _WORDS
        known = span if EVEN else tl.minimum(span, SPANS - 1)
        words = tl.load(places + step)
        sums = products(
            sums, words, x_places + span * SPAN, scales, offsets, rows, tokens, span * SPAN + lanes, known, M, padded,
            K, GROUP, SHARE, BITS, HALVES, LATE, HAS_OFFSETS, EVEN, ASM,
        )  # fmt: skip
        if GATED:
            up_words = tl.load(up_places + step)
            up_sums = products(
                up_sums, up_words, x_places + span * SPAN, scales, offsets, N + rows, tokens, span * SPAN + lanes,
                known, M, padded, K, GROUP, SHARE, BITS, HALVES, LATE, HAS_OFFSETS, EVEN, ASM,
            )  # fmt: skip
    end(
        out, parts, counters, sums.T, up_sums.T, bias, tokens, rows, block, part, M, N, stacked, part_stride,
        SPLIT, LAST_SUMS, HAS_BIAS, GATED, GELU,
    )  # fmt: skip


def packed_rows(
    x: Tensor,
    weight: Packed,
    choice: PackedChoice,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[M, K] times [N, K] -> [M, N]; with a gate [M, N / 2], where N / 2 is a multiple of 64. x has rows side by side,
    of a type of 16 or 32 bits."""
    num_rows, size = x.shape
    num_outputs = weight.num_outputs // (1 if gate is None else 2)
    split = choice.split_k
    out = torch.empty(num_rows, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    shape = (split, num_rows, weight.num_outputs)
    parts = out if split == 1 else torch.empty(shape, dtype=torch.float32, device=x.device)
    block_n = choice.block_n if gate is None or num_outputs % choice.block_n == 0 else TILE
    blocks = triton.cdiv(num_outputs, block_n)
    tiles = triton.cdiv(num_rows, choice.block_m)
    few = num_rows <= LAST_SUMS_ROWS and tiles == 1 and blocks <= MAX_COUNTERS
    counters = counters_of(x.device) if few and split > 1 else None
    by_asm = x.is_cuda and torch.version.hip is None and x.dtype.itemsize == 2
    last_part = weight.num_spans - triton.cdiv(weight.num_spans, split) * (split - 1)
    prefetch = min(choice.prefetch, max(last_part, 0) * PLANE * TILE * 2)
    launch.on(_packed_rows, (blocks * split, tiles))(
        out, parts, out if counters is None else counters, x, x.stride(0), weight.words, weight.scales,
        weight.scales if weight.offsets is None else weight.offsets, out if bias is None else bias,
        num_rows, num_outputs, weight.num_outputs, weight.scales.shape[1], parts.stride(0),
        prefetch, K=size, GROUP=weight.group,
        SHARE=min(weight.group // PLANE, 16 // weight.bits), BITS=weight.bits, HALVES=weight.halves,
        SPAN=span(weight.bits), SPANS=weight.num_spans, BLOCK_M=choice.block_m,
        BLOCK_N=block_n, SPLIT=split, STAGES=choice.num_stages,
        LATE=choice.late,
        PREFETCHES=prefetch > 0 and by_asm and launch.dependent(), LAST_SUMS=counters is not None,
        HAS_OFFSETS=weight.offsets is not None, HAS_BIAS=bias is not None, GATED=gate is not None,
        GELU=gate == "gelu_tanh", ASM=by_asm, PDL=launch.dependent(), **launch.options(choice.num_warps),
    )  # fmt: skip
    if split > 1 and counters is None:
        combine(out, parts, bias, gate)
    return out
