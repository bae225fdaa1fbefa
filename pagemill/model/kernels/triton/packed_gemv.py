"""One row times a weight of packed integers, without tensor cores: nothing passes through shared memory, and what a
program reads first of the weight is asked for before the kernel before has ended. Knows no layer.

All threads of a program share its outputs, each with inputs of its own, so that a sum is formed in one order. The
integers are multiplied with the constant that unpacking leaves in them; what that adds, and the zero point, is
subtracted with the sum of the inputs of a thread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.packed import PLANE, TILE, Packed, span
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import activate
from pagemill.model.kernels.triton.packed_choices import PackedChoice
from pagemill.model.kernels.triton.packed_unpack import planes_of

_PLANE = tl.constexpr(PLANE)
_TILE = tl.constexpr(TILE)
_WORDS = tl.constexpr(PLANE * TILE)


@triton.jit
def _words(places, known):
    """[N, S, 32] of the weight, once used never again."""
    return tl.load(places + (known * _WORDS)[None, :, None], eviction_policy="evict_first")


@triton.jit
def _inputs(x, spans, plane: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, EVEN: tl.constexpr):
    """[S, 32] float32: the inputs of a plane."""
    columns = (spans * SPAN + plane * _PLANE)[:, None] + tl.arange(0, _PLANE)[None, :]
    if EVEN:
        return tl.load(x + columns).to(tl.float32)
    return tl.load(x + columns, columns < K, 0.0).to(tl.float32)


@triton.jit
def _scales(scales, known, plane: tl.constexpr, rows, padded, GROUP: tl.constexpr, SPAN: tl.constexpr):
    """[N, S] of the groups of a plane, or zero points."""
    group = (known * SPAN + plane * _PLANE) // GROUP
    return tl.load(scales + group[None, :] * padded + rows[:, None])


@triton.jit
def _add(
    sums, words, scale, x, spans, known, scales, offsets, rows, padded,
    K: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, BITS: tl.constexpr, HALVES: tl.constexpr,
    SPAN: tl.constexpr, HAS_OFFSETS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """sums [N, S, 32] plus what these spans of inputs give. `scale` [N, S]: that of the first plane's group."""
    TYPE: tl.constexpr = x.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    # What stands for 0, where there are no zero points.
    SHIFTED: tl.constexpr = BITS == 4 and not HALVES
    BIAS: tl.constexpr = (8.0 if not ASM else (136.0 if tl.bfloat16 == TYPE else 1032.0)) if SHIFTED else 0.0
    planes = planes_of(words, TYPE, BITS, HALVES, ASM)
    part = tl.zeros(words.shape, tl.float32)
    total = tl.zeros([words.shape[1], words.shape[2]], tl.float32)
    for plane in tl.static_range(PLANES):
        value = _inputs(x, spans, plane, K, SPAN, EVEN)
        total += value
        part += planes[plane].to(tl.float32) * value[None, :, :]
        if plane % SHARE == SHARE - 1:
            if plane >= SHARE:
                scale = _scales(scales, known, plane, rows, padded, GROUP, SPAN)
            if HAS_OFFSETS:
                offset = _scales(offsets, known, plane, rows, padded, GROUP, SPAN)
                part += (offset - BIAS)[:, :, None] * total[None, :, :]
            elif SHIFTED:
                part -= BIAS * total[None, :, :]
            sums += part * scale[:, :, None]
            part = tl.zeros(words.shape, tl.float32)
            total = tl.zeros([words.shape[1], words.shape[2]], tl.float32)
    return sums


@triton.jit
def _packed_gemv(
    out, x, weight, scales, offsets, bias, N, padded,
    K: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, BITS: tl.constexpr, HALVES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs), which goes through all inputs, BLOCK_S spans at a time."""
    EVEN: tl.constexpr = K % SPAN == 0 and SPANS % BLOCK_S == 0
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    spans = tl.arange(0, BLOCK_S)
    # The words of 64 outputs and a span follow each other, then those of the next span.
    inside = (rows // _TILE).to(tl.int64) * (SPANS * _WORDS) + rows % _TILE * _PLANE
    places = weight + inside[:, None, None] + tl.arange(0, _PLANE)[None, None, :]
    up_places = places + (tl.program_id(0) * 0 + N // _TILE).to(tl.int64) * (SPANS * _WORDS)
    if PDL:
        gdc_launch_dependents()
    # Beyond the end, the last span again, times inputs that are zeros there.
    known = tl.minimum(spans, SPANS - 1)
    words = _words(places, known)
    scale = _scales(scales, known, 0, rows, padded, GROUP, SPAN)
    up_words = words
    up_scale = scale
    if GATED:
        up_words = _words(up_places, known)
        up_scale = _scales(scales, known, 0, N + rows, padded, GROUP, SPAN)
    if PDL:
        gdc_wait()
    sums = tl.zeros([BLOCK_N, BLOCK_S, _PLANE], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_S, _PLANE], tl.float32)
    for start in tl.static_range(0, SPANS, BLOCK_S):
        now = words
        up_now = up_words
        scale_now = scale
        up_scale_now = up_scale
        here = known
        if start + BLOCK_S < SPANS:
            known = tl.minimum(spans + (start + BLOCK_S), SPANS - 1)
            words = _words(places, known)
            scale = _scales(scales, known, 0, rows, padded, GROUP, SPAN)
            if GATED:
                up_words = _words(up_places, known)
                up_scale = _scales(scales, known, 0, N + rows, padded, GROUP, SPAN)
        sums = _add(
            sums, now, scale_now, x, spans + start, here, scales, offsets, rows, padded,
            K, GROUP, SHARE, BITS, HALVES, SPAN, HAS_OFFSETS, EVEN, ASM,
        )  # fmt: skip
        if GATED:
            up_sums = _add(
                up_sums, up_now, up_scale_now, x, spans + start, here, scales, offsets, N + rows, padded,
                K, GROUP, SHARE, BITS, HALVES, SPAN, HAS_OFFSETS, EVEN, ASM,
            )  # fmt: skip
    result = tl.sum(tl.sum(sums, 2), 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, rows < N, 0.0).to(tl.float32)
    if GATED:
        up = tl.sum(tl.sum(up_sums, 2), 1)
        if HAS_BIAS:
            up += tl.load(bias + N + rows, rows < N, 0.0).to(tl.float32)
        result = activate(result, GELU) * up
    tl.store(out + rows, result.to(out.dtype.element_ty), rows < N)


def packed_gemv(
    x: Tensor,
    weight: Packed,
    choice: PackedChoice,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """[1, K] times [N, K] -> [1, N]; with a gate [1, N / 2], where N / 2 is a multiple of 64. The elements of x are
    side by side."""
    size = x.shape[1]
    num_outputs = weight.num_outputs // (1 if gate is None else 2)
    out = torch.empty(1, num_outputs, dtype=out_dtype or x.dtype, device=x.device)
    launch.on(_packed_gemv, (triton.cdiv(num_outputs, choice.block_n),))(
        out, x, weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        out if bias is None else bias, num_outputs, weight.scales.shape[1], K=size, GROUP=weight.group,
        SHARE=min(weight.group // PLANE, 16 // weight.bits), BITS=weight.bits, HALVES=weight.halves,
        SPAN=span(weight.bits), SPANS=weight.num_spans,
        BLOCK_N=choice.block_n, BLOCK_S=choice.slices, HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=bias is not None, GATED=gate is not None, GELU=gate == "gelu_tanh",
        ASM=x.is_cuda and torch.version.hip is None and x.dtype.itemsize == 2, PDL=launch.dependent(),
        **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
