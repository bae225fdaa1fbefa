"""Experts whose weights are packed integers or 4-bit floats (kernels/packed_experts.py): of a few slots each by itself,
of more by expert, as in moe_grouped.py. A slot is a token and one of its experts. Knows shapes, not layers.

Integers become floats between shared memory and the tensor cores, and a group's sums are multiplied with its scales, so
that products are those of the exact integers. The weight is the left operand: its rows fill the wide side of the
tensor cores' instruction. Nothing is read back by the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagemill.model.kernels.moe import ExpertForm
from pagemill.model.kernels.packed import PLANE, TILE, span
from pagemill.model.kernels.packed_experts import PackedExperts
from pagemill.model.kernels.triton import launch
from pagemill.model.kernels.triton.gated import gate_options, gate_times
from pagemill.model.kernels.triton.moe_choices import MAX_FEW_SLOTS, PackedExpertsChoice, packed_experts_choices
from pagemill.model.kernels.triton.moe_grouped import combine
from pagemill.model.kernels.triton.moe_sort import SortedSlots, sort_slots
from pagemill.model.kernels.triton.packed_rows import products

_PLANE = tl.constexpr(PLANE)
_TILE = tl.constexpr(TILE)
_WORDS = tl.constexpr(PLANE * TILE)


@triton.jit
def _tile_of(tile, slots, tiles, max_tiles, first, HERE: tl.constexpr, FEW: tl.constexpr):
    """(expert, place of its first slot, number of slots: 0 of those elsewhere)."""
    if FEW:
        expert = tl.load(slots + tile) - first
        begin = tile
        num_rows = ((expert >= 0) & (expert < HERE)).to(tl.int32)
    else:
        expert = tl.load(tiles + tile)
        begin = tl.load(tiles + max_tiles + tile)
        num_rows = tl.load(tiles + 2 * max_tiles + tile)
    return expert, begin, num_rows


@triton.jit(do_not_specialize=["max_tiles", "first"])
def _packed_experts(
    out, x, weight, scales, offsets, bias, slots, tiles, max_tiles, num_columns, x_stride, first, padded,
    HERE: tl.constexpr, N: tl.constexpr, UPS: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    GROUP: tl.constexpr, SHARE: tl.constexpr, BITS: tl.constexpr, HALVES: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
    FEW: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, HAS_OFFSETS: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of slots of one expert, block of outputs).

    FEW: `slots` are the experts of all slots, and each is a tile. GATED: x [T, K] by token, weights of gates and, from
    output UPS on, which begins a tile, of ups, out [S, N] by tile; else x [S, K] by tile, out [S, N] by slot.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0) // num_columns
    column = tl.program_id(0) % num_columns
    expert, begin, num_rows = _tile_of(tile, slots, tiles, max_tiles, first, HERE, FEW)
    if num_rows > 0:
        EVEN: tl.constexpr = K % SPAN == 0
        chosen = expert.to(tl.int64)
        members = tl.arange(0, BLOCK_M)
        here = members < num_rows
        place = begin + tl.where(here, members, 0)
        slot = place if FEW else tl.load(slots + place)
        outputs = column * BLOCK_N + tl.arange(0, BLOCK_N)
        lanes = tl.arange(0, _PLANE)
        x_places = x + (slot // TOP_K if GATED else place).to(tl.int64)[:, None] * x_stride + lanes[None, :]
        # The words of 64 outputs and a span follow each other, then those of the next span.
        inside = (outputs // _TILE) * (SPANS * _WORDS) + outputs % _TILE * _PLANE
        words = weight + chosen * ((padded // _TILE) * (SPANS * _WORDS)) + inside[:, None] + lanes[None, :]
        GROUPS: tl.constexpr = (SPANS * SPAN + GROUP - 1) // GROUP
        own_scales = scales + chosen * (GROUPS * padded)
        own_offsets = offsets + chosen * (GROUPS * padded)
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for turn in tl.range(0, SPANS, num_stages=STAGES):
            loaded = tl.load(words + turn * _WORDS)
            sums = products(
                sums, loaded, x_places + turn * SPAN, own_scales, own_offsets, outputs, members, turn * SPAN + lanes,
                turn, num_rows, padded, K, GROUP, SHARE, BITS, HALVES, LATE, HAS_OFFSETS, EVEN, ASM,
            )  # fmt: skip
            if GATED:
                loaded = tl.load(words + (UPS // _TILE) * (SPANS * _WORDS) + turn * _WORDS)
                up_sums = products(
                    up_sums, loaded, x_places + turn * SPAN, own_scales, own_offsets, UPS + outputs, members,
                    turn * SPAN + lanes, turn, num_rows, padded, K, GROUP, SHARE, BITS, HALVES, LATE, HAS_OFFSETS,
                    EVEN, ASM,
                )  # fmt: skip
        real = outputs < N
        if BIASED:
            biases = bias + chosen * (2 * N if GATED else N) + outputs
            sums += tl.load(biases, real, 0.0).to(tl.float32)[:, None]
            if GATED:
                up_sums += tl.load(biases + N, real, 0.0).to(tl.float32)[:, None]
        if GATED:
            sums = gate_times(sums, up_sums, GELU, CLAMPED, ALPHA, LIMIT)
        targets = out + (place if GATED else slot).to(tl.int64)[:, None] * N + outputs[None, :]
        tl.store(targets, sums.T.to(out.dtype.element_ty), here[:, None] & real[None, :])


def experts(
    x: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    chosen: Tensor,
    weights: Tensor,
    first: int,
    form: ExpertForm,
) -> Tensor:
    """As kernels.packed_experts.experts: [T, E] -> [T, E]."""
    if not len(x):
        return torch.empty_like(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    chosen = chosen.contiguous()
    weights = weights.contiguous()
    num_experts = len(gate_up.words)
    choices = packed_experts_choices(chosen.numel(), num_experts)
    order = None
    if chosen.numel() > MAX_FEW_SLOTS:
        order = sort_slots(chosen, first, num_experts, choices[0].block_m)
    inner = product(x, gate_up, chosen, order, first, choices[0], form, gated=True)
    parts = product(inner, down, chosen, order, first, choices[1], form, gated=False)
    return combine(parts, chosen, weights, first, num_experts)


def product(
    x: Tensor,
    weight: PackedExperts,
    chosen: Tensor,
    order: SortedSlots | None,
    first: int,
    choice: PackedExpertsChoice,
    form: ExpertForm,
    *,
    gated: bool,
) -> Tensor:
    """[T, E] -> activated [S, I], or [S, I] -> [S, E]: slots in the order of `order`, where there is one, between the
    two. Rows of slots elsewhere are not written."""
    like = weight.like
    with_padding = like.num_outputs // 2 if gated else like.num_outputs
    outputs = with_padding if weight.inner is None else weight.inner
    bias = form.gate_up_bias if gated else form.down_bias
    # Gates of a block end where the ups begin, or the last ups would be those of the next expert.
    block_n = choice.block_n if not gated or with_padding % choice.block_n == 0 else TILE
    num_columns = triton.cdiv(outputs, block_n)
    out = torch.empty(chosen.numel(), outputs, dtype=x.dtype, device=x.device)
    num_tiles = chosen.numel() if order is None else order.max_tiles
    launch.on(_packed_experts, (num_tiles * num_columns,))(
        out, x, weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        out if bias is None else bias, chosen if order is None else order.slots,
        chosen if order is None else order.tiles, num_tiles, num_columns, x.stride(0), first, like.scales.shape[1],
        HERE=len(weight.words), N=outputs, UPS=with_padding, K=like.num_inputs, TOP_K=chosen.shape[1],
        GROUP=like.group, SHARE=min(like.group // PLANE, 16 // like.bits), BITS=like.bits, HALVES=like.halves,
        SPAN=span(like.bits), SPANS=like.num_spans, BLOCK_M=choice.block_m, BLOCK_N=block_n, STAGES=choice.num_stages,
        LATE=choice.late, FEW=order is None, GATED=gated, HAS_OFFSETS=weight.offsets is not None,
        BIASED=bias is not None, ASM=x.is_cuda and torch.version.hip is None and x.dtype.itemsize == 2,
        PDL=launch.dependent(), **gate_options(form), **launch.options(choice.num_warps),
    )  # fmt: skip
    return out
