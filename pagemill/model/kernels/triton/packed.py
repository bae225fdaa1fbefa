"""Linear layers with weights of packed integers on GPUs, by number of rows. Knows shapes, not layers."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels import ops
from pagemill.model.kernels.packed import PLANE, TILE, Packed
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.packed_choices import MAX_ROWS, PackedChoice, packed_choice
from pagemill.model.kernels.triton.packed_gemv import packed_gemv
from pagemill.model.kernels.triton.packed_rows import packed_rows
from pagemill.model.kernels.triton.packed_unpack import planes_of

MAX_GATED_ROWS = 64
"""Up to here the gated activation is part of the kernel."""
_PLANE = tl.constexpr(PLANE)
_TILE = tl.constexpr(TILE)


def linear(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As kernels.packed.linear: [T, K] -> [T, N], with a gate [T, N / 2]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows = len(x)
    if num_rows > MAX_ROWS or num_rows == 0:
        result = _dense(x, weight, bias)
        return (result if gate is None else ops.gated(result, gate)).to(out_dtype or x.dtype)
    inside = gate if num_rows <= MAX_GATED_ROWS and weight.num_outputs % (2 * TILE) == 0 else None
    outputs = weight.num_outputs if inside is None else weight.num_outputs // 2
    choice = packed_choice(num_rows, (outputs, weight.num_inputs, inside is not None), weight.bits)
    if gate is None or inside is not None:
        return by_choice(x, weight, choice, bias, inside, out_dtype)
    return ops.gated(by_choice(x, weight, choice, bias), gate).to(out_dtype or x.dtype)


def by_choice(
    x: Tensor,
    weight: Packed,
    choice: PackedChoice,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """By the kernel that the choice is for."""
    kernel = packed_gemv if choice.slices else packed_rows
    return kernel(x, weight, choice, bias=bias, gate=gate, out_dtype=out_dtype)


def _dense(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    made = floats(weight, x.dtype)
    if not launch.launches():  # what is only compiled should not take the time of computing
        return x.new_empty(len(x), weight.num_outputs)
    return functional.linear(x, made, bias)


@triton.jit
def _floats(
    out, words, scales, offsets, N, padded, K: tl.constexpr, SPANS: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, HALVES: tl.constexpr, HAS_OFFSETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (64 outputs, span)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    SPAN: tl.constexpr = _PLANE * (16 // BITS)
    tile = tl.program_id(0)
    span = tl.program_id(1)
    inside = tl.arange(0, _TILE)
    lanes = tl.arange(0, _PLANE)
    rows = tile * _TILE + inside
    places = (tile.to(tl.int64) * SPANS + span) * (_TILE * _PLANE) + inside[:, None] * _PLANE + lanes[None, :]
    planes = planes_of(tl.load(words + places), tl.float32, BITS, HALVES, False)
    for plane in tl.static_range(16 // BITS):
        group = (span * SPAN + plane * _PLANE) // GROUP
        values = planes[plane]
        if BITS == 4 and not HALVES:
            values -= 8.0
        if HAS_OFFSETS:
            values += tl.load(offsets + group * padded + rows)[:, None]
        values *= tl.load(scales + group * padded + rows)[:, None]
        columns = span * SPAN + plane * _PLANE + lanes
        targets = out + rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(targets, values.to(out.dtype.element_ty), (rows < N)[:, None] & (columns < K)[None, :])


def floats(weight: Packed, dtype: torch.dtype) -> Tensor:
    """As kernels.packed.floats: [N, K]."""
    out = torch.empty(weight.num_outputs, weight.num_inputs, dtype=dtype, device=weight.words.device)
    launch.on(_floats, (len(weight.words), weight.num_spans))(
        out, weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        weight.num_outputs, weight.scales.shape[1], K=weight.num_inputs, SPANS=weight.num_spans, GROUP=weight.group,
        BITS=weight.bits, HALVES=weight.halves, HAS_OFFSETS=weight.offsets is not None, PDL=launch.dependent(),
        **launch.options(),
    )  # fmt: skip
    return out
